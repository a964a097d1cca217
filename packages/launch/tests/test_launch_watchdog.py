"""What the watchdog of a rank does at status queries, claims and errors, in one process."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but its own types don't say so

from mimo.launch import ProcessInfo, Status
from mimo.launch.faults import watchdog as _watch
from mimo.launch.runtime import Fault, FaultStore, Terms, Watchdog


def test_two_that_ask_at_once_answer_each_other() -> None:
    """Each begins its query before the other has answered; as both made progress lately no rank is named."""
    store, both, reported = HashStore(), threading.Barrier(2), list[Fault]()

    class Slow(FaultStore):
        def begin_query(self) -> int:
            both.wait(10)
            number = super().begin_query()
            both.wait(10)
            return number

    watches = [
        Watchdog(
            Slow(store),
            ProcessInfo(rank=rank, world=2, local_rank=rank),
            Terms(),
            shows=False,
            report=reported.append,
            leave=print,
        )
        for rank in range(2)
    ]
    asking = [threading.Thread(target=watch._query_all) for watch in watches]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(30)
    assert reported == []


def test_only_sigterm_is_taken_for_the_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that goes may send several SIGHUPs, seconds apart."""
    ended: list[int] = []
    monkeypatch.setattr(_watch, "end", ended.append)
    monkeypatch.setattr(Watchdog, "_handle_signals", lambda _: None)
    monkeypatch.setattr(_watch, "stop_signals", lambda: (signal.SIGTERM, signal.SIGHUP))
    process = ProcessInfo(rank=0, world=1, local_rank=0)
    watch = Watchdog(FaultStore(HashStore()), process, Terms(stops=True), shows=True, report=print, leave=print)
    for number, expected in ((signal.SIGHUP, []), (signal.SIGHUP, []), (signal.SIGTERM, [143])):
        watch._sender.send(bytes([number]))
        watch._pause()
        assert ended == expected
        assert process.heartbeat.stops
        assert watch._stop_asked is not None
        watch._stop_asked -= 2


def test_whoever_finds_a_fault_claimed_waits_for_it_and_takes_its_code() -> None:
    """It answers status queries meanwhile, so that it is not named itself."""
    fault_store, left = FaultStore(HashStore()), list[Fault]()
    process = ProcessInfo(rank=1, world=2, local_rank=1)
    watch = Watchdog(fault_store, process, Terms(timeout=0), shows=False, report=left.append, leave=left.append)
    fault_store.report(0, Status(left=True))
    assert fault_store.first(0) is None
    thread = threading.Thread(target=watch._query_all)
    thread.start()
    time.sleep(0.5)
    assert set(fault_store.query([1], 5)) == {1}
    fault_store.publish(Fault(rank=0, code=16, text="", explained=True))
    thread.join(30)
    assert [fault.code for fault in left] == [16]


def test_a_claim_without_a_fault_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of those who wait for it."""
    monkeypatch.setattr("mimo.launch.faults.fault._PUBLISHED_SECONDS", 0.1)
    fault_store = FaultStore(HashStore())
    assert fault_store.first(0) is None
    assert fault_store.first(1) is None
    assert not fault_store.claim(0)


def test_a_watch_survives_a_look_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported once, and a fault of another rank is found later."""
    store, looks, left = HashStore(), list[int](), threading.Event()

    class Slow(FaultStore):
        def changes(self) -> int:
            looks.append(1)
            if len(looks) < 3:
                raise KeyError("odd")
            return super().changes()

    process = ProcessInfo(rank=0, world=1, local_rank=0)
    watch = Watchdog(Slow(store), process, Terms(), shows=False, report=print, leave=lambda _: left.set())
    watch.start()
    FaultStore(store).publish(Fault(rank=0, code=3, text="", explained=True))
    assert left.wait(10)
    watch.stop()
    assert capsys.readouterr().err.count("Traceback") == 1

"""What the watch of a rank makes of roll calls, claims and errors, in one process."""

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
    """Each calls the roll before the other has told anything; as both have gone on lately nobody is named."""
    store, both, told = HashStore(), threading.Barrier(2), list[Fault]()

    class Board(FaultStore):
        def call_roll(self) -> int:
            both.wait(10)
            number = super().call_roll()
            both.wait(10)
            return number

    watches = [
        Watchdog(
            Board(store),
            ProcessInfo(rank=rank, world=2, local_rank=rank),
            Terms(),
            shows=False,
            tell=told.append,
            leave=print,
        )
        for rank in range(2)
    ]
    asking = [threading.Thread(target=watch._ask_all) for watch in watches]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(30)
    assert told == []


def test_only_sigterm_is_taken_for_the_second_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that goes may send several SIGHUPs, seconds apart."""
    ended: list[int] = []
    monkeypatch.setattr(_watch, "end", ended.append)
    monkeypatch.setattr(Watchdog, "_listen", lambda _: None)
    monkeypatch.setattr(_watch, "stop_signals", lambda: (signal.SIGTERM, signal.SIGHUP))
    place = ProcessInfo(rank=0, world=1, local_rank=0)
    watch = Watchdog(FaultStore(HashStore()), place, Terms(stops=True), shows=True, tell=print, leave=print)
    for number, expected in ((signal.SIGHUP, []), (signal.SIGHUP, []), (signal.SIGTERM, [143])):
        watch._mouth.send(bytes([number]))
        watch._pause()
        assert ended == expected
        assert place.progress.stops
        assert watch._asked is not None
        watch._asked -= 2


def test_whoever_finds_a_fault_claimed_waits_for_it_and_takes_its_code() -> None:
    """It answers roll calls meanwhile, so that it is not named itself."""
    board, left = FaultStore(HashStore()), list[int]()
    place = ProcessInfo(rank=1, world=2, local_rank=1)
    watch = Watchdog(board, place, Terms(timeout=0), shows=False, tell=lambda _: left.append(-1), leave=left.append)
    board.tell(0, Status(left=True))
    assert board.first(0) is None
    thread = threading.Thread(target=watch._ask_all)
    thread.start()
    time.sleep(0.5)
    assert set(board.answers([1], 5)) == {1}
    board.publish(Fault(rank=0, code=16, text="", explained=True))
    thread.join(30)
    assert left == [16]


def test_a_claim_of_which_nothing_is_heard_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of those who wait for it."""
    monkeypatch.setattr("mimo.launch.faults.fault._PUBLISHED_SECONDS", 0.1)
    board = FaultStore(HashStore())
    assert board.first(0) is None
    assert board.first(1) is None
    assert not board.claim(0)


def test_a_watch_survives_a_look_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told of once, and a fault of another rank is heard later."""
    store, looks, left = HashStore(), list[int](), threading.Event()

    class Board(FaultStore):
        def rings(self) -> int:
            looks.append(1)
            if len(looks) < 3:
                raise KeyError("odd")
            return super().rings()

    place = ProcessInfo(rank=0, world=1, local_rank=0)
    watch = Watchdog(Board(store), place, Terms(), shows=False, tell=print, leave=lambda _: left.set())
    watch.start()
    FaultStore(store).publish(Fault(rank=0, code=3, text="", explained=True))
    assert left.wait(10)
    watch.stop()
    assert capsys.readouterr().err.count("Traceback") == 1

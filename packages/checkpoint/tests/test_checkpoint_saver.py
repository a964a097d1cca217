"""A `Saver` of one process: each step holds its own numbers, whatever was kept, skipped, or went wrong before."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mimo.checkpoint import Saver, WriteError, _folder, _saver, _writer, latest, load, read_manifest, verify
from mimo.checkpoint._boxes import Box
from mimo.checkpoint._folder import Keep
from mimo.checkpoint._plan import plan_together
from mimo.checkpoint._ranks import Ranks
from mimo.checkpoint._staging import Staging
from mimo.checkpoint._tensors import view_bytes
from mimo.checkpoint._writer import Cut, lay_out
from mimo.hooks import CheckpointError, Common, Owned

ABOUT: dict[str, Any] = {"config": {}, "topology": {}}


def value_of(step: Path) -> float:
    """Load the tensor ``x`` of a step."""
    target = torch.zeros(4)
    load(step, {"x": target})
    return target[0].item()


def names(folder: Path) -> list[str]:
    """List a folder."""
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def opened(folder: Path, **more: Any) -> Iterator[Saver]:
    """Make a saver, and close it if nothing went wrong."""
    saver = Saver(folder, **more)
    yield saver
    saver.close()


class Gate:
    """Holds up the sync of every file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        real = os.fsync

        def wait(file: int) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            real(file)

        monkeypatch.setattr(os, "fsync", wait)


def fail_to_write(*_: Any) -> None:
    """Be a system call on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_step_holds_its_own_numbers(tmp_path: Path, asynchronous: bool) -> None:
    """Weights and values that change in place straight after each save returns are not those of another step."""
    weight, history = torch.zeros(4), [0]
    with opened(tmp_path, asynchronous=asynchronous) as saver:
        for step in (1, 2, 3):
            weight.fill_(step)
            history[0] = step
            assert (
                saver.save(step, {"x": weight, "history": Common(history)}, **ABOUT) == tmp_path / f"step_0000000{step}"
            )
            weight.fill_(-1)
            history[0] = -1
    for step in (1, 2, 3):
        assert value_of(tmp_path / f"step_0000000{step}") == step
        assert read_manifest(tmp_path / f"step_0000000{step}").common == {"history": [step]}
        verify(tmp_path / f"step_0000000{step}")


def test_other_tensors_of_the_same_structure_are_those_saved(tmp_path: Path) -> None:
    """A plan that is kept knows names, not tensors: a tree made anew is found."""
    with opened(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, {"x": torch.full((4,), float(step))}, **ABOUT)
    assert [value_of(tmp_path / f"step_0000000{step}") for step in (1, 2)] == [1, 2]


class Change(NamedTuple):
    """A tree and the one saved after it."""

    before: dict[str, Any]
    after: dict[str, Any]


CHANGES = {
    "a tensor more": Change({}, {"y": torch.arange(3.0)}),
    "a tensor gone": Change({"y": torch.arange(3.0)}, {}),
    "another shape": Change({"y": torch.arange(3.0)}, {"y": torch.arange(4.0)}),
    "same bytes, another shape": Change({"y": torch.arange(6.0).view(2, 3)}, {"y": torch.arange(6.0).view(3, 2)}),
    "another dtype": Change({"y": torch.arange(3.0)}, {"y": torch.arange(3)}),
    "a value more": Change({}, {"fault": Common({"step": 3})}),
    "a value gone": Change({"fault": Common({"step": 3})}, {}),
    "another owner": Change({"lr": Owned(1.0, "vision")}, {"lr": Owned(1.0, "language")}),
    "no owner": Change({"lr": Owned(1.0, "vision")}, {"lr": Common(1.0)}),
    "a tensor for a value": Change({"y": Common(1)}, {"y": torch.arange(3.0)}),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_is_planned_anew(tmp_path: Path, change: str, asynchronous: bool) -> None:
    """What has come is saved, what has gone is not, and what has changed loads as it is now; and back again."""
    before, after = ({"x": torch.ones(4), **tree} for tree in CHANGES[change])
    with opened(tmp_path, asynchronous=asynchronous) as saver:
        for step, tree in enumerate((before, before, after, after, before), start=1):
            saver.save(step, tree, **ABOUT)
    for step, tree in enumerate((before, before, after, after, before), start=1):
        folder = tmp_path / f"step_0000000{step}"
        blank = {
            name: torch.full_like(leaf, -1) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in tree.items()
        }
        found: dict[str, Any] = dict(load(folder, blank, refuse_left=True).tree)
        for name, leaf in tree.items():
            assert torch.equal(found[name], leaf) if isinstance(leaf, torch.Tensor) else found[name] == leaf


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by one with each plan that is made."""
    made: list[str] = []

    def count(*args: Any, where: str, **more: Any) -> Any:
        made.append(where)
        return plan_together(*args, where=where, **more)

    monkeypatch.setattr(_saver, "plan_together", count)
    return made


@pytest.mark.parametrize(("constant", "plans"), [(True, 1), (False, 3)])
def test_a_plan_is_kept_only_if_that_is_allowed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    constant: bool,
    plans: int,
) -> None:
    """With `assume_constant_structure` three saves of one structure are planned once, without it three times."""
    made = count_plans(monkeypatch)
    with opened(tmp_path, assume_constant_structure=constant) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"x": torch.full((4,), float(step)), "v": Common(step)}, **ABOUT)
    assert len(made) == plans
    assert value_of(tmp_path / "step_00000003") == 3


def test_a_plan_does_not_come_back_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that can't be saved is refused with its key, and the next good one is planned."""
    made = count_plans(monkeypatch)
    with opened(tmp_path) as saver:
        saver.save(1, {"x": torch.ones(4)}, **ABOUT)
        with pytest.raises(CheckpointError, match=r"bad: expected a tensor, .*got a builtins\.object"):
            saver.save(2, {"bad": object()}, **ABOUT)
        with pytest.raises(CheckpointError, match=r"x: expected a dense tensor with data, got a meta tensor"):
            saver.save(2, {"x": torch.ones(4, device="meta")}, **ABOUT)
        saver.save(3, {"x": torch.full((4,), 3.0)}, **ABOUT)
    assert len(made) == 4
    assert value_of(tmp_path / "step_00000003") == 3


def test_saving_returns_before_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is committed when `save` returns; `wait` returns when it is."""
    gate = Gate(monkeypatch)
    with opened(tmp_path, asynchronous=True) as saver:
        saver.save(1, {"x": torch.ones(4)}, **ABOUT)
        assert gate.reached.wait(60)
        assert latest(tmp_path) is None
        gate.opened.set()
        saver.wait()
        assert latest(tmp_path) == tmp_path / "step_00000001"


def test_leaving_waits_for_the_last_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` returns when the step is committed."""
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path, asynchronous=True)
    saver.save(1, {"x": torch.ones(4)}, **ABOUT)
    assert gate.reached.wait(60)
    threading.Timer(0.2, gate.opened.set).start()
    saver.close()
    assert latest(tmp_path) == tmp_path / "step_00000001"


def test_a_busy_saver_skips_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is left out, the one being written is not disturbed, and the one after is saved."""
    gate = Gate(monkeypatch)
    with opened(tmp_path, asynchronous=True, when_busy="skip") as saver:
        saver.save(1, {"x": torch.full((4,), 1.0)}, **ABOUT)
        assert gate.reached.wait(60)
        assert saver.save(2, {"x": torch.full((4,), 2.0)}, **ABOUT) is None
        gate.opened.set()
        saver.wait()
        assert saver.save(3, {"x": torch.full((4,), 3.0)}, **ABOUT) is not None
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003"]
    assert value_of(tmp_path / "step_00000001") == 1


@pytest.mark.parametrize(("when_busy", "now"), [("wait", False), ("wait", True), ("skip", True)])
def test_a_busy_saver_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: Any, now: bool) -> None:
    """By default, and always for a step that must be there on return, the one before is committed first."""
    gate = Gate(monkeypatch)
    with opened(tmp_path, asynchronous=True, when_busy=when_busy) as saver:
        saver.save(1, {"x": torch.full((4,), 1.0)}, **ABOUT)
        assert gate.reached.wait(60)
        threading.Timer(0.2, gate.opened.set).start()
        saver.save(2, {"x": torch.full((4,), 2.0)}, **ABOUT, now=now)
        assert "step_00000001" in names(tmp_path)
        assert not now or latest(tmp_path) == tmp_path / "step_00000002"
    assert [value_of(tmp_path / f"step_0000000{step}") for step in (1, 2)] == [1, 2]


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_the_next_call_reports_lost_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: Any) -> None:
    """A thread that ends without an outcome can't be taken for one that writes or has written."""

    def lose(*_: Any, **more: Any) -> Any:
        raise SystemExit("connection closed")  # whatever it is

    saver = Saver(tmp_path, asynchronous=True, when_busy=when_busy)
    monkeypatch.setattr(_saver, "write_together", lose)
    saver.save(1, {"x": torch.ones(4)}, **ABOUT)
    assert saver._thread is not None
    saver._thread.join()
    monkeypatch.setattr(Ranks, "all_true", None)  # nobody asks those who are gone
    for call in (saver.take_failure, lambda: saver.save(2, {"x": torch.ones(4)}, **ABOUT), saver.wait):
        with pytest.raises(SystemExit, match="connection closed"):
            call()


def test_writing_before_training_continues_reports_progress(tmp_path: Path) -> None:
    """Each few MiB, in the thread that waits."""
    calls: list[threading.Thread] = []
    with opened(tmp_path, on_progress=lambda: calls.append(threading.current_thread())) as saver:
        saver.save(1, {"x": torch.ones(5 << 20)}, **ABOUT)  # 20 MiB
    assert len(calls) >= 5
    assert set(calls) == {threading.current_thread()}


def test_writing_beside_training_reports_progress_only_while_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports only what it writes: neither a training loop that hangs nor a disk that does looks like progress."""
    monkeypatch.setattr(_saver, "_LOOK_SECONDS", 0.02)
    calls: list[threading.Thread] = []
    part, parts = torch.ones(1 << 18), 40
    stalled, resumed = threading.Event(), threading.Event()

    def data(_: Any) -> Iterator[memoryview]:
        for index in range(parts):
            if index == 10:
                stalled.set()
                assert resumed.wait(60)
            elif index > 10:
                time.sleep(0.02)
            yield view_bytes(part)

    with opened(tmp_path, asynchronous=True, on_progress=lambda: calls.append(threading.current_thread())) as saver:
        monkeypatch.setattr(saver._staging, "data", data)
        saver.save(1, {"x": torch.ones(parts << 18)}, **ABOUT)
        assert stalled.wait(60)
        time.sleep(0.1)
        assert not calls
        found: list[int] = []

        def free() -> None:
            found.append(len(calls))
            resumed.set()

        threading.Timer(0.3, free).start()
        saver.wait()
    assert found == [0]
    assert len(calls) >= 5
    assert set(calls) == {threading.current_thread()}


def test_reading_reports_progress(tmp_path: Path) -> None:
    """Each block."""
    with opened(tmp_path) as saver:
        step = saver.save(1, {"x": torch.ones(5 << 18)}, **ABOUT)  # 5 MiB
    assert step is not None
    calls: list[int] = []
    load(step, {"x": torch.zeros(5 << 18)}, on_progress=lambda: calls.append(1))
    assert len(calls) == 5


def test_a_failed_write_is_reported_once_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It isn't raised where training continues; nothing is left of it, and older steps are whole."""
    with opened(tmp_path, asynchronous=True) as saver:
        saver.save(1, {"x": torch.ones(4)}, **ABOUT)
        saver.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_to_write)
            saver.save(2, {"x": torch.ones(4)}, **ABOUT)
            saver.wait()
        failure = saver.take_failure()
        assert isinstance(failure, WriteError)
        assert str(failure) == (
            f"{tmp_path / 'step_00000002'}: expected no failure, got OSError: [Errno 28] No space left on device. "
            "Older checkpoints are whole. Make room, or look at the disk."
        )
        assert saver.take_failure() is None
        assert names(tmp_path) == ["latest", "step_00000001"]
        saver.save(3, {"x": torch.full((4,), 3.0)}, **ABOUT)
    assert value_of(tmp_path / "step_00000003") == 3
    verify(tmp_path / "step_00000001")


@pytest.mark.parametrize("more", [{}, {"asynchronous": True, "now": True}], ids=["synchronous", "now"])
def test_a_write_that_is_waited_for_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, bool]
) -> None:
    """Without a background there is nothing to be reported later."""
    now = more.pop("now", False)
    with opened(tmp_path, **more) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_to_write)
            with pytest.raises(WriteError, match=r"step_00000001: .* No space left on device"):
                saver.save(1, {"x": torch.ones(4)}, **ABOUT, now=now)
        assert saver.take_failure() is None
        saver.save(2, {"x": torch.full((4,), 2.0)}, **ABOUT, now=now)
        assert value_of(tmp_path / "step_00000002") == 2


def test_other_background_failures_are_no_write_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake isn't taken for a full disk; several are reported in their order."""
    with opened(tmp_path, asynchronous=True) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(_writer, "checksum", lambda data: 1 // 0)
            saver.save(1, {"x": torch.ones(4)}, **ABOUT)
            saver.wait()
        saver.save(2, {"x": torch.ones(4), "v": Common(1)}, **ABOUT)
        saver.save(3, {"x": torch.ones(4), "v": Common((1, 2))}, **ABOUT)
        saver.wait()
        failures = [saver.take_failure(), saver.take_failure(), saver.take_failure()]
    assert [type(failure) for failure in failures] == [CheckpointError, CheckpointError, type(None)]
    assert "step_00000001: expected no failure, got ZeroDivisionError" in str(failures[0])
    assert "v: expected a JSON value" in str(failures[1])
    assert names(tmp_path) == ["latest", "step_00000002"]


def test_a_disk_without_room_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't fit is refused before the disk is filled, which would fail all others who write to it."""

    class Disk(NamedTuple):
        total: int = 1 << 30
        used: int = 0
        free: int = (1 << 20) + 15

    with opened(tmp_path) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: Disk())
            saver.save(1, {"x": torch.ones(3)}, **ABOUT)
            with pytest.raises(WriteError, match=r"expected 1,048,592 bytes free on its disk, got 1,048,591\. Older"):
                saver.save(2, {"x": torch.ones(4)}, **ABOUT)
        saver.save(3, {"x": torch.ones(4)}, **ABOUT)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_older_steps_whole(
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    """Seen beforehand or met half way, the step is not there, nothing of it is left, and a later one is saved."""
    mebibyte = torch.zeros(1 << 18)
    with opened(small_disk, asynchronous=asynchronous) as saver:
        for step, (size, seen) in enumerate([(1, True), (4, True), (4, False), (1, True)], start=1):
            with monkeypatch.context() as patch:
                if not seen:
                    patch.setattr(_folder, "_SPARE_BYTES", -(1 << 30))
                tree = {f"x{index}": mebibyte + step for index in range(size)}
                try:
                    saver.save(step, tree, **ABOUT)
                    saver.wait()
                    failure = saver.take_failure()
                except WriteError as error:
                    failure = error
            assert (failure is None) == (step in (1, 4)), failure
            if step == 2:
                assert "bytes free on its disk" in str(failure)
            if step == 3:
                assert "OSError: [Errno 28] No space left on device" in str(failure)
    assert names(small_disk) == ["latest", "step_00000001", "step_00000004"]
    verify(small_disk / "step_00000001")
    verify(small_disk / "step_00000004")


def test_a_kill_while_writing_leaves_the_older_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies in the middle of a background write leaves its older checkpoint, and the next one works."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        saver = Saver(tmp_path, asynchronous=True)
        saver.save(1, {"x": torch.full((4,), 1.0)}, **ABOUT)
        saver.wait()
        gate = Gate(monkeypatch)
        saver.save(2, {"x": torch.full((4,), 2.0)}, **ABOUT)
        gate.reached.wait(60)
        os.write(write, b"!")
        gate.opened.wait()
        os._exit(0)
    os.read(read, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert any(".partial-" in name for name in names(tmp_path))
    found = latest(tmp_path)
    assert found is not None
    assert value_of(found) == 1
    with opened(tmp_path, asynchronous=True) as saver:
        saver.save(2, {"x": torch.full((4,), 2.0)}, **ABOUT)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    assert value_of(tmp_path / "step_00000002") == 2


def test_every_nth_step_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """Multiples of `keep_every` stay however old they are."""
    with opened(tmp_path, keep=2, keep_every=4) as saver:
        for step in range(1, 11):
            saver.save(step, {"x": torch.full((4,), float(step))}, **ABOUT)
    assert names(tmp_path) == ["latest", *(f"step_{step:08d}" for step in (4, 8, 9, 10))]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"newest": 0}, r"checkpoint\.keep: expected at least 1, got 0\. Leave it out"),
        ({"newest": 1, "every": 0}, r"checkpoint\.keep_every: expected at least 1, got 0"),
        ({"every": 5}, r"checkpoint\.keep_every: expected a number for keep beside it, got none"),
    ],
)
def test_numbers_to_keep_that_make_no_sense_are_refused(more: dict[str, int], message: str) -> None:
    """Below one, or every n-th where all are kept."""
    with pytest.raises(CheckpointError, match=message):
        Keep(**more)


def test_buffers_are_used_again(tmp_path: Path) -> None:
    """Staging takes memory once for one layout, each tensor where the file has it, and gives it back for another."""
    cuts = [
        Cut(name="a", box=Box((0,), (3,)), dtype=torch.float32),
        Cut(name="b", box=Box((), ()), dtype=torch.int64),
        Cut(name="c", box=Box((0, 0), (2, 2)), dtype=torch.bool),
    ]
    tensors = {"a": torch.arange(3.0), "b": torch.tensor(7), "c": torch.eye(2, dtype=torch.bool)}
    layouts, staging = lay_out(0, cuts), Staging()
    places = []
    for step in range(2):
        staging.copy(layouts, {**tensors, "b": torch.tensor(step)})
        (view,) = staging.data(layouts[0])
        assert bytes(view[:8]) == step.to_bytes(8, "little")
        assert bytes(view[8:]) == struct.pack("<3f4?", 0, 1, 2, True, False, False, True)
        places.append(staging._buffers[layouts[0].shard].data_ptr())  # that it is the same memory
    assert places[0] == places[1]
    staging.copy(lay_out(0, cuts[:1]), tensors)
    assert [len(view) for view in staging.data(layouts[0])] == [12]


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the page on checkpoints saves what it says."""
    page = Path(__file__).parents[3] / "docs" / "checkpoints.md"
    (program,) = re.findall(r"```python\n(.*?Saver\(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program, {})  # noqa: S102  # our own page
    assert names(tmp_path / "checkpoints") == ["latest", "step_00000002", "step_00000003"]
    for step in (2, 3):
        target = torch.zeros(4)
        load(tmp_path / "checkpoints" / f"step_0000000{step}", {"model": {"weight": target}})
        assert (target == step).all()

"""Samples of later steps are read and prepared beside the one that runs, each item once; errors wait for their step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from mimo.data import PlacedItem, SampleLayout
from mimo.hooks import DataError, ItemInfo
from mimo.launch import Heartbeat, Status
from mimo.model import EncoderSpec
from mimo.topology import Grid
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.batch.step_loader import StepLoader
from mimo.trainer.config.settings import DataSettings
from mimo.trainer.items.staging import Staging

PATIENCE = 60.0
LAST = 6


@attrs.frozen(kw_only=True)
class NoConfig:
    pass


@attrs.define(kw_only=True)
class Numbers:
    """A dataset of a sample a number, each with one item, which notes what is read of it and where."""

    read: list[tuple[str, int]] = attrs.field(factory=list)
    threads: set[int] = attrs.field(factory=set)
    intra_op: set[int] = attrs.field(factory=set)
    broken: frozenset[int] = frozenset()
    gate: threading.Event = attrs.field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        """Let everything through, unless a test says otherwise."""
        self.gate.set()

    def raw(self, sample: int, _index: int) -> int:
        self.gate.wait(PATIENCE)
        self.read.append(("item", sample))
        self.threads.add(threading.get_ident())
        self.intra_op.add(torch.get_num_threads())
        if sample in self.broken:
            raise DataError(self.where(sample), expected="a number", got="none")
        return sample

    def where(self, sample: int) -> str:
        return f"numbers:{sample}"


def _prepare(_config: NoConfig, raw: int) -> Mapping[str, Tensor]:
    return {"number": torch.full((10,), raw, dtype=torch.float32)}


EYE = EncoderSpec(
    name="eye",
    config=NoConfig,
    measure=lambda _raw: (1,),
    rows=lambda _config, _size: 1,
    prepare=_prepare,
    build=lambda _config, _hidden: pytest.fail("nothing is built"),
)
GRID = Grid(name="vision", ranks=(0,))
MODULE: Any = SimpleNamespace(
    name="vision",
    modality="image",
    feeds=("language",),
    feeds_language=True,
    distil=None,
    is_of_teacher=False,
    is_generator=False,
    spec=EYE,
    config=NoConfig(),
    grid=GRID,
)
PLACE = GRID.coordinates(0)


def _lay_out_all(data: Numbers, samples: Sequence[int]) -> list[SampleLayout]:
    return [_lay_out(data, sample) for sample in samples]


def _lay_out(data: Numbers, sample: int) -> SampleLayout:
    data.read.append(("layout", sample))
    if -sample in data.broken:
        raise DataError(data.where(sample), expected="a sample", got="none")
    item = PlacedItem(
        info=ItemInfo(sample=sample, index=0, modality="image", size=(1,)),
        runs=((0, 1),),
    )
    none = np.zeros(4, np.int64)
    return SampleLayout(sample=sample, tokens=none, labels=none, items=(item,), truncated=False)


@contextlib.contextmanager
def loading(
    data: Numbers,
    *,
    progress: Heartbeat | None = None,
    reach: int = 1,
    staging: Staging | None = None,
    **settings: Any,
) -> Iterator[StepLoader]:
    """Yield a loader of steps of two microbatches: samples 10 s and 10 s + 1, of step s."""
    job: Any = SimpleNamespace(lay_out_all=_lay_out_all)

    def cut(step: int) -> StepData:
        microbatches = tuple(Microbatch(job, data, [10 * step + n]) for n in range(2))  # type: ignore[arg-type]
        return StepData(make=lambda: [(each, (place,)) for place, each in enumerate(microbatches)])

    loader = StepLoader(
        cut=cut,
        places=[(MODULE, PLACE)],
        settings=DataSettings(plugin="numbers", **settings),
        reach=reach,
        last=LAST,
        progress=progress or Heartbeat(doing="step 1"),
        staging=staging,
    )
    with contextlib.closing(loader):
        yield loader
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "mimo-data"])


def items_of(data: StepData) -> list[int]:
    """Return what an encoder is given of a step."""
    items = [item for microbatch in data.microbatches for item in microbatch.prepare(MODULE, 0)]
    return [int(item["number"][0]) for item in items]


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when something that threads bring about is so; fail if that never comes."""
    for _ in range(int(PATIENCE * 1000)):
        if condition():
            return
        threading.Event().wait(0.001)
    pytest.fail("it never came")


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("ahead_bytes", [0, 50, 1 << 20])
def test_each_step_has_its_own_items_and_each_is_decoded_once(workers: int, ahead: int, ahead_bytes: int) -> None:
    """Whatever the number of threads, how far they are ahead, and how little they may hold."""
    data = Numbers()
    with loading(data, workers=workers, ahead=ahead, ahead_bytes=ahead_bytes) as loader:
        for step in range(1, LAST + 1):
            assert items_of(loader.load(step)) == [10 * step, 10 * step + 1]
    wanted = [(what, 10 * step + n) for step in range(1, LAST + 1) for n in range(2) for what in ("layout", "item")]
    assert sorted(data.read) == sorted(wanted)


class HostCopier:
    """Copies within host memory, and counts them."""

    count = 0

    def begin_thread(self) -> None:
        """Nothing differs between threads here."""

    def pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        self.count += 1
        return source.clone(), SimpleNamespace(synchronize=lambda: None)

    def receive(self, _sent: Tensor, _event: Any) -> None:
        pass


@pytest.mark.parametrize("workers", [1, 3])
def test_the_items_of_a_step_are_sent_together_as_they_are_decoded(workers: int) -> None:
    """One copy for each step whose items are all there before the first is needed; the same items in any case."""
    data, copier = Numbers(), HostCopier()
    with loading(data, workers=workers, ahead=1, staging=Staging(copier, max_bytes=1 << 20)) as loader:
        for step in range(1, LAST + 1):
            loaded = loader.load(step)
            wait_until(lambda step=step: len(data.read) == 4 * min(step + 1, LAST))  # type: ignore[misc]  # a default
            wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "mimo-data"])
            assert copier.count == min(step + 1, LAST)
            assert items_of(loaded) == [10 * step, 10 * step + 1]
    assert copier.count == LAST


def test_nothing_is_sent_of_what_the_step_itself_decodes() -> None:
    """It is needed at once."""
    copier = HostCopier()
    with loading(Numbers(), workers=0, staging=Staging(copier, max_bytes=1 << 20)) as loader:
        assert items_of(loader.load(1)) == [10, 11]
    assert copier.count == 0


@pytest.mark.parametrize(("ahead", "reach", "further"), [(2, 1, 2), (2, 2, 1), (1, 1, 1), (1, 2, 1), (0, 2, 0)])
def test_as_many_steps_are_read_ahead_as_is_set(ahead: int, reach: int, further: int) -> None:
    """Where the samples that are asked for are themselves ahead of the step that runs, fewer beyond them, but one."""
    data = Numbers()
    with loading(data, workers=1, ahead=ahead, reach=reach) as loader:
        first = loader.load(1)  # what nobody holds isn't read
        wait_until(lambda: len(data.read) == 4 * (further + 1))
    assert len(first.microbatches) == 2
    assert {sample // 10 for _, sample in data.read} == set(range(1, further + 2))


def test_nothing_is_read_beyond_the_last_step() -> None:
    """As there is no step that it would be for; a step that is asked for beyond it is read."""
    data = Numbers()
    with loading(data, workers=1, ahead=4) as loader:
        items_of(loader.load(LAST))
        assert items_of(loader.load(LAST + 1)) == [10 * LAST + 10, 10 * LAST + 11]
    assert {sample // 10 for _, sample in data.read} == {LAST, LAST + 1}


def test_threads_that_decode_use_one_thread_of_torch_each_and_leave_that_of_others() -> None:
    """What the step computes with stays as it was."""
    before, data = torch.get_num_threads(), Numbers()
    torch.set_num_threads(2)
    try:
        with loading(data, workers=1, ahead=1) as loader:
            first = loader.load(1)
            wait_until(lambda: len(data.read) == 8)
            items_of(first)
        assert (data.intra_op, torch.get_num_threads()) == ({1}, 2)
        assert threading.get_ident() not in data.threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_an_item_is_raised_as_its_microbatch_is_prepared(workers: int) -> None:
    """With its place; what was read before and after it is not lost."""
    data = Numbers(broken=frozenset({21}))
    with loading(data, workers=workers, ahead=3) as loader:
        assert items_of(loader.load(1)) == [10, 11]
        first, second = loader.load(2).microbatches
        assert int(first.prepare(MODULE, 0)[0]["number"][0]) == 20
        with pytest.raises(DataError, match=r"numbers:21: expected a number, got none"):
            second.prepare(MODULE, 0)
        assert items_of(loader.load(3)) == [30, 31]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_layout_is_raised_where_the_layouts_are_needed(workers: int) -> None:
    """So that a step before it ends as it should."""
    data = Numbers(broken=frozenset({-21}))
    with loading(data, workers=workers, ahead=3) as loader:
        assert items_of(loader.load(1)) == [10, 11]
        step = loader.load(2)
        with pytest.raises(DataError, match=r"numbers:21: expected a sample, got none"):
            [microbatch.layouts for microbatch in step.microbatches]


def test_items_are_decoded_again_for_a_step_that_is_run_again() -> None:
    """What was prepared ahead is handed over once, so that nothing of it is held."""
    data = Numbers()
    with loading(data, workers=1, ahead=1) as loader:
        step = loader.load(1)
        assert items_of(step) == items_of(step) == [10, 11]
    assert sorted(sample for what, sample in data.read if what == "item" and sample < 20) == [10, 10, 11, 11]


def test_waiting_for_data_is_reported_and_its_seconds_are_counted() -> None:
    """In the words of the heartbeat, until it has come; what is there already takes none."""
    progress, data = Heartbeat(doing="step 1"), Numbers()
    data.gate.clear()
    seen: list[str] = []

    def open_gate() -> None:
        wait_until(lambda: "data" in progress.doing)
        seen.append(Status.of(progress, rank=0, seconds=1, query=1).activity)
        data.gate.set()

    with loading(data, progress=progress, workers=1, ahead=0) as loader:
        step = loader.load(1)
        loader.take_seconds()
        opener = threading.Thread(target=open_gate)
        opener.start()
        changes = progress.changes
        items_of(step)
        opener.join()
        assert (seen, progress.doing) == (["step 1, waiting for data"], "step 1")
        assert progress.changes > changes
        assert loader.take_seconds() > 0
        step = loader.load(2)
        wait_until(lambda: len(data.read) == 8)
        loader.take_seconds()
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "mimo-data"])
        items_of(step)
        assert loader.take_seconds() == 0


def test_without_threads_decoding_counts_as_waiting_for_data() -> None:
    """It is the step that it keeps."""
    with loading(Numbers(), workers=0) as loader:
        items_of(loader.load(1))
        assert loader.take_seconds() > 0


def test_items_that_no_thread_has_begun_are_decoded_from_the_last_on() -> None:
    """Threads decode from the first on: where both meet all is done, and none was waited for one by one."""
    job: Any = SimpleNamespace(lay_out_all=_lay_out_all)
    microbatch = Microbatch(job, Numbers(), [7, 8, 9])  # type: ignore[arg-type]
    calls: list[tuple[str, int]] = []

    @attrs.frozen
    class Ahead:
        number: int

        def wait(self) -> None:
            calls.append(("wait", self.number))

        def take(self) -> Mapping[str, Tensor]:
            calls.append(("take", self.number))
            return {"number": torch.full((1,), self.number)}

    numbers = iter(range(3))
    microbatch.prepare_ahead(MODULE, PLACE, lambda _prepare: Ahead(next(numbers)))
    assert [int(item["number"]) for item in microbatch.prepare(MODULE, 0)] == [0, 1, 2]
    assert calls == [("wait", 2), ("wait", 1), ("wait", 0), ("take", 0), ("take", 1), ("take", 2)]


def test_items_are_decoded_ahead_once_for_each_stage_that_takes_them() -> None:
    """As a generator's first and last, where one rank has both: what was prepared is handed over."""
    job: Any = SimpleNamespace(lay_out_all=_lay_out_all)
    microbatch, numbers = Microbatch(job, Numbers(), [7]), iter(range(2))  # type: ignore[arg-type]

    @attrs.frozen
    class Ahead:
        number: int

        def wait(self) -> None:
            pass

        def take(self) -> Mapping[str, Tensor]:
            return {"number": torch.full((1,), self.number)}

    for _ in range(2):
        microbatch.prepare_ahead(MODULE, PLACE, lambda _prepare: Ahead(next(numbers)))
    assert [int(microbatch.prepare_one(MODULE, 0, 0)["number"]) for _ in range(2)] == [0, 1]


def test_closing_while_items_wait_leaves_no_thread() -> None:
    """Whatever was prepared and nobody took; `loading` looks for threads."""
    data: Sequence[Numbers] = [Numbers(), Numbers()]
    for each, ahead_bytes in zip(data, (0, 1 << 20), strict=True):
        with loading(each, workers=3, ahead=5, ahead_bytes=ahead_bytes) as loader:
            loader.load(1)

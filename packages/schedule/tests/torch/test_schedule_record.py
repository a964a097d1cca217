"""What the executor reports of a step: when each action was done, what it waited for, and for whom."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from executor_step import FIRST, LAST, ROWS, Clock, Ends, Line, executor_of, graph_of, in_turn, only, separate, steps_of
from torch import Tensor

from mimo.schedule import Action
from mimo.schedule.runtime import DeviceTimer, HostTimer, Record, timer_of
from mimo.topology import StageId


def test_schedule_record_separates_waiting_from_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each action has its moment, in order; rows take 5 seconds to come, and a forward 3 to compute."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)

    class Slow(Ends):
        def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            clock.now += 3
            return super().forward(microbatches, inputs)

    graph = graph_of(language=(1,))
    plan = only(in_turn(graph, steps_of(graph)), 1, {"forward", "send", "backward", "receive"})
    programs: Any = {FIRST: Slow("language.0-1"), LAST: Ends(None)}
    record = Record()
    seconds = executor_of(graph, programs, 1, Line(clock=clock)).run(plan, separate(1), record)
    assert [moment.action for moment in record.moments] == list(plan.actors[0].actions)
    assert all(one.ended <= other.began for one, other in itertools.pairwise(record.moments))

    def spent(action: Action) -> tuple[float, float]:
        found = [moment for moment in record.moments if moment.action == action]
        (moment,) = found
        return moment.ready - moment.began, moment.ended - moment.ready

    def forward(stage: StageId, microbatch: int) -> Action:
        return Action(kind="forward", module=stage.module, stage=stage.stage, microbatches=(microbatch,))

    assert spent(forward(FIRST, 0)) == (5, 3)
    assert spent(forward(FIRST, 1)) == (0, 3)  # no rows, no message
    assert spent(forward(LAST, 0)) == (0, 0)  # from this rank itself
    assert record.seconds_by_module == {"language": 3 * len(ROWS)}
    assert seconds == {"language": (3 + 5) * len(ROWS) - 5}
    sent = [moment for moment in record.moments if moment.action.kind == "send"]
    assert all(moment.ready == moment.ended for moment in sent)
    assert record.began == 0
    assert record.ended == clock.now


@attrs.define(eq=False)
class Device:
    """An accelerator to which a host hands work over: it does one thing after the other, and the host waits for none.

    Args:
        host: the clock of the host.
        free: when all that has been handed over is done.
    """

    host: Clock
    free: float = 0.0

    def compute(self, seconds: float) -> None:
        """Hand over what takes some time."""
        self.free = max(self.free, self.host.now) + seconds

    def synchronize(self) -> None:
        """Have the host wait for all of it."""
        self.host.now = max(self.host.now, self.free)

    def event(self) -> DeviceEvent:
        """Return an event that has not been recorded."""
        return DeviceEvent(self)


@attrs.define(eq=False)
class DeviceEvent:
    """An event of a device, as `torch.Event` is."""

    device: Device
    at: float = 0.0

    def record(self) -> None:
        """Hand it over."""
        self.at = max(self.device.free, self.device.host.now)

    def elapsed_time(self, other: DeviceEvent) -> float:
        """Return the milliseconds to another one, which the device must have come to."""
        assert other.at <= self.device.host.now, "nobody has waited for it"
        return 1e3 * (other.at - self.at)


def test_schedule_a_device_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that hands over all forwards of a step at once takes no time; the device does one after the other."""
    host = Clock()
    device = Device(host)
    monkeypatch.setattr(time, "perf_counter", host)

    class Slow(Ends):
        def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            device.compute(3)
            return super().forward(microbatches, inputs)

    host.now = 100
    device.compute(7)  # of the step before: the timer starts once that is over
    graph = graph_of(language=(1,))
    plan = only(in_turn(graph, steps_of(graph)), 1, {"forward", "send", "backward", "receive"})
    programs: Any = {FIRST: Slow("language.0-1"), LAST: Ends(None)}
    timer = DeviceTimer(torch.device("cuda"), event=device.event, synchronize=device.synchronize)
    record = Record(timer=timer)
    seconds = executor_of(graph, programs, 1, Line(clock=Clock())).run(plan, separate(1), record)
    assert seconds == {"language": 0}
    assert record.done == len(plan.actors[0].actions)
    assert host.now == 107
    first = [moment for moment in record.moments if moment.action.kind == "forward" and moment.action.stage == 0]
    assert [(moment.ready, moment.ended) for moment in first] == [(107, 110), (110, 113), (113, 116), (116, 119)]
    assert host.now == 119
    assert record.seconds_by_module == {"language": 3 * len(ROWS)}


def test_schedule_the_timer_is_that_of_the_device() -> None:
    """Processes without an accelerator are timed by their own clock."""
    assert isinstance(timer_of(torch.device("cpu")), HostTimer)
    assert isinstance(timer_of(torch.device("cuda", 1)), DeviceTimer)


@attrs.frozen
class RecordedProgress:
    """Records what an executor reports."""

    reports: list[str] = attrs.field(factory=list)

    def begin(self, action: Action | None) -> None:
        """Keep it."""
        self.reports.append("end" if action is None else f"{action.kind} {action.microbatches}")

    def wait(self, edge: str, peer: int) -> None:
        """Keep it."""
        self.reports.append(f"waits for {peer} on {edge}")

    def resume(self, is_over: Callable[[], bool]) -> None:
        """Keep it."""
        self.reports.append("goes on" if is_over() else "left to the device")


def test_schedule_executor_reports_what_it_does_and_whom_it_waits_for() -> None:
    """Rows are awaited where a pass needs them, and what was sent must have left before the end."""
    graph = graph_of(language=(1,))
    plan = only(in_turn(graph, steps_of(graph, count=1)), 1, {"forward", "send", "backward", "receive"})
    programs: Any = {FIRST: Ends("language.0-1", (2,)), LAST: Ends(None, (2,))}
    reports = RecordedProgress()
    executor_of(graph, programs, 1, Line(), reports).run(plan, separate(1, (2,)))
    waits = ["waits for 0 on vision->language", "goes on"]
    begun = [one for one in reports.reports if one not in waits]
    assert begun == [*(f"{action.kind} (0,)" for action in plan.actors[0].actions), "end"]
    first = reports.reports.index("forward (0,)")
    assert reports.reports[first + 1 : first + 3] == waits
    assert reports.reports[-3:] == [*waits, "end"]

"""What one rank did in one step, and when: measured by the executor, for traces and profiles."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule.plan import Action
from mimo.schedule.runtime.timer import HostTimer, Reading, Timer


@attrs.frozen(kw_only=True)
class Moment:
    """One action as it was done; times are seconds of this process's `time.perf_counter`.

    On an accelerator they are the times at which the device came to it, see `timer.DeviceTimer`.

    Args:
        action: what.
        began: when its turn came.
        ready: when all that it waited for from other ranks was there, put together over the tensor group where that is
            needed; ``ready - began`` is waiting. A message only waits: for those sent before it to leave.
        ended: when it was done; ``ended - ready`` is work. Waiting inside a computation or a reduction, in the
            collectives of its group, counts as work.
    """

    action: Action
    began: float
    ready: float
    ended: float


@attrs.define
class Record:
    """The record of one step: pass a new one to `Executor.run`, and read it afterwards.

    Args:
        timer: takes down when each action was done.

    Attributes:
        began: when the step began, by `time.perf_counter`.
        ended: when everything sent had left; on an accelerator, as far as the host knows.
    """

    timer: Timer = attrs.field(factory=HostTimer)
    began: float = attrs.field(default=0.0, init=False)
    ended: float = attrs.field(default=0.0, init=False)
    _done: list[tuple[Action, Reading, Reading, Reading]] = attrs.field(factory=list, init=False)
    _moments: list[Moment] = attrs.field(factory=list, init=False)

    def add(self, action: Action, *, began: Reading, ready: Reading, ended: Reading) -> None:
        """Take down an action that has been done, with its moments by the timer."""
        self._done.append((action, began, ready, ended))

    @property
    def done(self) -> int:
        """How many actions have been done: the index of the current one."""
        return len(self._done)

    @property
    def moments(self) -> list[Moment]:
        """One for each action of the rank's list, in its order; on an accelerator, reading them waits for it."""
        if new := self._done[len(self._moments) :]:
            times = iter(self.timer.seconds([reading for _, *readings in new for reading in readings]))
            self._moments += [
                Moment(action=action, began=next(times), ready=next(times), ended=next(times)) for action, *_ in new
            ]
        return self._moments

    @property
    def seconds_by_module(self) -> Mapping[str, float]:
        """Seconds of each module's computations, waiting for their inputs left out."""
        seconds: dict[str, float] = {}
        for moment in self.moments:
            if moment.action.kind not in ("send", "receive", "reduce"):
                seconds[moment.action.module] = seconds.get(moment.action.module, 0.0) + moment.ended - moment.ready
        return seconds

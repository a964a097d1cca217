"""What one rank did in one step, and when: measured by the executor, for traces and profiles."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.schedule.plan import Action


@attrs.frozen(kw_only=True)
class Moment:
    """One action as it was done; times are seconds of this process's `time.perf_counter`.

    On an accelerator they are the host's times, which runs ahead of its device: timing waits for nothing.

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

    Attributes:
        moments: one for each action of the rank's list, in its order.
        began: when the step began, by `time.perf_counter`.
        ended: when everything sent had left.
    """

    moments: list[Moment] = attrs.field(factory=list)
    began: float = 0.0
    ended: float = 0.0

    @property
    def seconds_by_module(self) -> Mapping[str, float]:
        """Seconds of each module's computations, waiting for their inputs left out."""
        seconds: dict[str, float] = {}
        for moment in self.moments:
            if moment.action.kind not in ("send", "receive", "reduce"):
                seconds[moment.action.module] = seconds.get(moment.action.module, 0.0) + moment.ended - moment.ready
        return seconds

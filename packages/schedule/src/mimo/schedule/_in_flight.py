"""How many microbatches' activations a stage keeps at once, read off a plan."""

from __future__ import annotations

from collections.abc import Mapping

from mimo.schedule._plan import ActorPlan, Plan
from mimo.topology import StageId


def in_flight(plan: Plan) -> Mapping[StageId, int]:
    """Return the highest number of microbatches in flight at each stage, over the actors that hold it.

    A microbatch is in flight from its forward until its backward (its weight gradient, where backward is split), and
    where a stage has no backward until its rows were sent, or until the forward's end where nobody needs them. What is
    made for the next step is in flight to the end of this one, and until it is sent in the next.
    """
    peaks: dict[StageId, int] = {}
    for actor in plan.actors:
        for stage, peak in _peaks(actor, plan.microbatches).items():
            peaks[stage] = max(peak, peaks.get(stage, 0))
    return peaks


def _peaks(actor: ActorPlan, microbatches: int) -> Mapping[StageId, int]:
    last: dict[tuple[StageId, int], int] = {}
    for index, action in enumerate(actor.actions):
        if action.kind != "receive":
            last.update(((action.stage_id, microbatch), index) for microbatch in action.microbatches)
    for index, action in enumerate(actor.actions):  # a gradient sent onward holds no activation
        if action.kind in ("backward", "weight-gradient"):
            last.update(((action.stage_id, microbatch), index) for microbatch in action.microbatches)
    made_ahead = {
        stage for stage, microbatch in last if microbatch < microbatches and (stage, microbatch + microbatches) in last
    }
    for stage in made_ahead:
        last.update(((stage, microbatch), len(actor.actions)) for microbatch in range(microbatches, 2 * microbatches))
    present: dict[StageId, int] = dict.fromkeys(made_ahead, microbatches)
    peaks: dict[StageId, int] = dict(present)
    for index, action in enumerate(actor.actions):
        stage = action.stage_id
        if action.kind == "forward":
            present[stage] = present.get(stage, 0) + len(action.microbatches)
            peaks[stage] = max(peaks.get(stage, 0), present[stage])
        if stage in present:
            present[stage] -= sum(last.get((stage, microbatch)) == index for microbatch in action.microbatches)
    return peaks

"""Whether lists agree on the order of what their actors share: the messages of a channel, the collectives of a group.

Nothing else tells them apart: a channel or group matches the n-th operation of one member with the n-th of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan import ActorPlan, Wiring, action_text, place_text, ranks_text

_QueueKey = tuple[object, ...]
"""A channel, which is an edge and a way along it, or a group: a stage and the actors that meet in it."""


@attrs.define(eq=False)
class _Operations:
    """What an actor does on a line: the indices of its actions, and what tells these apart."""

    actor: ActorPlan
    indices: list[int] = attrs.field(factory=list)
    what: list[object] = attrs.field(factory=list)


def check_matching(actors: Sequence[ActorPlan], wiring: Wiring) -> None:
    """Refuse messages of one channel, or collectives of one group, that its members list in different orders.

    Args:
        actors: the lists, in the order of the graph's actors, each complete by itself.
        wiring: the graph.

    Raises:
        PlanError: it names the first action that differs, and what others list in its place.
    """
    first: dict[_QueueKey, _Operations] = {}
    for number, actor in enumerate(actors):
        for (line, _), own in _operations(actor, number, wiring).items():
            other = first.setdefault(line, own)
            if own.what != other.what:
                raise _difference(own, other)


def _operations(actor: ActorPlan, number: int, wiring: Wiring) -> Mapping[tuple[_QueueKey, str], _Operations]:
    """Return what an actor does by line, sends and receives of a channel apart."""
    found: dict[tuple[_QueueKey, str], _Operations] = {}
    for index, action in enumerate(actor.actions):
        line: _QueueKey
        what: object = action.microbatches
        end = kind = action.kind
        if kind in ("send", "receive"):
            at_target = wiring.targets[action.edge or ""] == (action.module, action.stage)
            line = (action.edge, at_target == (kind == "send"))
        elif wiring.gathers(action):
            line, end = (action.stage_id, wiring.meeting(action.stage_id, number)), "forward"
            what = (kind, what)
        else:
            continue
        operations = found.get((line, end))
        if operations is None:
            operations = found[line, end] = _Operations(actor)
        operations.indices.append(index)
        operations.what.append(what)
    return found


def _difference(own: _Operations, other: _Operations) -> PlanError:
    pairs = zip(own.what, other.what, strict=False)
    place = next(place for place, (what, match) in enumerate(pairs) if what != match)
    index, other_index = own.indices[place], other.indices[place]
    return PlanError(
        place_text(own.actor.ranks, index, own.actor.actions[index]),
        expected=f"the order of {ranks_text(other.actor.ranks)}, which here list "
        f"{action_text(other.actor.actions[other_index])} (action {other_index})",
        got="another",
        fix="Members of a channel or group match their operations by order alone.",
    )

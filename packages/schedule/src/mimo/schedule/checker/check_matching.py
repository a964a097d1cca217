"""Proves that lists agree on the order of shared operations: messages of a channel, collectives of a group.

Only their order identifies them: a channel or group matches the n-th operation of one member with the n-th of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan import ActorPlan, Wiring, action_text, place_text, ranks_text

_QueueKey = tuple[object, ...]
"""A channel (an edge and a direction), or a group (a stage and the actors whose collectives it holds)."""


@attrs.define(eq=False)
class _Operations:
    """Operations of an actor in one channel or group: the indices of its actions, and a key of each."""

    actor: ActorPlan
    indices: list[int] = attrs.field(factory=list)
    keys: list[object] = attrs.field(factory=list)


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
        for (queue, _), own in _operations(actor, number, wiring).items():
            other = first.setdefault(queue, own)
            if own.keys != other.keys:
                raise _difference(own, other)


def _operations(actor: ActorPlan, number: int, wiring: Wiring) -> Mapping[tuple[_QueueKey, str], _Operations]:
    """Return the operations of an actor by channel or group; sends and receives of a channel are separate."""
    result: dict[tuple[_QueueKey, str], _Operations] = {}
    for index, action in enumerate(actor.actions):
        queue: _QueueKey
        identity: object = action.microbatches
        end = kind = action.kind
        if kind in ("send", "receive"):
            at_target = wiring.targets[action.edge or ""] == (action.module, action.stage)
            queue = (action.edge, at_target == (kind == "send"))
        elif wiring.gathers(action):
            queue, end = (action.stage_id, wiring.meeting(action.stage_id, number)), "forward"
            identity = (kind, identity)
        else:
            continue
        operations = result.get((queue, end))
        if operations is None:
            operations = result[queue, end] = _Operations(actor)
        operations.indices.append(index)
        operations.keys.append(identity)
    return result


def _difference(own: _Operations, other: _Operations) -> PlanError:
    pairs = zip(own.keys, other.keys, strict=False)
    place = next(place for place, (key, match) in enumerate(pairs) if key != match)
    index, other_index = own.indices[place], other.indices[place]
    return PlanError(
        place_text(own.actor.ranks, index, own.actor.actions[index]),
        expected=f"the order of {ranks_text(other.actor.ranks)}, which here list "
        f"{action_text(other.actor.actions[other_index])} (action {other_index})",
        got="another",
        fix="Members of a channel or group match their operations by order alone.",
    )

"""Activation memory of an actor along its list: microbatches and bytes, from each forward until they are freed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from mimo.schedule.plan import Action, ActorPlan, Costs, Plan, StageCost
from mimo.topology import ModuleGraph, StageId


@attrs.frozen
class Peak:
    """The most activation memory at one time: microbatches (counted once for each stage that saves them) and bytes."""

    microbatches: int = 0
    bytes: int = 0


@attrs.frozen(kw_only=True)
class ActorPeak:
    """The peaks of each of an actor's ranks: of each module by itself, and the bytes of all modules at one time."""

    modules: Mapping[str, Peak]
    bytes: int


@attrs.frozen(kw_only=True)
class _StageFacts:
    """What `ActivationMemory` needs of a stage.

    ``outputs`` counts the messages after which a stage without backward frees a microbatch; those of ``handed_on``
    come a step later.
    """

    cost: StageCost
    backward: bool
    outputs: int
    handed_on: int

    @property
    def has_bytes(self) -> bool:
        """Whether it saves any bytes."""
        return bool(self.cost.activations or self.cost.recomputed or self.cost.weight_inputs or self.passing)

    @property
    def passing(self) -> int:
        """Bytes that a forward takes while it runs."""
        return 0 if self.backward else self.cost.passing


_StageName = tuple[str, int]


def stage_facts(graph: ModuleGraph, costs: Costs) -> Mapping[_StageName, _StageFacts]:
    """Return what `ActivationMemory` needs of each stage, once for all actors."""
    outputs: dict[_StageName, int] = {}
    handed_on: dict[_StageName, int] = {}
    backward: set[_StageName] = set()
    for edge in graph.edges:
        source = (edge.source.module, edge.source.stage)
        outputs[source] = outputs.get(source, 0) + 1
        if graph.by_name[edge.source.module].prefetch and not graph.by_name[edge.target.module].prefetch:
            handed_on[source] = handed_on.get(source, 0) + 1
        if edge.gradient:
            backward.add((edge.target.module, edge.target.stage))
    return {
        key: _StageFacts(
            cost=costs.stages[stage],
            backward=key in backward or graph.by_name[stage.module].trains[stage.stage],
            outputs=outputs.get(key, 0),
            handed_on=handed_on.get(key, 0),
        )
        for stage in graph.stages
        for key in ((stage.module, stage.stage),)
    }


class ActivationMemory:
    """The activation memory of one actor: how much each action adds when it begins, and frees when it ends.

    Args:
        stages: of `stage_facts`.
        actions: the actor's list.
        microbatches: of the step.
        unsent: whether rows count that a stage without backward has made in this step, until they are sent.
    """

    def __init__(
        self,
        stages: Mapping[_StageName, _StageFacts],
        actions: Sequence[Action],
        microbatches: int,
        *,
        unsent: bool = True,
    ) -> None:
        self._stages = stages
        self._unsent_counts = unsent
        self._unsent: dict[tuple[str, int, int], int] = {}
        self._microbatches = microbatches
        self._made_before: dict[_StageName, None] = {}
        if any(stage.handed_on for stage in stages.values()):
            keys = dict.fromkeys((action.module, action.stage) for action in actions)
            self._made_before = {key: None for key in keys if stages[key].handed_on}
            for key in self._made_before:
                for microbatch in range(microbatches):
                    self._unsent[*key, microbatch] = stages[key].handed_on

    @property
    def initial(self) -> Mapping[str, Peak]:
        """Memory by module as the step begins: what the previous step made for it."""
        initial: dict[str, Peak] = {}
        for key in self._made_before:  # one stage of a module, its last
            each = self._stages[key].cost.activations
            initial[key[0]] = Peak(self._microbatches, self._microbatches * each)
        return initial

    def added(self, action: Action) -> Peak:
        """Return what ``action`` adds when it begins."""
        count = len(action.microbatches)
        stage = self._stages[action.module, action.stage]
        cost = stage.cost
        if action.kind == "forward":
            return Peak(count, count * (cost.activations + stage.passing))
        if action.kind in ("backward", "input-gradient"):
            return Peak(0, count * cost.recomputed)
        return NO_CHANGE

    def freed(self, action: Action) -> Peak:
        """Return what ``action``, a computation or a send, frees when it ends."""
        stage = self._stages[action.module, action.stage]
        count, cost = len(action.microbatches), stage.cost
        match action.kind:
            case "backward":
                return Peak(count, count * (cost.activations + cost.recomputed))
            case "input-gradient":
                return Peak(0, count * (cost.activations + cost.recomputed - cost.weight_inputs))
            case "weight-gradient":
                return Peak(count, count * cost.weight_inputs)
            case "forward" if not (stage.backward or stage.handed_on or self._unsent_counts):
                return Peak(count, count * (cost.activations + stage.passing))
            case "forward" | "send" if not stage.backward and (stage.handed_on or self._unsent_counts):
                sent = sum(self._is_sent(action, microbatch, stage.outputs) for microbatch in action.microbatches)
                passed = count * stage.passing if action.kind == "forward" else 0
                return Peak(sent, sent * cost.activations + passed)
        return NO_CHANGE

    def _is_sent(self, action: Action, microbatch: int, outputs: int) -> bool:
        key = (action.module, action.stage, microbatch)
        self._unsent[key] = left = self._unsent.get(key, outputs) - (action.kind == "send")
        return not left


NO_CHANGE = Peak()


def peak_activations(plan: Plan, graph: ModuleGraph, costs: Costs, *, unsent: bool = True) -> Mapping[int, ActorPeak]:
    """Return the peak activation memory of each rank, by module and in total, from its list.

    A microbatch counts as in `in_flight`; one for the next step counts with all its bytes, though only its rows are
    saved. Its bytes are those of ``costs``: with a split backward, what the weight gradient needs stays until then;
    what is recomputed is added while its backward runs.

    Args:
        plan: whose lists are walked.
        graph: for which it was made.
        costs: of that graph.
        unsent: whether rows of this step count that a stage without backward has made and that wait to be sent; those
            that have come and wait to be used do not.
    """
    stages = stage_facts(graph, costs)
    peaks: dict[int, ActorPeak] = {}
    for actor in plan.actors:
        memory = ActivationMemory(stages, actor.actions, plan.microbatches, unsent=unsent)
        peaks.update(dict.fromkeys(actor.ranks, _peak(actor, memory)))
    return peaks


def _peak(actor: ActorPlan, memory: ActivationMemory) -> ActorPeak:
    now: dict[str, int] = {}
    counts: dict[str, int] = {}
    peaks: dict[str, Peak] = {action.module: Peak() for action in actor.actions}
    total = highest = 0
    for module, before in memory.initial.items():
        now[module], counts[module], peaks[module] = before.bytes, before.microbatches, before
        total = highest = total + before.bytes
    for action, change in _changes(actor, memory):
        module = action.module
        counts[module] = counts.get(module, 0) + change.microbatches
        now[module] = now.get(module, 0) + change.bytes
        total += change.bytes
        highest = max(highest, total)
        before = peaks[module]
        if counts[module] > before.microbatches or now[module] > before.bytes:
            peaks[module] = Peak(max(before.microbatches, counts[module]), max(before.bytes, now[module]))
    return ActorPeak(modules=peaks, bytes=highest)


def _changes(actor: ActorPlan, memory: ActivationMemory) -> Iterator[tuple[Action, Peak]]:
    for action in actor.actions:
        more = memory.added(action)
        if more is not NO_CHANGE:
            yield action, more
        less = memory.freed(action)
        if less is not NO_CHANGE:
            yield action, Peak(-less.microbatches, -less.bytes)


def in_flight(plan: Plan) -> Mapping[StageId, int]:
    """Return the highest number of microbatches in flight at each stage, over the actors that hold it.

    A microbatch is in flight from its forward until its backward (its weight gradient, where backward is split), and
    in a stage without backward until its rows were sent, or until the end of the forward if nobody needs them. What is
    made for the next step is in flight until it is sent there.
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
    for index, action in enumerate(actor.actions):  # sending a gradient onward needs no activations
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

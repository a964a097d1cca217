"""The state of a list schedule while it places a step: the progress of each stage and edge."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs

from mimo.schedule.plan import ActionKind, Wiring
from mimo.topology import ModuleGraph, StageId


class Pass(NamedTuple):
    """A computation of one stage that is to be placed, with the microbatches of its pass."""

    kind: ActionKind
    stage: StageId
    microbatches: tuple[int, ...]


@attrs.define(kw_only=True, eq=False)
class PassCount:
    """The number of microbatches for which a computation has ended on every part of its stage.

    Args:
        parts: number of parts.
        left: for each pass that some part has ended, how many parts have not.
        microbatches: number of microbatches in passes that all parts have ended.
    """

    parts: int
    left: dict[int, int] = attrs.field(factory=dict)
    microbatches: int = 0

    def end(self, last: int) -> bool:
        """Record that a part has ended the pass whose last microbatch is ``last``; return whether all parts have."""
        left = self.left.get(last, self.parts) - 1
        self.left[last] = left
        if not left:
            self.microbatches = last + 1
        return not left


@attrs.define(kw_only=True, eq=False)
class EdgeState:
    """An edge while the schedule is made; counts are of microbatches, which go along it in order.

    Args:
        name: the edge's.
        source, target: its ends.
        gradient: whether it carries gradients back.
        rows: how many have arrived at the target; those of the previous step are there from the start.
        gradients: of how many the gradients have arrived at the source.
    """

    name: str
    source: StageState
    target: StageState
    gradient: bool
    rows: int = 0
    gradients: int = 0


@attrs.define(kw_only=True, eq=False)
class StageState:
    """A stage while the schedule is made.

    Args:
        id: which.
        passes: the microbatches of each pass; those of the next step follow this step's.
        prefetch: whether it works on the next step.
        backward, split: whether it runs backwards, and whether in two parts.
        bound: how many microbatches may be in flight, if its order is not fixed.
        inputs, outputs: its edges.
        forward, gradient: for how many microbatches the rows, and the input gradients, are made.
        parts: the stage on each group of actors that compute it together.
    """

    id: StageId
    passes: Sequence[tuple[int, ...]]
    prefetch: bool
    backward: bool
    split: bool
    bound: int | None
    forward: PassCount
    gradient: PassCount
    inputs: list[EdgeState] = attrs.field(factory=list)
    outputs: list[EdgeState] = attrs.field(factory=list)
    parts: list[StagePart] = attrs.field(factory=list)

    def is_ready(self, wanted: Pass) -> bool:
        """Return whether everything that a pass needs from other stages has arrived."""
        last = wanted.microbatches[-1]
        if wanted.kind == "forward":
            return all(edge.rows > last for edge in self.inputs)
        if wanted.kind == "weight-gradient":
            return True
        return all(edge.gradients > last for edge in self.outputs if edge.gradient)


@attrs.define(kw_only=True, eq=False)
class StagePart:
    """A stage on actors that compute it together. Its passes go in order, so counts determine which have begun.

    Args:
        stage: which.
        actors: which.
        paced: whether it begins a pass of the next step only after the same pass of this step has been used: its actors
            also send what the previous step made, and others would wait if they computed for too long at a time.
        forwards, backwards, weights: passes begun; a split backward counts with its first part.
    """

    stage: StageState
    actors: tuple[int, ...]
    paced: bool = False
    forwards: int = 0
    backwards: int = 0
    weights: int = 0

    @property
    def in_flight(self) -> int:
        """Microbatches begun that are still needed: for the end of their backward, or for a consumer's forward."""
        begun = self._served(self.forwards)
        if self.stage.backward:
            return begun - self._served(self.weights if self.stage.split else self.backwards)
        targets = (edge.target for edge in self.stage.outputs)
        return begun - min(
            (target.forward.microbatches for target in targets if target.prefetch == self.stage.prefetch), default=begun
        )

    def candidates(self) -> Iterator[Pass]:
        """Yield the passes that could begin now if its actors were free and its order were not fixed."""
        stage = self.stage
        if stage.backward and self.backwards < self.forwards:
            candidate = Pass("input-gradient" if stage.split else "backward", stage.id, stage.passes[self.backwards])
            if stage.is_ready(candidate):
                yield candidate
        if stage.split and self.weights < self.backwards:
            yield Pass("weight-gradient", stage.id, stage.passes[self.weights])
        if self.forwards < len(stage.passes):
            candidate = Pass("forward", stage.id, stage.passes[self.forwards])
            fits = stage.bound is None or self.in_flight + len(candidate.microbatches) <= stage.bound
            if fits and stage.is_ready(candidate) and not (self.paced and self._is_early):
                yield candidate

    def begin(self, kind: ActionKind) -> None:
        """Count the next pass of a kind as begun."""
        if kind == "forward":
            self.forwards += 1
        elif kind == "weight-gradient":
            self.weights += 1
        else:
            self.backwards += 1

    @property
    def is_done(self) -> bool:
        """Whether all its passes have begun."""
        count = len(self.stage.passes)
        done = (self.forwards, self.backwards, self.weights)
        return done == (count, count * self.stage.backward, count * self.stage.split)

    @property
    def _is_early(self) -> bool:
        """Whether a consumer of this step's rows is behind the next pass of this part."""
        stage = self.stage
        number = stage.passes[self.forwards][0] - stage.passes[0][0]
        return any(edge.target.forward.microbatches < number for edge in stage.outputs if not edge.target.prefetch)

    def _served(self, passes: int) -> int:
        return self.stage.passes[passes - 1][-1] + 1 if passes else self.stage.passes[0][0]


def begin_stages(
    graph: ModuleGraph, microbatches: int, *, split: Collection[StageId], bounds: Mapping[StageId, int]
) -> Mapping[StageId, StageState]:
    """Return every stage of a graph before the step has begun, joined by its edges."""
    wiring = Wiring(graph=graph)
    passes = {module.name: wiring.passes(module.name, microbatches) for module in graph.modules}
    idle = [all(graph.by_name[stage.module].prefetch for stage in actor.stages) for actor in graph.actors]
    stages = {}
    for name in graph.stages:
        meetings = wiring.meetings[name]
        stage = stages[name] = StageState(
            id=name,
            passes=passes[name.module],
            prefetch=graph.by_name[name.module].prefetch,
            backward=name in wiring.backward,
            split=name in split,
            bound=bounds.get(name),
            forward=PassCount(parts=len(meetings), microbatches=passes[name.module][0][0]),
            gradient=PassCount(parts=len(meetings)),
        )
        stage.parts += [
            StagePart(stage=stage, actors=actors, paced=all(idle[actor] for actor in actors)) for actors in meetings
        ]
    for edge in graph.edges:
        source, target = stages[edge.source], stages[edge.target]
        rows = source.passes[0][0] if source.prefetch and not target.prefetch else 0
        joint = EdgeState(name=edge.name, source=source, target=target, gradient=edge.gradient, rows=rows)
        source.outputs.append(joint)
        target.inputs.append(joint)
    return stages

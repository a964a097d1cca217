"""Orders of the ranks of a pipeline by closed forms: what each does with the passes of its stages, one after the other.

They are written for a pipeline of which every stage trains. What a stage has not to do is left out afterwards: that
takes waits away and adds none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mimo.schedule.plan import ActionKind


class PassIndex(NamedTuple):
    """A pass of one of a module's stages, by numbers."""

    kind: ActionKind
    stage: int
    number: int


def one_after_one(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], *, warm: int, lag: int | None = None
) -> Iterator[PassIndex]:
    """Yield ``warm`` forwards, then a backward and a forward in turn, then the backwards that are left.

    Args:
        forwards: stage and number of each, in their order.
        backwards: the same of backwards.
        warm: forwards before the first backward.
        lag: backwards come in two parts, and the second ones stay behind by so many of the first; with None they are
            whole.
    """
    for at in forwards[:warm]:
        yield PassIndex("forward", *at)
    for done, at in enumerate(backwards):
        yield PassIndex("backward" if lag is None else "input-gradient", *at)
        if lag is not None and done >= lag:
            yield PassIndex("weight-gradient", *backwards[done - lag])
        if warm + done < len(forwards):
            yield PassIndex("forward", *forwards[warm + done])
    if lag:
        for at in backwards[-lag:]:
            yield PassIndex("weight-gradient", *at)


def in_groups(stages: Sequence[int], passes: int, group: int) -> list[tuple[int, int]]:
    """Return the passes of several stages in turn: ``group`` of the first, as many of the next, and so round.

    So Megatron orders the chunks of a rank (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", 2021, section 2.2.2).
    """
    return [
        (stage, number)
        for first in range(0, passes, group)
        for stage in stages
        for number in range(first, min(first + group, passes))
    ]


def to_and_fro(stages: tuple[int, int], passes: int, *, ranks: int, place: int) -> Iterator[PassIndex]:
    """Yield the order of a rank with two chunks in a V, without a bubble where all kinds take the same time.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 6, and "Pipeline Parallelism with Controllable Memory"
    (2024). Its phases: forwards on the way down; by turns on both ways; up and back at once; all six kinds; draining.

    Args:
        stages: the rank's, on the way down and on the way up.
        passes: of the step; the order is that of 2·ranks - 1 or more, less those that there are not.
        ranks: along the pipeline.
        place: of this one, from 0.
    """
    kinds: tuple[ActionKind, ...] = ("forward", "input-gradient", "weight-gradient")
    (f0, i0, w0), (f1, i1, w1) = ([(kind, at) for kind in kinds] for at in stages)
    left = ranks - place
    order = [
        *[f0] * (2 * left - 1),
        *[f1, f0] * place,
        *[f1, i1, w1] * left,
        *[f0, i0, w0, f1, i1, w1] * (max(passes, 2 * ranks - 1) - ranks - left + 1),
        *[i0, w0, f1, i1, w1] * (left - 1),
        *[i0, i1] * place,
        *[i0, w0] * left,
        *[w1] * place,
        *[w0] * place,
    ]
    counts: Counter[tuple[ActionKind, int]] = Counter()
    for kind, stage in order:
        number = counts[kind, stage]
        counts[kind, stage] += 1
        if number < passes:
            yield PassIndex(kind, stage, number)

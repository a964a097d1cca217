"""Orders of pipeline ranks in closed form: the sequence of passes of each rank's stages.

They assume that every stage of the pipeline trains. Passes that a stage does not need are removed afterwards, which
removes waits and adds none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mimo.schedule.plan import ActionKind


class PassIndex(NamedTuple):
    """A pass of one of a module's stages, by indices."""

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
        lag: splits backwards in two parts; the second parts follow so many first parts later. None: whole backwards.
    """
    for pass_ in forwards[:warm]:
        yield PassIndex("forward", *pass_)
    for done, pass_ in enumerate(backwards):
        yield PassIndex("backward" if lag is None else "input-gradient", *pass_)
        if lag is not None and done >= lag:
            yield PassIndex("weight-gradient", *backwards[done - lag])
        if warm + done < len(forwards):
            yield PassIndex("forward", *forwards[warm + done])
    if lag:
        for pass_ in backwards[-lag:]:
            yield PassIndex("weight-gradient", *pass_)


def in_groups(stages: Sequence[int], passes: int, group: int) -> list[tuple[int, int]]:
    """Return the passes of several stages in turn: ``group`` of the first stage, as many of the next, and so on.

    Megatron orders so the chunks of a rank (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
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
        passes: of the step; the order is that of 2·ranks - 1 or more, without passes beyond this number.
        ranks: along the pipeline.
        place: of this one, from 0.
    """
    kinds: tuple[ActionKind, ...] = ("forward", "input-gradient", "weight-gradient")
    (f0, i0, w0), (f1, i1, w1) = ([(kind, stage) for kind in kinds] for stage in stages)
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

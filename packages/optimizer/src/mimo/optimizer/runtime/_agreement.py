"""The one small world all-reduce of a step: everything that all ranks must agree on, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import attrs
import torch
import torch.distributed as dist

N = TypeVar("N", int, float)


@attrs.frozen(kw_only=True)
class Tally:
    """What one rank contributes; each global quantity is given by exactly one rank for each part of it.

    Args:
        loss: sum of token losses.
        label_tokens: number of label tokens.
        rows: rows that each module ran, by module name.
        seconds: time spent in each module, by module name.
        counts: further sums by name (samples cut, samples right).
    """

    loss: float = 0.0
    label_tokens: int = 0
    rows: Mapping[str, int] = attrs.field(factory=dict)
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    counts: Mapping[str, int] = attrs.field(factory=dict)

    def __add__(self, other: Tally) -> Tally:
        """Return the sums of both."""
        return Tally(
            loss=self.loss + other.loss,
            label_tokens=self.label_tokens + other.label_tokens,
            rows=_add(self.rows, other.rows),
            seconds=_add(self.seconds, other.seconds),
            counts=_add(self.counts, other.counts),
        )


@attrs.frozen(kw_only=True)
class Agreed:
    """The same on every rank: sums over the step, and squared gradient norms by module, before any scaling."""

    loss: float
    label_tokens: int
    rows: Mapping[str, int]
    seconds: Mapping[str, float]
    counts: Mapping[str, int]
    squares: Mapping[str, float]

    @property
    def finite(self) -> bool:
        """Whether the loss and every gradient are finite."""
        return math.isfinite(self.loss) and all(math.isfinite(square) for square in self.squares.values())


def agree(
    tally: Tally, *, squares: Mapping[str, float], modules: Sequence[str], counts: Sequence[str], device: torch.device
) -> Agreed:
    """Sum tallies and squared norms over the world in one message.

    Args:
        tally: this rank's share.
        squares: this rank's share of each module's squared gradient norm.
        modules: names of all modules, in an order that all ranks share.
        counts: names of all further sums, likewise.
        device: where the process group works.
    """
    named = [(tally.rows, modules), (tally.seconds, modules), (squares, modules), (tally.counts, counts)]
    mine = [tally.loss, tally.label_tokens, *(values.get(name, 0) for values, names in named for name in names)]
    vector = torch.tensor(mine, dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector)
    loss, label_tokens, *rest = vector.tolist()
    sums = iter(rest)
    rows, seconds, norms, others = ({name: next(sums) for name in names} for _, names in named)
    return Agreed(
        loss=loss,
        label_tokens=round(label_tokens),
        rows={name: round(value) for name, value in rows.items()},
        seconds=seconds,
        squares=norms,
        counts={name: round(value) for name, value in others.items()},
    )


def _add(left: Mapping[str, N], right: Mapping[str, N]) -> Mapping[str, N]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}

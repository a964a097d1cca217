"""The one small world all-reduce of a step: everything that all ranks must agree on, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.distributed as dist


@attrs.frozen(kw_only=True)
class Tally:
    """What one rank contributes; each global quantity is given by exactly one rank for each part of it.

    Args:
        loss: sum of token losses.
        label_tokens: number of label tokens.
        rows: rows that each module ran, by module name.
        counts: further sums by name (samples cut, samples right).
    """

    loss: float = 0.0
    label_tokens: int = 0
    rows: Mapping[str, int] = attrs.field(factory=dict)
    counts: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Agreed:
    """The same on every rank: sums over the step, and squared gradient norms by module, before any scaling."""

    loss: float
    label_tokens: int
    rows: Mapping[str, int]
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
    mine = [tally.loss, tally.label_tokens]
    mine += [value.get(name, 0) for value in (tally.rows, squares) for name in modules]
    mine += [tally.counts.get(name, 0) for name in counts]
    vector = torch.tensor(mine, dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector)
    loss, label_tokens, *rest = vector.tolist()
    rows, norms, others = rest[: len(modules)], rest[len(modules) : 2 * len(modules)], rest[2 * len(modules) :]
    return Agreed(
        loss=loss,
        label_tokens=round(label_tokens),
        rows={name: round(value) for name, value in zip(modules, rows, strict=True)},
        squares=dict(zip(modules, norms, strict=True)),
        counts={name: round(value) for name, value in zip(counts, others, strict=True)},
    )

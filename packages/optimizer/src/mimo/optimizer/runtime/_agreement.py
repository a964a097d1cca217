"""The one small world all-reduce of a step: everything that all ranks must agree on, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

N = TypeVar("N", int, float, Tensor)

Bin: TypeAlias = tuple[str, str]
"""A module, and a clip group of it: what squares of gradients are summed by."""

WORDS, WORD_BITS = 4, 18
"""Of a digest: so short that float64 adds up the squares of 100,000 ranks' words exactly."""


@attrs.frozen(kw_only=True)
class Tally:
    """What one rank contributes; each global quantity is given by exactly one rank for each part of it.

    Args:
        loss: sum of token losses.
        label_tokens: number of label tokens.
        rows: rows that each module ran, by module name.
        seconds: time spent in each module, by module name.
        counts: further sums by name (samples cut, samples right).
        zeros: numbers of gradients that are exactly zero, by module name.
        told: further sums of several values each by name, what models tell beside their rows: float64, on any device.
        digest: what this rank takes the samples of the coming step to be, as `WORDS` numbers below ``2**WORD_BITS``;
            None where it does not look at them.
        stops: 1 where this rank has been asked to stop after the step.
    """

    loss: float = 0.0
    label_tokens: int = 0
    rows: Mapping[str, int] = attrs.field(factory=dict)
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    counts: Mapping[str, int] = attrs.field(factory=dict)
    zeros: Mapping[str, int] = attrs.field(factory=dict)
    told: Mapping[str, Tensor] = attrs.field(factory=dict)
    digest: tuple[int, ...] | None = None
    stops: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Return the sums of both."""
        return Tally(
            loss=self.loss + other.loss,
            label_tokens=self.label_tokens + other.label_tokens,
            rows=_add(self.rows, other.rows),
            seconds=_add(self.seconds, other.seconds),
            counts=_add(self.counts, other.counts),
            zeros=_add(self.zeros, other.zeros),
            told=_add(self.told, other.told),
            digest=self.digest or other.digest,
            stops=self.stops + other.stops,
        )


@attrs.frozen(kw_only=True)
class Agreed:
    """The same on every rank: sums over the step, and squared gradient norms by module and clip group.

    Gradients are as they are before any scaling. ``alike`` says whether all ranks that gave a digest gave the same one,
    ``stops`` how many ranks have been asked to stop after the step.
    """

    loss: float
    label_tokens: int
    rows: Mapping[str, int]
    seconds: Mapping[str, float]
    counts: Mapping[str, int]
    zeros: Mapping[str, int]
    told: Mapping[str, Tensor]
    squares: Mapping[Bin, float]
    alike: bool
    stops: int

    @property
    def finite(self) -> bool:
        """Whether the loss and every gradient are finite."""
        return math.isfinite(self.loss) and all(math.isfinite(square) for square in self.squares.values())


def agree(
    tally: Tally,
    *,
    squares: Mapping[Bin, float],
    bins: Sequence[Bin] = (),
    modules: Sequence[str],
    counts: Sequence[str],
    told: Mapping[str, int] | None = None,
    device: torch.device,
) -> Agreed:
    """Sum tallies and squared norms over the world in one message.

    Args:
        tally: this rank's share.
        squares: this rank's share of the squared gradient norms.
        bins: all modules and clip groups that have one, in an order that all ranks share.
        modules: names of all modules, likewise.
        counts: names of all further sums, likewise.
        told: names of all sums of several values, likewise, and how many values each has.
        device: where the process group works.
    """
    mine = [tally.loss, tally.label_tokens, tally.stops, *_digest_terms(tally.digest)]
    named = [(tally.rows, modules), (tally.seconds, modules), (tally.zeros, modules), (tally.counts, counts)]
    mine += [values.get(name, 0) for values, names in named for name in names]
    mine += [squares.get(one, 0.0) for one in bins]
    vector = torch.tensor(mine, dtype=torch.float64, device=device)
    sizes = dict(told or {})
    if sizes:
        nothing = {name: vector.new_zeros(size) for name, size in sizes.items()}
        vector = torch.cat([vector, *(tally.told.get(name, nothing[name]).to(vector) for name in sizes)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector)
    loss, label_tokens, stops, *rest = vector[: len(mine)].tolist()
    sums = iter(rest)
    alike = _all_alike([next(sums) for _ in range(1 + 2 * WORDS)])
    rows, seconds, zeros, others = ({name: next(sums) for name in names} for _, names in named)
    return Agreed(
        loss=loss,
        label_tokens=round(label_tokens),
        rows={name: round(value) for name, value in rows.items()},
        seconds=seconds,
        squares={one: next(sums) for one in bins},
        counts={name: round(value) for name, value in others.items()},
        zeros={name: round(value) for name, value in zeros.items()},
        told=dict(zip(sizes, torch.split(vector[len(mine) :], list(sizes.values())), strict=True)) if sizes else {},
        alike=alike,
        stops=round(stops),
    )


def _digest_terms(digest: tuple[int, ...] | None) -> list[int]:
    """Return what a digest adds to the sums: one rank, its words, and their squares."""
    if digest is None:
        return [0] * (1 + 2 * WORDS)
    assert len(digest) == WORDS, digest
    return [1, *digest, *(word * word for word in digest)]


def _all_alike(sums: Sequence[float]) -> bool:
    """Tell from the sums whether all digests were the same.

    Cauchy-Schwarz: ``(sum d)^2 <= n sum d^2``, with equality for equal numbers alone. All sums are exact.
    """
    ranks, *terms = (int(value) if math.isfinite(value) else 0 for value in sums)
    return all(total * total == ranks * squares for total, squares in zip(terms[:WORDS], terms[WORDS:], strict=True))


def _add(left: Mapping[str, N], right: Mapping[str, N]) -> Mapping[str, N]:
    return {
        name: left[name] + right[name] if name in left and name in right else (left if name in left else right)[name]
        for name in {**left, **right}
    }

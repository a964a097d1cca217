"""The one small world all-reduce of a step: all sums on which ranks base the same decisions, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.topology.device_copies import to_device

N = TypeVar("N", int, float, Tensor)

NormBucket: TypeAlias = tuple[str, str]
"""A module and one of its clip groups, for which squared gradients are summed."""

WORDS, WORD_BITS = 4, 18
"""Words of a digest and their bits: float64 sums the squares of the words of 100,000 ranks exactly."""


@attrs.frozen(kw_only=True)
class LocalStats:
    """The contribution of one rank to the step's sums; exactly one rank contributes each part of a quantity.

    Args:
        loss: sum of token losses; as a scalar tensor the host need not wait for it.
        label_weight: sum of the weights of label tokens; their number where each weighs 1.
        rows: rows that each module ran, by module name.
        seconds: time spent in each module, by module name.
        counts: further sums by name (samples cut, samples right).
        zeros: number of gradient elements that are exactly zero, by module name.
        extra_sums: further sums of several values each, by name, such as metrics of models: float64, on any device.
        digest: of the samples that this rank expects in the next step, as `WORDS` numbers below ``2**WORD_BITS``; None
            on a rank that does not read them.
        stops: 1 if this rank was asked to stop after the step.
    """

    loss: float | Tensor = 0.0
    label_weight: float = 0.0
    rows: Mapping[str, int] = attrs.field(factory=dict)
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    counts: Mapping[str, int] = attrs.field(factory=dict)
    zeros: Mapping[str, int] = attrs.field(factory=dict)
    extra_sums: Mapping[str, Tensor] = attrs.field(factory=dict)
    digest: tuple[int, ...] | None = None
    stops: int = 0

    def __add__(self, other: LocalStats) -> LocalStats:
        """Return the sums of both."""
        return LocalStats(
            loss=self.loss + other.loss,
            label_weight=self.label_weight + other.label_weight,
            rows=_add(self.rows, other.rows),
            seconds=_add(self.seconds, other.seconds),
            counts=_add(self.counts, other.counts),
            zeros=_add(self.zeros, other.zeros),
            extra_sums=_add(self.extra_sums, other.extra_sums),
            digest=self.digest or other.digest,
            stops=self.stops + other.stops,
        )


@attrs.frozen(kw_only=True)
class ReducedStats:
    """The same on every rank: sums over the step, and squared gradient norms by module and clip group.

    Gradients are unscaled. ``digests_equal``: whether all digests were equal. ``stops``: how many ranks were asked to
    stop after the step.
    """

    loss: float
    label_weight: float
    rows: Mapping[str, int]
    seconds: Mapping[str, float]
    counts: Mapping[str, int]
    zeros: Mapping[str, int]
    extra_sums: Mapping[str, Tensor]
    squares: Mapping[NormBucket, float]
    digests_equal: bool
    stops: int

    @property
    def divisor(self) -> float:
        """What makes a mean over label tokens of their weighted sum."""
        return self.label_weight or 1.0

    @property
    def finite(self) -> bool:
        """Whether the loss and every gradient are finite."""
        return math.isfinite(self.loss) and all(math.isfinite(square) for square in self.squares.values())


def agree(
    stats: LocalStats,
    *,
    squares: Mapping[NormBucket, float | Tensor],
    buckets: Sequence[NormBucket] = (),
    modules: Sequence[str],
    counts: Sequence[str],
    extra_sums: Mapping[str, int] | None = None,
    device: torch.device,
) -> ReducedStats:
    """Sum statistics and squared norms over the world in one message.

    Args:
        stats: this rank's share.
        squares: this rank's share of the squared gradient norms, as numbers or scalar tensors.
        buckets: all of the run, in an order that is equal on all ranks.
        modules: names of all modules, likewise.
        counts: names of all further sums, likewise.
        extra_sums: names of all sums of several values, likewise, with their numbers of values.
        device: of the process group.
    """
    mine: list[float | Tensor] = [stats.loss, stats.label_weight, stats.stops, *_digest_terms(stats.digest)]
    named = [(stats.rows, modules), (stats.seconds, modules), (stats.zeros, modules), (stats.counts, counts)]
    mine += [values.get(name, 0) for values, names in named for name in names]
    mine += [squares.get(bucket, 0.0) for bucket in buckets]
    numbers = [0.0 if isinstance(value, Tensor) else value for value in mine]
    vector = to_device(torch.tensor(numbers, dtype=torch.float64), device)
    for place, value in enumerate(mine):
        if isinstance(value, Tensor):
            vector[place] = value
    sizes = dict(extra_sums or {})
    if sizes:
        nothing = {name: vector.new_zeros(size) for name, size in sizes.items()}
        sums_of = (to_device(stats.extra_sums.get(name, nothing[name]), device, vector.dtype) for name in sizes)
        vector = torch.cat([vector, *sums_of])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector)
    vector = vector.cpu()  # the one time that the host waits for all that the step has computed
    loss, label_weight, stops, *rest = vector[: len(mine)].tolist()
    sums = iter(rest)
    digests_equal = _digests_equal([next(sums) for _ in range(1 + 2 * WORDS)])
    rows, seconds, zeros, others = ({name: next(sums) for name in names} for _, names in named)
    return ReducedStats(
        loss=loss,
        label_weight=label_weight,
        rows={name: round(value) for name, value in rows.items()},
        seconds=seconds,
        squares={bucket: next(sums) for bucket in buckets},
        counts={name: round(value) for name, value in others.items()},
        zeros={name: round(value) for name, value in zeros.items()},
        extra_sums=dict(zip(sizes, torch.split(vector[len(mine) :], list(sizes.values())), strict=True))
        if sizes
        else {},
        digests_equal=digests_equal,
        stops=round(stops),
    )


def _digest_terms(digest: tuple[int, ...] | None) -> list[int]:
    """Return what a digest adds to the sums: one rank, its words, and their squares."""
    if digest is None:
        return [0] * (1 + 2 * WORDS)
    assert len(digest) == WORDS, digest
    return [1, *digest, *(word * word for word in digest)]


def _digests_equal(sums: Sequence[float]) -> bool:
    """Return from the sums whether all digests were equal.

    Cauchy-Schwarz: ``(sum d)^2 <= n sum d^2``, with equality only for equal numbers. All sums are exact.
    """
    ranks, *terms = (int(value) if math.isfinite(value) else 0 for value in sums)
    return all(total * total == ranks * squares for total, squares in zip(terms[:WORDS], terms[WORDS:], strict=True))


def _add(left: Mapping[str, N], right: Mapping[str, N]) -> Mapping[str, N]:
    return {
        name: left[name] + right[name] if name in left and name in right else (left if name in left else right)[name]
        for name in {**left, **right}
    }

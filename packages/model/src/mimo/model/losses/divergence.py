"""What a student learns from a teacher: how likely a row's likeliest ids are, and all others together.

A teacher's whole distribution is as wide as the vocabulary. Its k likeliest ids hold nearly all of it, and what the
others hold together follows from them; so a row is sent as k ids with k numbers. The loss is the Kullback-Leibler
divergence of the k + 1 probabilities, times the square of the temperature, by which the gradient's size doesn't depend
on it (Hinton, Vinyals, Dean: arXiv:1503.02531). It is at most that of the whole distributions, and 0 where these agree.
Shapes: T rows, V vocabulary, v this rank's span of it, k ids of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from mimo.model.losses.rows import columns_of, row_maximum, wide
from mimo.model.parallel import TensorAxis

_LOW = 0xFFFFFFFF
_BITS = 32
_COLUMNS = 1 << 13
"""Of so many ids at a time the likeliest are found, which takes several times the memory of their logits."""


@attrs.frozen(kw_only=True, eq=False)
class TopIds:
    """The likeliest ids of rows.

    Args:
        ids: [T, k] int32, the likeliest first; of equally likely ones the lowest.
        log_probabilities: [T, k] of them, of logits divided by the temperature.
        temperature: by which those of whoever is compared with them are divided too.
    """

    ids: Tensor
    log_probabilities: Tensor
    temperature: float = 1.0

    @classmethod
    def of(cls, logits: Tensor, count: int, *, temperature: float, vocabulary: int, axis: TensorAxis) -> TopIds:
        """Return the likeliest ids of rows of logits, the same on all tensor ranks, in fp32 at least.

        Args:
            logits: [T, v], this rank's span.
            count: k, at most V.
            temperature: by which logits are divided.
            vocabulary: V.
            axis: over which it is cut.
        """
        top, start = axis.largest(row_maximum(logits) / temperature), axis.span(vocabulary).start
        sums, best = torch.zeros_like(top), logits.new_empty((len(logits), 0), dtype=torch.long)
        for first in range(0, max(logits.shape[1], 1), _COLUMNS):
            scaled = wide(logits[:, first : first + _COLUMNS]) / temperature
            best = _largest(torch.cat([best, _keys(scaled.float(), start + first)], dim=1), count)
            sums += scaled.sub_(top.unsqueeze(1)).exp_().sum(1)
        sums = axis.total(sums)
        if axis.size > 1:
            best = _largest(axis.gather(best.t()).t(), count)
        chosen = _values(best) - (top + sums.log()).unsqueeze(1)
        return cls(ids=(_LOW - (best & _LOW)).int(), log_probabilities=chosen, temperature=temperature)

    def at(self, rows: Tensor | slice) -> TopIds:
        """Return those of some rows."""
        return attrs.evolve(self, ids=self.ids[rows], log_probabilities=self.log_probabilities[rows])

    @classmethod
    def join(cls, parts: Sequence[TopIds]) -> TopIds:
        """Return the rows of several of one temperature, one after the other; of at least one."""
        return attrs.evolve(
            parts[0],
            ids=torch.cat([part.ids for part in parts]),
            log_probabilities=torch.cat([part.log_probabilities for part in parts]),
        )

    def to_bytes(self, dtype: torch.dtype) -> Tensor:
        """Return them as rows of bytes, [T, k · (4 + those of a number)]: the ids, then the numbers in ``dtype``."""
        numbers = self.log_probabilities.to(dtype)
        return torch.cat([_bytes(self.ids), _bytes(numbers)], dim=1)

    @classmethod
    def from_bytes(cls, rows: Tensor, dtype: torch.dtype, *, temperature: float) -> TopIds:
        """Return what `to_bytes` has made rows of; numbers become fp32 at least."""
        count = rows.shape[1] // (torch.int32.itemsize + dtype.itemsize)
        ids, numbers = rows.split([count * torch.int32.itemsize, count * dtype.itemsize], dim=1)
        log_probabilities = wide(_numbers(numbers, dtype))
        return cls(ids=_numbers(ids, torch.int32), log_probabilities=log_probabilities, temperature=temperature)


def _keys(values: Tensor, start: int) -> Tensor:
    """Return numbers [T, v] in int64 that order as the values do, and equal ones by id, the lowest first."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0, as of the two zeros only one is to be there
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(start, start + values.shape[1], device=values.device)
    return (ordered << _BITS) + (_LOW - ids)


def _values(keys: Tensor) -> Tensor:
    """Return the values of keys."""
    ordered = (keys >> _BITS).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _largest(keys: Tensor, count: int) -> Tensor:
    """Return the largest keys [T, count] of each row, descending; where a row has fewer, the least numbers follow."""
    found = keys.topk(min(count, keys.shape[1]), dim=1).values
    missing = found.new_full((len(found), count - found.shape[1]), torch.iinfo(torch.int64).min)
    return torch.cat([found, missing], dim=1)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Copied in any case: a slice of one row counts as contiguous, and begins where no such number may.
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


@attrs.frozen(kw_only=True, eq=False)
class _Compared:
    """What a divergence is made of, and its gradient. The student's probabilities are those at the temperature.

    Attributes:
        rest: [T, v] exponentials of the other ids' logits less the largest of these, 0 for the k.
        rest_top: [T] the largest logit of the others, of all spans.
        rest_sums: [T] of their exponentials, of all spans.
        rest_factors: [T] by which these become the gradient.
        columns: [T, k] where the ids lie in this span, [T, 0] of an empty one.
        excess: likewise, the student's probability less the teacher's; 0 where an id doesn't lie there.
        top, sums: [T] the largest of all logits, and the sum of all exponentials less that.
    """

    rest: Tensor
    rest_top: Tensor
    rest_sums: Tensor
    rest_factors: Tensor
    columns: Tensor
    excess: Tensor
    top: Tensor
    sums: Tensor

    @property
    def known(self) -> tuple[Tensor, ...]:
        """The largest logits, and the sums of exponentials."""
        return self.rest_top, self.rest_sums, self.top, self.sums

    def gradient(self, each: Tensor) -> Tensor:
        """Return the gradient [T, v] of the student's logits, where the exponentials of the others lie."""
        found = self.rest.mul_((each * self.rest_factors).unsqueeze(1))
        return found.scatter_add_(1, self.columns, each.unsqueeze(1) * self.excess)


@attrs.frozen(kw_only=True, eq=False)
class Divergence:
    """The divergence of a student's rows from a teacher's, a `mimo.model.losses.RowLoss`.

    Args:
        teacher: the likeliest ids of the same rows.
        vocabulary: V.
        axis: over which the student's logits are cut.
    """

    teacher: TopIds
    vocabulary: int
    axis: TensorAxis

    def of(self, some: slice) -> Divergence:
        """Return the loss of some of the rows."""
        return attrs.evolve(self, teacher=self.teacher.at(some))

    def learn(self, logits: Tensor, *, overwrites: bool) -> tuple[_Compared, Tensor]:
        """Return what the gradient is made of, and the loss [T]; asks all tensor ranks."""
        wanted, rest_wanted = self._wanted()
        columns, here, chosen, scaled = self._split(logits, overwrites=overwrites)
        rest_top = row_maximum(scaled)
        top = torch.maximum(rest_top, chosen.amax(1)) if chosen.shape[1] else rest_top
        top, rest_top = self.axis.largest(torch.stack((top, rest_top)))
        rest_top = rest_top.clamp_min(torch.finfo(rest_top.dtype).min)  # where there are no others
        rest = scaled.sub_(rest_top.unsqueeze(1)).exp_()
        less = chosen - top.unsqueeze(1)
        agreed = (wanted[:, : less.shape[1]] * less.masked_fill(~here, 0.0)).sum(1)
        rest_sums, sums, agreed = self.axis.total(torch.stack((rest.sum(1), less.exp().sum(1), agreed)))
        sums = sums + rest_sums * (rest_top - top).exp()
        agreed = agreed + _times(rest_wanted, rest_top - top + rest_sums.log())
        own = torch.xlogy(wanted, wanted).sum(1) + torch.xlogy(rest_wanted, rest_wanted)
        known = rest_top, rest_sums, top, sums
        found = self._compared(rest, chosen, columns, here, known)
        return found, (own - agreed + sums.log()) * self.teacher.temperature**2

    def again(self, logits: Tensor, known: tuple[Tensor, ...], *, overwrites: bool) -> _Compared:
        """Return what the gradient is made of once more."""
        columns, here, chosen, scaled = self._split(logits, overwrites=overwrites)
        rest = scaled.sub_(known[0].unsqueeze(1)).exp_()
        return self._compared(rest, chosen, columns, here, known)

    def _wanted(self) -> tuple[Tensor, Tensor]:
        """Return the teacher's probabilities [T, k] of the ids, and [T] of all others together; rounded or not, 1."""
        found = self.teacher.log_probabilities.exp()
        total = found.sum(1)
        if found.shape[1] >= self.vocabulary:
            return found / total.unsqueeze(1), torch.zeros_like(total)
        return found / total.clamp_min(1.0).unsqueeze(1), (1.0 - total).clamp_min(0.0)

    def _split(self, logits: Tensor, *, overwrites: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return columns [T, k] and whether they are here, what lies there, and all else, minus infinity there."""
        columns, here = columns_of(self.teacher.ids.long(), self.axis.span(self.vocabulary).start, logits.shape[1])
        scaled = (
            wide(logits.detach()).div_(self.teacher.temperature)
            if overwrites
            else wide(logits) / self.teacher.temperature
        )
        chosen = scaled.gather(1, columns).masked_fill_(~here, -torch.inf)
        return columns, here, chosen, scaled.scatter_add_(1, columns, _times(here, -torch.inf).to(scaled.dtype))

    def _compared(
        self, rest: Tensor, chosen: Tensor, columns: Tensor, here: Tensor, known: tuple[Tensor, ...]
    ) -> _Compared:
        rest_top, rest_sums, top, sums = known
        wanted, rest_wanted = self._wanted()
        excess = (chosen - top.unsqueeze(1)).exp() / sums.unsqueeze(1) - wanted[:, : chosen.shape[1]]
        factors = (rest_top - top).exp() / sums - _times(rest_wanted, 1 / rest_sums)
        return _Compared(
            rest=rest,
            rest_top=rest_top,
            rest_sums=rest_sums,
            rest_factors=factors * self.teacher.temperature,
            columns=columns,
            excess=excess.masked_fill(~here, 0.0) * self.teacher.temperature,
            top=top,
            sums=sums,
        )


def _times(weights: Tensor, values: Tensor | float) -> Tensor:
    """Return products, 0 where the weight is 0, whatever the value."""
    return torch.where(weights != 0, weights * values, 0.0)

"""What parts that mix rows by themselves take of a sample, by its length: scans, short convolutions, linear attention.

Each runs without storage on samples of a few lengths, and others follow from these: by the number of chunks where one
pads samples to whole ones, by a polynomial of the second degree otherwise. Equal parts run once. Work that goes element
by element, as decays and the states of a scan do from row to row, is left out, but for products that are summed up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.model import OpCost
from mimo.model.runtime import ContextAxis
from mimo_transformers.cost.products import ForwardCounter
from mimo_transformers.cost.saved import SavedTensors
from mimo_transformers.model.attention import CallRecord, PackedRows, hold_rows, rows_of
from mimo_transformers.model.per_sample import PerSample, change_tensors, tensors_in

_STEPS = (7, 15, 31)
"""Rows by which others are known of what takes as much for each, as what goes from row to row. No width is odd."""
_ROWS = ((15, 63, 255), (255, 511, 767))
_CHUNKS = ((1, 2, 4), (4, 8, 16))
"""By which of them other numbers of rows, or of chunks, are known: up to the last of the first, and above."""
_LARGEST_CHUNK = 4096
_TOLERANCE = 1e-6
_SAME = 1.05
"""How much more operations at most a sample takes that is padded to the same chunks, by what takes its rows alone."""


@attrs.frozen(kw_only=True, eq=False)
class MixerCall:
    """A part as it was called in a forward.

    Args:
        part: itself.
        given: positional and keyword arguments, the tensors in them of rows [1, T, …].
        causal: whether its rows see only earlier ones.
    """

    part: PerSample
    given: tuple[Any, Any]
    causal: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """What parts have in common that take the same."""
        weights = tuple(tuple(one.shape) for one in self.part.parameters())
        rows = tuple((*one.shape[2:], one.dtype) for one in tensors_in(self.given))
        return (type(self.part).__name__, weights, rows, self.causal)


@attrs.frozen
class _Sample:
    """What a part takes of one sample.

    Args:
        inner: operations in products of activations.
        copied: elements that it saves, of tensors as wide as the rows between layers.
        split: of others.
    """

    inner: float
    copied: float
    split: float

    def plus(self, other: _Sample, times: float = 1.0) -> _Sample:
        """Return what this and so many others take."""
        return _Sample(
            inner=self.inner + times * other.inner,
            copied=self.copied + times * other.copied,
            split=self.split + times * other.split,
        )

    def cost(self, times: float) -> OpCost:
        """Return so many as the cost of a stage."""
        return OpCost(inner=times * self.inner, copied=times * self.copied, split=times * self.split)


@attrs.frozen
class MixerCost:
    """What equal parts take, by the lengths of samples.

    Args:
        count: how many there are.
        chunk: to whole ones of so many rows samples are padded; 1 where they aren't.
        row: what each row takes for itself, where samples are padded.
        pieces: of the curve, each by the last number of chunks for which it holds and three points on it.
    """

    count: int
    chunk: int
    row: _Sample
    pieces: Sequence[tuple[float, Sequence[tuple[int, _Sample]]]]

    @classmethod
    def of(cls, call: MixerCall, count: int, hidden: int) -> MixerCost:
        """Return what so many equal parts take that were called so, beside rows of a width of ``hidden``."""

        @cache
        def sample(length: int) -> _Sample:
            return _measure(call, length, hidden)

        chunk = _chunk(lambda length: sample(length).inner)
        row = _Sample(0, 0, 0)
        if chunk > 1:
            row = sample(2 * chunk - 1).plus(sample(2 * chunk - 2), -1)

        def measured(numbers: Iterable[int]) -> list[tuple[int, _Sample]]:
            """Return what these numbers of chunks take: all but the last row, and that."""
            missing = 1 if chunk > 1 else 0
            return [(number, sample(number * chunk - missing).plus(row, missing)) for number in numbers]

        points = measured(_STEPS) if chunk == 1 else []
        if points and _is_line([(length, one.inner) for length, one in points]):
            return cls(count, chunk, row, [(math.inf, points)])
        first, others = map(measured, _ROWS if chunk == 1 else _CHUNKS)
        return cls(count, chunk, row, [(first[-1][0], first), (math.inf, others)])

    def cost(self, lengths: Iterable[int]) -> OpCost:
        """Return what all of them take of samples of these lengths."""
        total = OpCost()
        for length, samples in Counter(lengths).items():
            if length:
                total += self._sample(length).cost(self.count * samples)
        return total

    def _sample(self, length: int) -> _Sample:
        number = -(-length // self.chunk)
        points = next(points for last, points in self.pieces if number <= last)
        values = zip(*((one.inner, one.copied, one.split) for _, one in points), strict=True)
        places = [place for place, _ in points]
        whole = _Sample(*(max(0.0, _through(places, own, number)) for own in values))
        return whole.plus(self.row, length - number * self.chunk)


@contextmanager
def mixer_calls(parts: Iterable[nn.Module], saved: SavedTensors) -> Iterator[list[MixerCall]]:
    """Take down the calls of parts that mix rows within, and collect nothing of what they save.

    Args:
        parts: all of a stage.
        saved: where what is saved within is collected.
    """
    calls, inside, hooks = list[MixerCall](), list[nn.Module](), []

    def begin(part: nn.Module, given: Any, named: Any) -> None:
        assert isinstance(part, PerSample)
        if not inside:  # what lies inside of another runs with that
            calls.append(MixerCall(part=part, given=(given, named), causal=rows_of(part).causal))
            saved.pause()
        inside.append(part)

    def end(_part: nn.Module, _given: Any, _found: Any) -> None:
        inside.pop()
        if not inside:
            saved.resume()

    for part in parts:
        if isinstance(part, PerSample):
            hooks += [part.register_forward_pre_hook(begin, with_kwargs=True), part.register_forward_hook(end)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def mixer_costs(calls: Iterable[MixerCall], hidden: int) -> list[MixerCost]:
    """Return what parts take that were called so, beside rows of a width of ``hidden``."""
    kinds: dict[tuple[object, ...], list[MixerCall]] = {}
    for call in calls:
        kinds.setdefault(call.kind, []).append(call)
    return [MixerCost.of(same[0], len(same), hidden) for same in kinds.values()]


def _measure(call: MixerCall, length: int, hidden: int) -> _Sample:
    """Return what a part takes of a sample of so many rows."""
    part = call.part
    counter = ForwardCounter(((one, "") for one in part.parameters()), part="")
    rows = PackedRows(
        lengths=(length,),
        positions=torch.arange(length),
        context=ContextAxis.single(),
        cache=None,
        resumed=None,
        causal=call.causal,
        record=CallRecord(),
    )

    def longer(one: Tensor) -> Tensor:
        found = torch.ones(1, length, *one.shape[2:], dtype=one.dtype, device=one.device)
        return found.requires_grad_(one.requires_grad)

    given, named = change_tensors(call.given, longer)
    with hold_rows(part, rows), counter.counting():
        super(PerSample, part).forward(*given, **named)
    sizes = [(shape[-2:] == (length, hidden), elements) for shape, elements in counter.saved.elements()]
    return _Sample(
        inner=sum(cost.inner for cost in counter.costs.values()),
        copied=sum(size for is_row, size in sizes if is_row),
        split=sum(size for is_row, size in sizes if not is_row),
    )


def _chunk(inner: Callable[[int], float]) -> int:
    """Return to whole chunks of how many rows samples are padded, from operations by length; 1 if they aren't."""
    least = 2
    most = _SAME * inner(least)
    if not most:
        return 1
    while least <= _LARGEST_CHUNK and inner(2 * least) <= most:
        least *= 2
    if least == 2:  # noqa: PLR2004 - as above
        return 1
    above = 2 * least if inner(least + 1) <= most else least + 1  # most chunks are of a power of two
    while above - least > 1:
        middle = (least + above) // 2
        least, above = (middle, above) if inner(middle) <= most else (least, middle)
    return least


def _is_line(points: Sequence[tuple[int, float]]) -> bool:
    (first, start), (second, middle), (third, end) = points
    wanted = start + (middle - start) * (third - first) / (second - first)
    return abs(wanted - end) <= _TOLERANCE * max(abs(end), 1.0)


def _through(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """Return the value at a place of the polynomial through points (Lagrange's form)."""
    total = 0.0
    for own, value in zip(places, values, strict=True):
        factor = 1.0
        for other in places:
            factor *= (place - other) / (own - other) if other != own else 1.0
        total += factor * value
    return total

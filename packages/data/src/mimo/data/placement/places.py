"""Where samples and items of a step are, as flat arrays: what placing works on.

N samples of a step, I items of an encoder in it, P passes of a module, L lanes of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.placement.ordering import ascending
from mimo.data.placement.sizes import EncoderLoads, Loads, PlacedMicrobatch
from mimo.topology import Ownership

Whole = NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class Places:
    """Where a step's samples and items are; in a microbatch samples are ascending, items sample by sample.

    Args:
        microbatches: of the step.
        of_sample: ``[N]`` the microbatch of each sample.
        lanes: ``[N]`` the language lane of each.
        items: for each encoder ``[I]``, the lane of each item.
    """

    microbatches: int
    of_sample: Whole
    lanes: Whole
    items: tuple[Whole, ...]

    @classmethod
    def of(cls, language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch]) -> Places:
        """Return the places that microbatches stand for."""
        of_sample, lanes = (np.zeros(len(language.costs), dtype=np.int64) for _ in range(2))
        items = tuple(np.zeros(len(one.costs), dtype=np.int64) for one in encoders)
        for index, one in enumerate(placed):
            samples = np.array(one.samples, dtype=np.int64)
            of_sample[samples] = index
            lanes[samples] = _lanes_of(one.owners)
            for encoder, found, owners in zip(encoders, items, one.items, strict=True):
                found[_items_of(encoder, samples)] = _lanes_of(owners)
        return cls(microbatches=len(placed), of_sample=of_sample, lanes=lanes, items=items)

    def placed(self, language: Loads, encoders: Sequence[EncoderLoads]) -> tuple[PlacedMicrobatch, ...]:
        """Return the microbatches."""
        owners = self._owners(self.of_sample, self.lanes, language.lanes)
        items = [
            self._owners(self.of_sample[one.samples], lanes, one.lanes)
            for one, lanes in zip(encoders, self.items, strict=True)
        ]
        order = ascending(self.of_sample).tolist()
        found, first = [], 0
        for index, own in enumerate(owners):
            last = first + own.bounds[-1]
            samples = tuple(order[first:last])
            found.append(PlacedMicrobatch(samples=samples, owners=own, items=tuple(one[index] for one in items)))
            first = last
        return tuple(found)

    def _owners(self, of_thing: Whole, lanes: Whole, count: int) -> list[Ownership]:
        """Return who owns what in each microbatch, as `Ownership.of` does, from microbatch and lane of each thing."""
        sizes = np.bincount(of_thing * count + lanes, minlength=self.microbatches * count)
        bounds = np.zeros((self.microbatches, count + 1), dtype=np.int64)
        np.cumsum(sizes.reshape(self.microbatches, count), axis=1, out=bounds[:, 1:])
        order = ascending(of_thing)
        own, found, first = lanes[order], [], 0
        for ends in bounds.tolist():
            last = first + ends[-1]
            mine = own[first:last]
            in_order = bool((mine[1:] >= mine[:-1]).all())
            places = None if in_order else tuple(ascending(mine).tolist())
            found.append(Ownership(tuple(ends), places))
            first = last
        return found


def lane_sums(loads: Loads, places: Places, encoder: int, values: Whole) -> Whole:
    """Return ``[P, L]`` what lanes have of ``values`` in each pass of an encoder, or of the language model by -1."""
    lanes = places.lanes if encoder < 0 else places.items[encoder]
    begins = np.zeros(places.microbatches, dtype=np.int64)  # of the lanes of its pass among all of them
    for number, served in enumerate(loads.passes):
        begins[list(served)] = number * loads.lanes
    number_of, count = begins[places.of_sample], len(loads.passes)
    if isinstance(loads, EncoderLoads):
        number_of = number_of[loads.samples]
    number_of += lanes
    sums = np.bincount(number_of, weights=values, minlength=count * loads.lanes)
    return sums.astype(np.int64).reshape(count, loads.lanes)


def even_lanes(place: Whole, sizes: Whole, lanes: int) -> Whole:
    """Return the lane of each sample, cut as `Ownership.even` does, from its place in its microbatch of this size."""
    share, more = np.divmod(sizes, lanes)
    larger = more * (share + 1)
    found: Whole = np.where(place < larger, place // (share + 1), more + (place - larger) // np.maximum(share, 1))
    return found


def _lanes_of(owners: Ownership) -> Whole:
    """Return the lane of each position."""
    lanes = np.repeat(np.arange(owners.lanes), np.diff(owners.bounds))
    if owners.order is None:
        return lanes
    found = np.empty_like(lanes)
    found[list(owners.order)] = lanes
    return found


def _items_of(encoder: EncoderLoads, samples: Whole) -> Whole:
    """Return the items of samples, in the order of these."""
    starts = np.searchsorted(encoder.samples, samples)
    counts = np.searchsorted(encoder.samples, samples, side="right") - starts
    offsets = np.cumsum(counts) - counts
    found: Whole = np.arange(counts.sum()) + np.repeat(starts - offsets, counts)
    return found

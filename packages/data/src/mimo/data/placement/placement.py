"""Which microbatch and lane each sample of a step goes to, and each of its items: by count, or by cost.

By cost, samples are first put into as many bins as there are microbatches times language lanes, by what they cost the
language model. Bins are then put together to microbatches so that these cost encoders equally much. Last, each item
goes to a lane of its encoder, whatever the lane of its sample.

No bin and no encoder's lane of a pass gets more rows than the fullest one by count has in the same step: what memory
suffices for the one suffices for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mimo.data.placement.partition import partition, partition_near
from mimo.data.placement.sizes import EncoderLoads, Loads, PlacedMicrobatch
from mimo.topology import Ownership

Whole = NDArray[np.int64]
_UNEVEN = 105
"""Percent of the average that the fullest bin may have while bins count as even."""
_ROUNDS = 24
"""How often bins of a step, or lanes of a pass, exchange at most."""


def place_by_count(
    language: Loads, encoders: Sequence[EncoderLoads], *, microbatches: int, micro_batch: int
) -> tuple[PlacedMicrobatch, ...]:
    """Cut the samples of a step in order: ``micro_batch`` for each language lane, the last microbatches may be short.

    An encoder's lanes have the items of equally many samples each.
    """
    each, total = micro_batch * language.lanes, len(language.costs)
    found = []
    for index in range(microbatches):
        samples = range(min(index * each, total), min((index + 1) * each, total))
        items = []
        for encoder in encoders:
            low, high = np.searchsorted(encoder.samples, [samples.start, samples.stop])
            counts = np.bincount(encoder.samples[low:high] - samples.start, minlength=len(samples))
            ends = np.concatenate([[0], np.cumsum(counts[: len(samples)])])
            bounds = ends[np.array(Ownership.even(len(samples), encoder.lanes).bounds)]
            items.append(Ownership(tuple(bounds.tolist())))
        owners = Ownership.even(len(samples), language.lanes)
        found.append(PlacedMicrobatch(samples=tuple(samples), owners=owners, items=tuple(items)))
    return tuple(found)


def place_by_cost(
    language: Loads, encoders: Sequence[EncoderLoads], *, microbatches: int, micro_batch: int
) -> tuple[PlacedMicrobatch, ...]:
    """Place samples and items by cost; by count where that is no worse by `step_cost`.

    Args:
        language: what samples cost the language model.
        encoders: what items cost each encoder.
        microbatches: of the step.
        micro_batch: samples of a microbatch for each language lane, by count.
    """
    return improved(
        language, encoders, place_by_count(language, encoders, microbatches=microbatches, micro_batch=micro_batch)
    )


def improved(
    language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch], *, most_rows: int = 0
) -> tuple[PlacedMicrobatch, ...]:
    """Return a placement by cost of what another has placed, in as many microbatches; the other where it is no better.

    Args:
        language: what samples cost the language model.
        encoders: what items cost each encoder.
        placed: the other one.
        most_rows: of a language lane in a microbatch; 0: as many as the fullest one has.
    """
    choices = (tuple(placed), *_by_cost(language, encoders, placed, most_rows))
    return min(choices, key=partial(step_cost, language, encoders))  # of equal ones the first


def step_cost(language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch]) -> int:
    """Return what a step costs at most in a pipeline without other delays: what a placement by cost makes small.

    For each module, its passes one after the other, each as long as its slowest lane, and the longest of them once
    more for every further pipeline rank; all of it divided by the pipeline ranks among which each pass is divided.
    Exact, in units of 1 / the least common multiple of these numbers.
    """
    share = int(np.lcm.reduce([one.stages for one in (language, *encoders)], dtype=np.int64))
    total = 0
    for number, one in enumerate((language, *encoders)):
        slowest = [max(lanes) for lanes in lane_costs(language, encoders, placed, number - 1)]
        total += (sum(slowest) + (one.stages - 1) * max(slowest, default=0)) * (share // one.stages)
    return total


def lane_costs(
    language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch], encoder: int = -1
) -> list[list[int]]:
    """Return what each lane has to do in each pass of an encoder, or of the language model where that is -1."""
    loads = language if encoder < 0 else encoders[encoder]
    return [_sums(loads, placed, served, encoder, loads.costs) for served in loads.passes]


def lane_rows(
    language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch], encoder: int = -1
) -> list[list[int]]:
    """Return how many rows each lane has in each pass likewise."""
    loads = language if encoder < 0 else encoders[encoder]
    return [_sums(loads, placed, served, encoder, loads.rows) for served in loads.passes]


def _sums(
    loads: Loads, placed: Sequence[PlacedMicrobatch], served: Sequence[int], encoder: int, values: Whole
) -> list[int]:
    totals = np.zeros(loads.lanes, dtype=np.int64)
    for index in served:
        one = placed[index]
        owners = one.owners if encoder < 0 else one.items[encoder]
        things = np.array(one.samples, dtype=np.int64)
        if isinstance(loads, EncoderLoads):
            things = _items_of(loads, things)
        ordered = values[things] if owners.order is None else values[things][list(owners.order)]
        before = np.concatenate([[0], np.cumsum(ordered)])
        totals += np.diff(before[list(owners.bounds)])
    return [int(total) for total in totals]


def _items_of(encoder: EncoderLoads, samples: Whole) -> Whole:
    """Return the items of samples, in the order of these."""
    starts = np.searchsorted(encoder.samples, samples)
    counts = np.searchsorted(encoder.samples, samples, side="right") - starts
    offsets = np.cumsum(counts) - counts
    found: Whole = np.arange(counts.sum()) + np.repeat(starts - offsets, counts)
    return found


def _by_cost(
    language: Loads, encoders: Sequence[EncoderLoads], even: Sequence[PlacedMicrobatch], most_rows: int
) -> Iterator[tuple[PlacedMicrobatch, ...]]:
    """Yield placements by cost that keep the bounds, if there are any."""
    lanes, microbatches = language.lanes, len(even)
    most = most_rows or max(map(max, lane_rows(language, encoders, even)), default=0)
    bins = partition(language.costs, language.rows, lanes * microbatches, most_rows=most, rounds=_ROUNDS)
    if bins is None:
        return
    groups = [_grouped(bins, encoders, lanes, microbatches)]
    loads = np.bincount(bins, weights=language.costs, minlength=lanes * microbatches).astype(np.int64)
    if not encoders or int(loads.max()) * len(loads) > int(loads.sum()) * _UNEVEN // 100:
        # Bins that wait for one another have about the same to do, where all can't have.
        groups.append(np.argsort(np.argsort(-loads, kind="stable"), kind="stable") // lanes)
    for group in groups:
        placed = _placed(language, encoders, even, bins, group)
        if placed is not None:
            yield placed


def _placed(
    language: Loads, encoders: Sequence[EncoderLoads], even: Sequence[PlacedMicrobatch], bins: Whole, group: Whole
) -> tuple[PlacedMicrobatch, ...] | None:
    """Return the placement of samples in bins, and of these in microbatches; None where a bound can't be kept.

    Args:
        language: what samples cost the language model.
        encoders: what items cost each encoder.
        even: the placement by count.
        bins: of each sample.
        group: of each bin its microbatch.
    """
    lanes, microbatches = language.lanes, len(even)
    number = np.argsort(np.argsort(group, kind="stable"), kind="stable") % lanes  # of each bin in its microbatch
    of_sample = group[bins]
    found = []
    for index in range(microbatches):
        samples = np.flatnonzero(of_sample == index)
        found.append((samples, number[bins[samples]]))
    items = [_place_items(one, found, even, language, encoders, number) for number, one in enumerate(encoders)]
    if any(one is None for one in items):
        return None
    return tuple(
        PlacedMicrobatch(
            samples=tuple(samples.tolist()),
            owners=_owned(owners, lanes),
            items=tuple(one[index] for one in items if one is not None),
        )
        for index, (samples, owners) in enumerate(found)
    )


def _grouped(bins: Whole, encoders: Sequence[EncoderLoads], lanes: int, microbatches: int) -> Whole:
    """Return the microbatch of each bin, ``lanes`` bins in each, encoders' costs spread evenly over them."""
    count = lanes * microbatches
    if microbatches == 1 or not encoders:
        return np.arange(count) // lanes
    sums = [np.bincount(bins[one.samples], weights=one.costs, minlength=count).astype(np.int64) for one in encoders]
    if len(encoders) == 1:
        found = partition(sums[0], np.zeros_like(sums[0]), microbatches, most_rows=0, rounds=_ROUNDS, spare=0)
        assert found is not None, "no rows are more than none"
        return found
    shares = np.stack([(own << 12) // max(int(own.sum()) // count, 1) for own in sums])  # [encoders, bins]
    loads, room = np.zeros((len(encoders), microbatches), dtype=np.int64), np.full(microbatches, lanes)
    group = np.zeros(count, dtype=np.int64)
    for index in np.argsort(-shares.sum(0), kind="stable").tolist():
        after = (loads + shares[:, index : index + 1]).max(0)
        chosen = int(np.where(room > 0, after, np.iinfo(np.int64).max).argmin())
        group[index] = chosen
        loads[:, chosen] += shares[:, index]
        room[chosen] -= 1
    return group


def _place_items(
    encoder: EncoderLoads,
    placed: Sequence[tuple[Whole, Whole]],
    even: Sequence[PlacedMicrobatch],
    language: Loads,
    encoders: Sequence[EncoderLoads],
    number: int,
) -> dict[int, Ownership] | None:
    """Place the items of an encoder, pass by pass; None where a bound can't be kept.

    Args:
        encoder: whose.
        placed: the samples of each microbatch, and the language lane of each of them.
        even: the placement by count.
        language: what samples cost the language model.
        encoders: all of them.
        number: of this one.
    """
    most = max(map(max, lane_rows(language, encoders, even, number)), default=0)
    found: dict[int, Ownership] = {}
    homes = np.array([[*own, *(-1,) * (max(map(len, encoder.homes)) - len(own))] for own in encoder.homes])
    for served in encoder.passes:
        things = [_items_of(encoder, placed[index][0]) for index in served]
        together = np.concatenate(things)
        owners = np.zeros(len(language.costs), dtype=np.int64)
        for index in served:
            owners[placed[index][0]] = placed[index][1]
        lanes = partition_near(
            encoder.costs[together],
            encoder.rows[together],
            _homes_of(homes, owners[encoder.samples[together]]),
            encoder.lanes,
            most_rows=most,
            rounds=_ROUNDS,
        )
        if lanes is None:
            return None
        first = 0
        for index, own in zip(served, things, strict=True):
            found[index] = _owned(lanes[first : first + len(own)], encoder.lanes)
            first += len(own)
    return found


def _homes_of(homes: Whole, lanes: Whole) -> Whole:
    """Return where each item of a pass is at home, from the language lane of its sample; in turn if in several.

    Args:
        homes: of each language lane, -1 behind them.
        lanes: of each item's sample.
    """
    count = (homes >= 0).sum(1)
    if not count.any():
        return np.full(len(lanes), -1)
    order = np.argsort(lanes, kind="stable")
    turn = np.empty_like(lanes)
    turn[order] = np.arange(len(lanes)) - np.searchsorted(lanes[order], lanes[order])
    found: Whole = homes[lanes, turn % np.maximum(count, 1)[lanes]]
    return found


def _owned(lanes: Whole, count: int) -> Ownership:
    """Return who owns what, as `Ownership.of` does."""
    bounds = (0, *np.cumsum(np.bincount(lanes, minlength=count)).tolist())
    if (lanes[1:] >= lanes[:-1]).all():
        return Ownership(bounds)
    return Ownership(bounds, tuple(np.argsort(lanes, kind="stable").tolist()))

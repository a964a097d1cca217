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

from mimo.data.placement.ordering import ascending, firsts_of, ranks_of
from mimo.data.placement.partition import partition, partition_near, partition_uneven
from mimo.data.placement.places import Places, Whole, even_lanes, lane_sums
from mimo.data.placement.sizes import EncoderLoads, Loads, PlacedMicrobatch

_UNEVEN = 105
"""Percent of the average that the fullest bin may have while bins count as even."""
_ROUNDS = 16
"""How often bins of a step, or lanes of a pass, exchange at most."""
_FULL = np.int64(1 << 62)
"""What a microbatch with as many bins as it has lanes has to do: more than any other."""


def place_by_count(
    language: Loads, encoders: Sequence[EncoderLoads], *, microbatches: int, micro_batch: int
) -> tuple[PlacedMicrobatch, ...]:
    """Cut the samples of a step in order: ``micro_batch`` for each language lane, the last microbatches may be short.

    An encoder's lanes have the items of equally many samples each.
    """
    return _by_count(language, encoders, microbatches, micro_batch).placed(language, encoders)


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
    even = _by_count(language, encoders, microbatches, micro_batch)
    return _improved(language, encoders, even, 0).placed(language, encoders)


def place_filled(
    language: Loads, encoders: Sequence[EncoderLoads], bins: Whole, *, most_rows: int, balanced: bool
) -> tuple[PlacedMicrobatch, ...]:
    """Place the samples of bins, one for each lane of each microbatch as far as there are bins; see `fill`.

    An encoder's lanes have the items of equally many samples each. Where this is to be balanced and that costs less,
    samples and items are placed by cost instead, over all microbatches.

    Args:
        language: what samples cost the language model, in as many microbatches as there are to be.
        encoders: what items cost each encoder.
        bins: ``[N]`` of each sample.
        most_rows: of a language lane in a microbatch.
        balanced: whether samples may go elsewhere.
    """
    microbatches = len(language.passes)
    assert bins.max(initial=-1) < language.lanes * microbatches, (bins, language.lanes, microbatches)
    found = bins // language.lanes
    place = np.empty_like(found)
    order = np.argsort(found, kind="stable")
    place[order] = np.arange(len(found)) - firsts_of(found[order])
    sizes = np.bincount(found, minlength=microbatches)[found]
    filled = Places(
        microbatches=microbatches,
        of_sample=found,
        lanes=bins % language.lanes,
        items=tuple(even_lanes(place, sizes, one.lanes)[one.samples] for one in encoders),
    )
    return (_improved(language, encoders, filled, most_rows) if balanced else filled).placed(language, encoders)


def _improved(language: Loads, encoders: Sequence[EncoderLoads], even: Places, most_rows: int) -> Places:
    """Return a placement by cost, in as many microbatches as another one; that where it is no worse."""
    if _is_even(language, encoders, even):  # which is the least that any placement costs
        return even
    choices = (even, *_by_cost(language, encoders, even, most_rows))
    return min(choices, key=partial(_step_cost, language, encoders))  # of equal ones the first


def step_cost(language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch]) -> int:
    """Return what a step costs at most in a pipeline without other delays: what a placement by cost makes small.

    For each module, its passes one after the other, each as long as its slowest lane, and the longest of them once
    more for every further pipeline rank; all of it divided by the pipeline ranks among which each pass is divided.
    Exact, in units of 1 / the least common multiple of these numbers.
    """
    return _step_cost(language, encoders, Places.of(language, encoders, placed))


def lane_costs(
    language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch], encoder: int = -1
) -> list[list[int]]:
    """Return what each lane has to do in each pass of an encoder, or of the language model where that is -1."""
    loads = language if encoder < 0 else encoders[encoder]
    sums: list[list[int]] = lane_sums(loads, Places.of(language, encoders, placed), encoder, loads.costs).tolist()
    return sums


def lane_rows(
    language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch], encoder: int = -1
) -> list[list[int]]:
    """Return how many rows each lane has in each pass likewise."""
    loads = language if encoder < 0 else encoders[encoder]
    sums: list[list[int]] = lane_sums(loads, Places.of(language, encoders, placed), encoder, loads.rows).tolist()
    return sums


def fed_lanes(
    language: Loads, encoders: Sequence[EncoderLoads], placed: Sequence[PlacedMicrobatch], encoder: int
) -> list[tuple[int, int]]:
    """Return each lane of an encoder with each language lane that gets rows of it in the step, ascending."""
    places, loads = Places.of(language, encoders, placed), encoders[encoder]
    pairs = np.unique(places.items[encoder] * language.lanes + places.lanes[loads.samples])
    return [divmod(pair, language.lanes) for pair in pairs.tolist()]


def _by_count(language: Loads, encoders: Sequence[EncoderLoads], microbatches: int, micro_batch: int) -> Places:
    positions, each = np.arange(len(language.costs)), micro_batch * language.lanes
    found = positions // each
    place, sizes = positions - found * each, np.bincount(found, minlength=microbatches)[found]
    return Places(
        microbatches=microbatches,
        of_sample=found,
        lanes=even_lanes(place, sizes, language.lanes),
        items=tuple(even_lanes(place, sizes, one.lanes)[one.samples] for one in encoders),
    )


def _step_cost(language: Loads, encoders: Sequence[EncoderLoads], places: Places) -> int:
    share = int(np.lcm.reduce([one.stages for one in (language, *encoders)], dtype=np.int64))
    total = 0
    for number, one in enumerate((language, *encoders), start=-1):
        slowest = lane_sums(one, places, number, one.costs).max(1)
        total += (int(slowest.sum()) + (one.stages - 1) * int(slowest.max(initial=0))) * (share // one.stages)
    return total


def _is_even(language: Loads, encoders: Sequence[EncoderLoads], places: Places) -> bool:
    """Tell whether of each module all lanes have the same to do in all passes."""
    sums = (lane_sums(one, places, number, one.costs) for number, one in enumerate((language, *encoders), start=-1))
    return all(bool((own == own.flat[0]).all()) for own in sums if own.size)


def _by_cost(language: Loads, encoders: Sequence[EncoderLoads], even: Places, most_rows: int) -> Iterator[Places]:
    """Yield placements by cost that keep the bounds, if any; of rows of a lane ``most_rows``, 0: as another one has."""
    lanes, microbatches = language.lanes, even.microbatches
    most = most_rows or _most_rows(language, even, -1)
    bins = partition(language.costs, language.rows, lanes * microbatches, most_rows=most, rounds=_ROUNDS)
    if bins is None:
        return
    choices = [(bins, _grouped(bins, encoders, lanes, microbatches))]
    loads = np.bincount(bins, weights=language.costs, minlength=lanes * microbatches).astype(np.int64)
    if not encoders or int(loads.max()) * len(loads) > int(loads.sum()) * _UNEVEN // 100:
        # Bins that wait for one another have about the same to do, where all can't have.
        order = _in_turn(microbatches, max(one.stages for one in (language, *encoders)))
        choices.append((bins, order[ranks_of(-loads) // lanes]))
        levels = _levels(language.costs, lanes, microbatches)
        if levels[0] > levels[-1]:
            before = np.repeat(levels[0] - levels, lanes)
            filled = partition_uneven(language.costs, language.rows, before, most_rows=most, rounds=_ROUNDS)
            choices += [] if filled is None else [(filled, np.repeat(order, lanes))]
    limits = [_most_rows(one, even, number) for number, one in enumerate(encoders)]
    for own, group in choices:
        number = ranks_of(group) % lanes  # of each bin in its microbatch
        of_sample, on_lane = group[own], number[own]
        items: list[Whole] = []
        for one, limit in zip(encoders, limits, strict=True):
            found = _place_items(one, of_sample, on_lane, limit)
            if found is None:
                break
            items.append(found)
        else:
            yield Places(microbatches=microbatches, of_sample=of_sample, lanes=on_lane, items=tuple(items))


def _levels(costs: Whole, lanes: int, microbatches: int) -> Whole:
    """Return how full the lanes of each microbatch are to be, descending, so that none waits for a large sample.

    The microbatch with the largest samples, one a lane, takes as long as the largest one; so its other lanes may have
    as much. The same of the next one, as long as samples are larger than what lanes then have on average.
    """
    largest = np.sort(costs)[::-1][::lanes].tolist()
    left, found = int(costs.sum()), list[int]()
    for index in range(microbatches):
        mean = -(-left // (lanes * (microbatches - index)))
        found.append(max(mean, largest[index] if index < len(largest) else 0))
        left = max(left - found[-1] * lanes, 0)
    return np.array(found, dtype=np.int64)


def _in_turn(microbatches: int, stages: int) -> Whole:
    """Return when each microbatch comes, the longest first: in the middle of shorter ones, where there are pipelines.

    A pipeline fills and drains in the time of its first and last microbatches. So these are the shortest, and the
    longest one comes when the pipeline has just been filled.
    """
    places = np.arange(microbatches)
    return np.lexsort((places, np.abs(places - min(stages - 1, microbatches - 1))))


def _most_rows(loads: Loads, even: Places, encoder: int) -> int:
    return int(lane_sums(loads, even, encoder, loads.rows).max(initial=0))


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
    shares = np.stack([(own << 12) // max(int(own.sum()) // count, 1) for own in sums], axis=1)  # [bins, encoders]
    order = ascending(-shares.sum(1))
    loads, room = np.zeros((len(encoders), microbatches), dtype=np.int64), [lanes] * microbatches
    after, highest, chosen = np.empty_like(loads), np.empty(microbatches, dtype=np.int64), []
    for share in shares[order][:, :, None]:  # [encoders, 1] of a bin
        np.add(loads, share, out=after)
        np.maximum.reduce(after, axis=0, out=highest)
        least = int(highest.argmin())
        loads[:, least] = after[:, least]
        room[least] -= 1
        if not room[least]:
            loads[:, least] = _FULL
        chosen.append(least)
    group = np.zeros(count, dtype=np.int64)
    group[order] = chosen
    return group


def _place_items(encoder: EncoderLoads, of_sample: Whole, lanes: Whole, most_rows: int) -> Whole | None:
    """Return the lane of each item of an encoder, placed pass by pass; None where a bound can't be kept.

    Args:
        encoder: whose.
        of_sample: the microbatch of each sample.
        lanes: the language lane of each sample.
        most_rows: that a lane may hold in a pass.
    """
    of_pass = np.repeat(np.arange(len(encoder.passes)), [len(served) for served in encoder.passes])
    turns = of_pass[np.argsort(np.concatenate(encoder.passes))][of_sample][encoder.samples]  # the pass of each item
    order = ascending(turns)
    ends = np.cumsum([0, *np.bincount(turns, minlength=len(encoder.passes)).tolist()])
    most = max(map(len, encoder.homes))
    homes = np.array([[*own, *(-1,) * (most - len(own))] for own in encoder.homes])
    found = np.zeros(len(order), dtype=np.int64)
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        things = order[begin:end]
        placed = partition_near(
            encoder.costs[things],
            encoder.rows[things],
            _homes_of(homes, lanes[encoder.samples[things]]) if most else np.full(len(things), -1),
            encoder.lanes,
            most_rows=most_rows,
            rounds=_ROUNDS,
        )
        if placed is None:
            return None
        found[things] = placed
    return found


def _homes_of(homes: Whole, lanes: Whole) -> Whole:
    """Return where each item of a pass is at home, from the language lane of its sample; in turn if in several.

    Args:
        homes: of each language lane, -1 behind them.
        lanes: of each item's sample.
    """
    count = (homes >= 0).sum(1)
    order = ascending(lanes)
    turn = np.empty_like(lanes)
    turn[order] = np.arange(len(lanes)) - firsts_of(lanes[order])
    found: Whole = homes[lanes, turn % np.maximum(count, 1)[lanes]]
    return found

"""Which lane owns which sample or item of a microbatch: contiguous spans, or any assignment."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Sequence
from functools import cached_property

import attrs

from mimo.hooks import ConfigError


@attrs.frozen
class Ownership:
    """Positions ``bounds[lane] .. bounds[lane + 1]`` of ``order`` belong to ``lane``; a lane may own none.

    Args:
        bounds: ascending, from 0.
        order: positions lane by lane, ascending in each; None where every position is its own place in it, so that
            each lane owns neighbours.
    """

    bounds: tuple[int, ...] = attrs.field()
    order: tuple[int, ...] | None = None

    @bounds.validator
    def _ascending(self, _attribute: attrs.Attribute[tuple[int, ...]], bounds: tuple[int, ...]) -> None:
        assert bounds[0] == 0, bounds
        assert all(map(operator.le, bounds, bounds[1:])), bounds

    @classmethod
    def even(cls, samples: int, lanes: int) -> Ownership:
        """Cut ``samples`` evenly: the first ``samples mod lanes`` lanes own one more than the others."""
        share, more = divmod(samples, lanes)
        sizes = itertools.chain(itertools.repeat(share + 1, more), itertools.repeat(share, lanes - more))
        return cls(tuple(itertools.accumulate(sizes, initial=0)))

    @classmethod
    def of(cls, owners: Sequence[int], lanes: int) -> Ownership:
        """Return who owns what, from the lane of each position."""
        sizes = [0] * lanes
        for lane in owners:
            sizes[lane] += 1
        bounds = tuple(itertools.accumulate(sizes, initial=0))
        if all(map(operator.le, owners, owners[1:])):
            return cls(bounds)
        return cls(bounds, tuple(sorted(range(len(owners)), key=owners.__getitem__)))  # stable: ascending in a lane

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.bounds) - 1

    def span(self, lane: int) -> Sequence[int]:
        """Return the positions that ``lane`` owns, ascending."""
        start, stop = self.bounds[lane], self.bounds[lane + 1]
        return range(start, stop) if self.order is None else self.order[start:stop]

    def lane_of(self, position: int) -> int:
        """Return the lane that owns ``position``."""
        place = position if self.order is None else self._places[position]
        return bisect.bisect_right(self.bounds, place) - 1

    def scaled(self, sizes: Sequence[int]) -> Ownership:
        """Return who owns the parts of what is owned: of position p there are ``sizes[p]``, numbered in order."""
        if self.order is None:
            starts = (0, *itertools.accumulate(sizes))
            return Ownership(tuple(starts[bound] for bound in self.bounds))
        lanes = [self.lane_of(position) for position, size in enumerate(sizes) for _ in range(size)]
        return Ownership.of(lanes, self.lanes)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """The place of each position in ``order``."""
        assert self.order is not None
        places = [0] * len(self.order)
        for place, position in enumerate(self.order):
            places[position] = place
        return tuple(places)


def count_microbatches(*, global_batch: int, micro_batch: int, lanes: int) -> int:
    """Return how many microbatches make one step of ``global_batch`` samples over the language model's lanes.

    Raises:
        ConfigError: the batch cannot be cut into whole microbatches of ``micro_batch`` samples a lane.
    """
    each = micro_batch * lanes
    if global_batch % each:
        raise ConfigError(
            "run.global_batch",
            expected=f"a multiple of run.micro_batch x language lanes = {micro_batch} x {lanes} = {each}",
            got=repr(global_batch),
            fix=f"Set it to {max(each, global_batch // each * each)}, or change run.micro_batch.",
        )
    return global_batch // each

"""Who owns which sample: a microbatch's samples cut into one contiguous span per lane."""

from __future__ import annotations

import bisect
import itertools
import operator

import attrs

from mimo.hooks import ConfigError


@attrs.frozen
class Ownership:
    """Samples ``bounds[lane] .. bounds[lane + 1]`` of a microbatch belong to ``lane``; a lane may own none."""

    bounds: tuple[int, ...] = attrs.field()

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

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.bounds) - 1

    def span(self, lane: int) -> range:
        """Return the positions in the microbatch that ``lane`` owns."""
        return range(self.bounds[lane], self.bounds[lane + 1])

    def lane_of(self, position: int) -> int:
        """Return the lane that owns the sample at ``position``."""
        return bisect.bisect_right(self.bounds, position) - 1


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

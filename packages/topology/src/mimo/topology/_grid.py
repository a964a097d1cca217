"""A grid: one module's ranks as pipeline x data x context x tensor, computed without communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import cached_property

import attrs

from mimo.hooks import ConfigError

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes from the slowest to the fastest: tensor neighbours are neighbouring ranks."""


@attrs.frozen
class Coordinates:
    """Where a rank stands in a grid; ``pp`` is its pipeline stage, ``dp`` its lane."""

    pp: int
    dp: int
    cp: int
    tp: int


def _as_tuple(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(ranks)


def _ascending(instance: Grid, _attribute: attrs.Attribute[tuple[int, ...]], ranks: tuple[int, ...]) -> None:
    where = f"modules.{instance.name}.ranks"
    if not ranks:
        raise ConfigError(where, expected="at least one rank", got="none", fix='Give it ranks, for example "0-3".')
    if ranks[0] < 0 or any(low >= high for low, high in itertools.pairwise(ranks)):
        raise ConfigError(
            where,
            expected="distinct ranks from 0 in ascending order",
            got=repr(list(ranks)),
            fix="List each rank once, lowest first.",
        )


def _positive(instance: Grid, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ConfigError(
            f"modules.{instance.name}.{attribute.name}",
            expected="a size of 1 or more",
            got=repr(value),
            fix="Leave it out for 1.",
        )


@attrs.frozen(kw_only=True)
class Grid:
    """The ranks of one module, laid out as ``pp x dp x cp x tp`` with ``tp`` fastest.

    Any set of ranks is allowed, with gaps too; they ascend along each axis.

    Raises:
        ConfigError: ranks are empty, repeated or unsorted, a size is below 1, or the sizes do not multiply to the
            number of ranks.
    """

    name: str
    ranks: tuple[int, ...] = attrs.field(converter=_as_tuple, validator=_ascending)
    pp: int = attrs.field(default=1, validator=_positive)
    dp: int = attrs.field(default=1, validator=_positive)
    cp: int = attrs.field(default=1, validator=_positive)
    tp: int = attrs.field(default=1, validator=_positive)

    def __attrs_post_init__(self) -> None:
        """Refuse sizes that do not multiply to the number of ranks."""
        if math.prod(self.shape) != len(self.ranks):
            sizes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True))
            raise ConfigError(
                f"modules.{self.name}",
                expected=f"sizes that multiply to its {len(self.ranks)} ranks",
                got=f"{sizes} = {math.prod(self.shape)}",
                fix="Change the sizes or the ranks; leave dp out to have it follow from the others.",
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `AXES`."""
        return (self.pp, self.dp, self.cp, self.tp)

    def coordinates(self, rank: int) -> Coordinates:
        """Return where ``rank`` stands.

        Raises:
            KeyError: the rank is not in this grid.
        """
        return self._places[rank]

    def rank_at(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates."""
        return self.ranks[((pp * self.dp + dp) * self.cp + cp) * self.tp + tp]

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline stage, ascending."""
        per_stage = len(self.ranks) // self.pp
        return self.ranks[stage * per_stage : (stage + 1) * per_stage]

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the groups along ``axes``: ranks that differ in nothing else, each ascending, in grid order."""
        vary = frozenset(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self._places.items():
            key = tuple(getattr(place, axis) for axis in AXES if axis not in vary)
            found.setdefault(key, []).append(rank)
        return tuple(tuple(group) for group in found.values())

    def group_of(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return the one group along ``axes`` that holds ``rank``, itself included."""
        place, vary = self._places[rank], frozenset(axes)
        spans = (
            range(size) if axis in vary else (getattr(place, axis),)
            for axis, size in zip(AXES, self.shape, strict=True)
        )
        return tuple(self.rank_at(pp=pp, dp=dp, cp=cp, tp=tp) for pp, dp, cp, tp in itertools.product(*spans))

    @cached_property
    def _places(self) -> dict[int, Coordinates]:
        places = itertools.product(*(range(size) for size in self.shape))
        return {rank: Coordinates(*place) for rank, place in zip(self.ranks, places, strict=True)}

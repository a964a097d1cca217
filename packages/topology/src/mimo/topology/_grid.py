"""A grid: one module's ranks as pipeline x data x context x tensor, computed without communication.

The expert view lays the ranks of each pipeline stage out a second time, as expert data x expert x expert tensor: there
live the experts of a mixture, while everything else of the module lives on the first view.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import attrs

from mimo.hooks import ConfigError

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes from the slowest to the fastest: tensor neighbours are neighbouring ranks."""
EXPERT_AXES = ("pp", "edp", "ep", "etp")
"""Axes of the expert view, likewise."""


@attrs.frozen
class Coordinates:
    """Where a rank stands in a grid; ``pp`` is its pipeline stage, ``dp`` its lane."""

    pp: int
    dp: int
    cp: int
    tp: int


@attrs.frozen
class ExpertCoordinates:
    """Where a rank stands in the expert view of a grid: ``ep`` is its share of the experts, ``etp`` of each of them."""

    pp: int
    edp: int
    ep: int
    etp: int


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

    Any set of ranks is allowed, with gaps too; they ascend along each axis. Experts see the same ranks as
    ``pp x edp x ep x etp``, where ``edp`` is what ``ep x etp`` leave of a stage.

    Raises:
        ConfigError: ranks are empty, repeated or unsorted, a size is below 1, the sizes do not multiply to the
            number of ranks, or ``ep x etp`` does not divide the ranks of a stage.
    """

    name: str
    ranks: tuple[int, ...] = attrs.field(converter=_as_tuple, validator=_ascending)
    pp: int = attrs.field(default=1, validator=_positive)
    dp: int = attrs.field(default=1, validator=_positive)
    cp: int = attrs.field(default=1, validator=_positive)
    tp: int = attrs.field(default=1, validator=_positive)
    ep: int = attrs.field(default=1, validator=_positive)
    etp: int = attrs.field(default=1, validator=_positive)

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
        if self.stage_size % (self.ep * self.etp):
            raise ConfigError(
                f"modules.{self.name}",
                expected=f"ep x etp that divides the {self.stage_size} ranks of a stage (dp x cp x tp)",
                got=f"ep {self.ep} x etp {self.etp} = {self.ep * self.etp}",
                fix="Experts lie over the same ranks as the rest of their stage; change ep, etp or the other sizes.",
            )

    def __contains__(self, rank: int) -> bool:
        """Return whether ``rank`` is one of its ranks."""
        return rank in self._positions

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `AXES`."""
        return (self.pp, self.dp, self.cp, self.tp)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Copies of each expert in a stage."""
        return self.stage_size // (self.ep * self.etp)

    @property
    def expert_shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `EXPERT_AXES`."""
        return (self.pp, self.edp, self.ep, self.etp)

    def coordinates(self, rank: int) -> Coordinates:
        """Return where ``rank`` stands.

        Raises:
            KeyError: the rank is not in this grid.
        """
        return Coordinates(*_unravel(self._positions[rank], self.shape))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Return where ``rank`` stands in the expert view.

        Raises:
            KeyError: the rank is not in this grid.
        """
        return ExpertCoordinates(*_unravel(self._positions[rank], self.expert_shape))

    def rank_at(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates."""
        return self.ranks[((pp * self.dp + dp) * self.cp + cp) * self.tp + tp]

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline stage, ascending."""
        return self.ranks[stage * self.stage_size : (stage + 1) * self.stage_size]

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the groups along ``axes``, of either view: ranks that differ in nothing else.

        Each is ascending, and the groups are in grid order.
        """
        members, firsts = self._offsets(frozenset(axes))
        return tuple(tuple(self.ranks[first + offset] for offset in members) for first in firsts)

    def group_of(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return the one group along ``axes``, of either view, that holds ``rank``, itself included."""
        vary = frozenset(axes)
        names, sizes = self._view(vary)
        first, members = self._positions[rank], [0]
        for axis, size, step in zip(names, sizes, _steps(sizes), strict=True):
            if axis in vary:
                first -= first // step % size * step
                members = [at + step * index for at in members for index in range(size)]
        return tuple(self.ranks[first + offset] for offset in members)

    def _view(self, axes: frozenset[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return names and sizes of the view that has all of ``axes``."""
        if axes <= set(AXES):
            return AXES, self.shape
        assert axes <= set(EXPERT_AXES), f"no view of a grid has all of {sorted(axes)}"
        return EXPERT_AXES, self.expert_shape

    def _offsets(self, vary: frozenset[str]) -> tuple[list[int], list[int]]:
        """Return the offsets of a group's members from its first, and the positions of all groups' firsts."""
        names, sizes = self._view(vary)
        members, firsts = [0], [0]
        for axis, size, step in zip(names, sizes, _steps(sizes), strict=True):
            if axis in vary:
                members = [at + step * index for at in members for index in range(size)]
            else:
                firsts = [at + step * index for at in firsts for index in range(size)]
        return members, firsts

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}


def _steps(sizes: Sequence[int]) -> list[int]:
    """Return how far apart neighbours along each axis are, the last axis fastest."""
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _unravel(position: int, sizes: Sequence[int]) -> list[int]:
    """Return the coordinates of a position, the last axis fastest."""
    found = []
    for size in reversed(sizes):
        position, place = divmod(position, size)
        found.append(place)
    return found[::-1]

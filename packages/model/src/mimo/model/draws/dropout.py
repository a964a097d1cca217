"""Layers that drop at random what their keys say: features of rows, or all that a residual branch adds to an item.

Each has a site: where in the model it draws, in numbers. Without one, and while its stage has no keys, it hands on what
it is given. Shapes: R rows, F features of this rank.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo.model.draws.numbers import fold, keep, key_of_name, threshold_of
from mimo.model.draws.rows import ITEM, ROW, DrawKeys


@attrs.frozen(kw_only=True, eq=False)
class Site:
    """Where in a model something is dropped, and how much. Its numbers are tensors, so that layers share a graph.

    Args:
        keys: of the stage.
        key: of the place, a scalar.
        threshold: of `threshold_of`, likewise.
        scale: of what is kept, likewise.
        first: which of all features is the first that a rank has.
    """

    keys: DrawKeys
    key: Tensor
    threshold: Tensor
    scale: Tensor
    first: int = 0

    @classmethod
    def of(cls, name: str, rate: float, *, keys: DrawKeys, device: torch.device, first: int = 0) -> Site:
        """Return the site of a part of the model, by its full name, that drops at a rate."""
        threshold = threshold_of(rate)
        return cls(
            keys=keys,
            key=torch.tensor(key_of_name(name), dtype=torch.int64, device=device),
            threshold=torch.tensor(threshold, dtype=torch.int64, device=device),
            scale=torch.tensor(1 / (1 - threshold / 2**32), dtype=torch.float32, device=device),
            first=first,
        )

    def again(self, call: int) -> Site:
        """Return the site of a later call of the same layer, counted from 0."""
        return attrs.evolve(self, key=fold(self.key, call)) if call else self

    def drop(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., F] with features at 0, others scaled so that the mean stays."""
        rows = self.keys.of(x)
        if rows is None:
            return x
        kept = keep(fold(rows[:, ROW], self.key), x.shape[-1], self.threshold, first=self.first)
        return self._scaled(x, kept.view(x.shape))

    def drop_paths(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., F] with all of an item at 0, or scaled so that the mean stays."""
        keys = self.keys
        if keys.is_stacked and keys.items is not None:
            keys.check_stacked(x)
            kept = keep(fold(keys.items, self.key), 1, self.threshold)
            return self._scaled(x, kept.view(-1, *(1 for _ in x.shape[1:])))
        rows = keys.of(x)
        if rows is None:
            return x
        return self._scaled(x, keep(fold(rows[:, ITEM], self.key), 1, self.threshold).view(*x.shape[:-1], 1))

    def _scaled(self, x: Tensor, kept: Tensor) -> Tensor:
        return torch.where(kept, x * self.scale, 0.0)


@runtime_checkable
class DrawsAtRandom(Protocol):
    """A submodule that drops at random: `build_part` sets its site, where its stage trains what it is a part of.

    Attributes:
        rate: how much is dropped.
        site: where it draws; None for nowhere.
    """

    rate: float
    site: Site | None


class Dropout(nn.Module):
    """Drops features of rows (Srivastava et al. 2014): the same ones in every layout.

    Args:
        rate: the probability of each.
        reader: the name of the linear beside it that reads what it hands on, where tensor ranks may each have a part of
            the features; empty where all have all.

    Raises:
        ConfigError: the rate is out of range.
    """

    def __init__(self, rate: float, *, reader: str = "") -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ConfigError("rate", expected="a rate of 0 or more and less than 1", got=repr(rate))
        self.rate = rate
        self.reader = reader
        self.site: Site | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., F] with some features at 0, the others divided by the probability that they stay."""
        return x if self.site is None else self.site.drop(x)

    def extra_repr(self) -> str:
        """Return its rate."""
        return f"rate={self.rate}"


class DropPath(Dropout):
    """Drops what a residual branch adds to an item (Huang et al. 2016, arXiv:1603.09382), all rows of it at once."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., F] with all rows of some items at 0, the others divided by the probability to stay."""
        return x if self.site is None else self.site.drop_paths(x)

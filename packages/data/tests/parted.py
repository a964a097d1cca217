"""A dataset of parts without samples that could be read, for tests of their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from mimo.data import DataPart
from mimo.hooks import ItemInfo


@attrs.frozen
class Parted:
    """Some parts."""

    given: tuple[DataPart, ...]

    def __len__(self) -> int:
        return sum(part.samples for part in self.given)

    def parts(self) -> Sequence[DataPart]:
        """Return them."""
        return self.given

    def tokens(self, sample: int) -> Sequence[int]:
        """Have none."""
        raise NotImplementedError

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Have none."""
        raise NotImplementedError

    def raw(self, sample: int, index: int) -> Any:
        """Have none."""
        raise NotImplementedError

    def where(self, sample: int) -> str:
        """Name a sample."""
        return f"parted:{sample}"

"""The samples of one step, kept as they were read: so that it can be run again, also where they have changed since.

What is kept of an item is what the encoder was given: tensors, which can be written down exactly, whatever the dataset
hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from torch import Tensor

from mimo.data import DataPart, Dataset, ends_of, parts_of, weights_of
from mimo.hooks import ItemInfo

ItemKey: TypeAlias = tuple[str, int, int]
"""A module, a sample, and the number of an item in it."""
BrokenItems: TypeAlias = Mapping[int, tuple[int, ...]]
"""By place in the step, samples that count for nothing, each with the indices of its items that can't be decoded."""


@attrs.frozen(kw_only=True, eq=False)
class KeptSamples:
    """A dataset that reads each thing once, and has it from then on.

    Args:
        numbers: of the samples, in the order of the step.
        broken: those that count for nothing, as items of them can't be decoded.
        base: where what is not kept is read; None where all is kept.
        kept_tokens, kept_weights, kept_ends, kept_infos, kept_places: of samples, by number.
        items: what encoders were given.
    """

    numbers: tuple[int, ...]
    broken: BrokenItems = attrs.field(factory=dict)
    base: Dataset | None = None
    kept_tokens: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    kept_weights: dict[int, tuple[float, ...] | None] = attrs.field(factory=dict)
    kept_ends: dict[int, tuple[int, ...] | None] = attrs.field(factory=dict)
    kept_infos: dict[int, tuple[ItemInfo, ...]] = attrs.field(factory=dict)
    kept_places: dict[int, str] = attrs.field(factory=dict)
    items: dict[ItemKey, Mapping[str, Tensor]] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return the number of samples of the dataset, or of the step where nothing else is known."""
        return len(self.numbers) if self.base is None else len(self.base)

    def parts(self) -> Sequence[DataPart]:
        """Return what the samples of the dataset are taken from."""
        return (DataPart(name="", samples=len(self)),) if self.base is None else parts_of(self.base)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of a sample."""
        if sample not in self.kept_tokens:
            self.kept_tokens[sample] = tuple(map(int, self._base.tokens(sample)))
        return self.kept_tokens[sample]

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return the weights of a sample's tokens, None if it has none."""
        if sample not in self.kept_weights:
            weights = weights_of(self._base, sample)
            self.kept_weights[sample] = None if weights is None else tuple(map(float, weights))
        return self.kept_weights[sample]

    def ends(self, sample: int) -> Sequence[int] | None:
        """Return where a sample may be cut, None if anywhere."""
        if sample not in self.kept_ends:
            ends = ends_of(self._base, sample)
            self.kept_ends[sample] = None if ends is None else tuple(map(int, ends))
        return self.kept_ends[sample]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the items of a sample."""
        if sample not in self.kept_infos:
            self.kept_infos[sample] = tuple(self._base.infos(sample))
        return self.kept_infos[sample]

    def raw(self, sample: int, index: int) -> Any:
        """Return an item, which is not kept as it is."""
        return self._base.raw(sample, index)

    def where(self, sample: int) -> str:
        """Return where a sample comes from."""
        if sample not in self.kept_places:
            self.kept_places[sample] = self._base.where(sample)
        return self.kept_places[sample]

    def item(self, key: ItemKey, prepare: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return what an encoder is given of an item, prepared the first time."""
        if key not in self.items:
            self.items[key] = prepare()
        return self.items[key]

    @property
    def _base(self) -> Dataset:
        assert self.base is not None, "all that a rank reads of a step is kept"
        return self.base

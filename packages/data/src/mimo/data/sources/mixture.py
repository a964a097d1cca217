"""The dataset ``mixture``: several datasets, each of any plugin, from which samples are taken by weights or epochs.

The order in which that is done is that of all datasets with parts; see `mimo.data.order`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs

from mimo.data.samples import (
    DataPart,
    Dataset,
    DatasetSources,
    DatasetSpec,
    SourceTable,
    SplitName,
    ends_of,
    parts_of,
    weights_of,
)
from mimo.data.sources.settings_path import settings_under
from mimo.hooks import ConfigError, ItemInfo, Validator, hookimpl, must_be, other_keys

_SOURCES = "sources"


def _above_zero_if_given() -> Validator:
    return must_be("a finite number above 0", lambda value: value is None or 0 < value < float("inf"))


@attrs.frozen(kw_only=True)
class SourceConfig:
    """Settings of ``[data.sources.<name>]``.

    Args:
        plugin: dataset plugin; its own keys stand in this table too.
        weight: how many samples are taken from it, compared with other sources.
        epochs: how often its samples are read, compared with other sources, instead of a weight.
        config: the plugin's keys.
    """

    plugin: str
    weight: float | None = attrs.field(default=None, validator=_above_zero_if_given())
    epochs: float | None = attrs.field(default=None, validator=_above_zero_if_given())
    config: Mapping[str, Any] = other_keys()


@attrs.frozen(kw_only=True)
class MixtureConfig:
    """Settings of ``data.plugin = "mixture"``.

    Args:
        sources: by name; either all have weights, or all have epochs, or none has either, which is one epoch of each.
    """

    sources: Mapping[str, SourceConfig] = attrs.field()

    @sources.validator
    def _check_sources(self, _attribute: Any, sources: Mapping[str, SourceConfig]) -> None:
        if not sources:
            fix = "Add a table [data.sources.<name>] with the plugin and the keys of each."
            raise ConfigError(_SOURCES, expected="at least one source", got="none", fix=fix)
        for name, source in sources.items():
            if not (name.isascii() and name.isidentifier()):
                expected = "names of letters, digits and _ that don't begin with a digit"
                raise ConfigError(_SOURCES, expected=expected, got=repr(name))
            if source.weight is not None and source.epochs is not None:
                expected = "nothing beside weight, as either says how many samples are taken"
                raise ConfigError(f"{_SOURCES}.{name}.epochs", expected=expected, got=f"{source.epochs:g}")
        for key in ("weight", "epochs"):
            lacking = [name for name, source in sources.items() if getattr(source, key) is None]
            if 0 < len(lacking) < len(sources):
                having = next(name for name in sources if name not in lacking)
                raise ConfigError(
                    f"{_SOURCES}.{lacking[0]}.{key}",
                    expected=f"a number, as {having} has one",
                    got="none",
                    fix=f"Give all sources {key}, or none.",
                )


@attrs.frozen(kw_only=True, eq=False)
class _Source:
    """One source: the path of its settings, its samples, and the number of its first one in the mixture."""

    path: str
    dataset: Dataset
    first: int


class MixtureDataset:
    """The samples of several datasets, numbered source after source in the order of their names.

    Args:
        datasets: by path of their settings.
        parts: one for each, in the same order.
    """

    def __init__(self, datasets: Mapping[str, Dataset], parts: Sequence[DataPart]) -> None:
        firsts = accumulate((part.samples for part in parts), initial=0)
        self._parts = tuple(parts)
        self._sources = [
            _Source(path=path, dataset=dataset, first=first)
            for (path, dataset), first in zip(datasets.items(), firsts, strict=False)
        ]
        self._firsts = [source.first for source in self._sources]

    def __len__(self) -> int:
        return sum(part.samples for part in self._parts)

    def parts(self) -> Sequence[DataPart]:
        """Return the sources with their weights."""
        return self._parts

    def sources(self) -> Sequence[tuple[str, Dataset]]:
        """Return the sources by name, as each may have an index of its own."""
        return [(part.name, source.dataset) for part, source in zip(self._parts, self._sources, strict=True)]

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of a sample."""
        source = self._source(sample)
        with settings_under(source.path):
            return source.dataset.tokens(sample - source.first)

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return the weights of a sample's tokens, None if it has none."""
        source = self._source(sample)
        with settings_under(source.path):
            return weights_of(source.dataset, sample - source.first)

    def ends(self, sample: int) -> Sequence[int] | None:
        """Return where a sample may be cut, None if anywhere."""
        source = self._source(sample)
        with settings_under(source.path):
            return ends_of(source.dataset, sample - source.first)

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the items of a sample."""
        source = self._source(sample)
        with settings_under(source.path):
            return [attrs.evolve(info, sample=sample) for info in source.dataset.infos(sample - source.first)]

    def raw(self, sample: int, index: int) -> Any:
        """Return an item as its source has it."""
        source = self._source(sample)
        with settings_under(source.path):
            return source.dataset.raw(sample - source.first, index)

    def where(self, sample: int) -> str:
        """Return where a sample comes from, as its source says it."""
        source = self._source(sample)
        return source.dataset.where(sample - source.first)

    def _source(self, sample: int) -> _Source:
        return self._sources[bisect_right(self._firsts, sample) - 1]


def source_tables(config: MixtureConfig) -> Mapping[str, SourceTable]:
    """Return what the sources are, by path of their tables; see `DatasetSources`."""
    own = tuple(field.name for field in attrs.fields(SourceConfig) if field.name != "config")
    return {
        f"{_SOURCES}.{name}": SourceTable(plugin=source.plugin, keys=source.config, own=own)
        for name, source in config.sources.items()
    }


def join_sources(config: MixtureConfig, datasets: Mapping[str, Dataset], split: SplitName) -> MixtureDataset | None:
    """Return the samples of all sources that have some in a split; see `DatasetSources`.

    Raises:
        ConfigError: a source has nothing to train on, or is a mixture itself.
    """
    found: dict[str, Dataset] = {}
    parts = []
    for name, source in sorted(config.sources.items()):
        path = f"data.{_SOURCES}.{name}"
        dataset = datasets.get(f"{_SOURCES}.{name}")
        if dataset is None or not len(dataset):
            if split == "train":
                fix = "Check its keys, or leave the source out."
                raise ConfigError(path, expected="samples to train on", got="none", fix=fix)
            continue
        inner = parts_of(dataset)
        if any(part.weight is not None or part.epochs is not None for part in inner):
            raise ConfigError(
                f"{path}.plugin",
                expected="a dataset that is no mixture itself",
                got=repr(source.plugin),
                fix=f"Name its sources under data.{_SOURCES}.",
            )
        found[path] = dataset
        parts.append(
            DataPart(
                name=name,
                samples=len(dataset),
                weight=source.weight,
                epochs=1.0 if source.weight is None and source.epochs is None else source.epochs,
                shards=tuple(shard for part in inner for shard in part.shards or (part.samples,)),
            )
        )
    return MixtureDataset(found, parts) if found else None


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``mixture``."""
    sources = DatasetSources(tables=source_tables, join=join_sources)
    return [DatasetSpec(name="mixture", config=MixtureConfig, sources=sources)]

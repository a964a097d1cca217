"""The dataset that settings name, and those that it is made of: each found, checked and opened by its own path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo.data import DATASETS, Dataset, DatasetSpec, LimitedTokenizer, SplitName, settings_under
from mimo.trainer.config.plugin_kinds import Find
from mimo.trainer.config.structure import structure, unstructure
from mimo.trainer.config.toml import set_key


@attrs.frozen(kw_only=True)
class DatasetChoice:
    """A dataset plugin and its settings.

    Args:
        spec: the plugin.
        config: its settings.
        where: path of their table.
        sources: the datasets that it is made of, by path inside of that table.
    """

    spec: DatasetSpec
    config: Any
    where: str
    sources: Mapping[str, DatasetChoice]

    @classmethod
    def of(cls, spec: DatasetSpec, config: Any, where: str, find: Find) -> DatasetChoice:
        """Return a plugin with its settings, and find and check what it is made of.

        Raises:
            ConfigError: a source's plugin is unknown, or one of its settings is wrong.
        """
        sources = {}
        for path, table in () if spec.sources is None else spec.sources.tables(config).items():
            inner = f"{where}.{path}"
            source = find(DATASETS, table.plugin, f"{inner}.plugin")
            keys: Any = structure(table.keys, source.config, inner, siblings=table.own)
            sources[path] = cls.of(source, keys, inner, find)
        return cls(spec=spec, config=config, where=where, sources=sources)

    def write_index(self, split: SplitName) -> None:
        """Have plugins write what they need to know of data that they don't read whole, before they open it.

        Raises:
            ConfigError: it can't be written, by the path of the setting.
        """
        for source in self.sources.values():
            source.write_index(split)
        with settings_under(self.where):
            if self.spec.index is not None:
                self.spec.index(self.config, split)

    def open(self, tokenizer: LimitedTokenizer, split: SplitName) -> Dataset | None:
        """Return a split, None where the data has none.

        Args:
            tokenizer: for plugins that encode samples; others get the one inside.
            split: which.

        Raises:
            ConfigError: there is nothing, by the path of the setting.
        """
        sources = {path: source.open(tokenizer, split) for path, source in self.sources.items()}
        with settings_under(self.where):
            if self.spec.sources is not None:
                return self.spec.sources.join(
                    self.config, {path: it for path, it in sources.items() if it is not None}, split
                )
            return self.spec.open(self.config, tokenizer if self.spec.encodes_samples else tokenizer.inner, split)

    def plain(self) -> Mapping[str, Any]:
        """Return its settings as plain data, with the defaults of all plugins."""
        table: Mapping[str, Any] = unstructure(self.config)
        for path, source in self.sources.items():
            for key, value in source.plain().items():
                table = set_key(table, [*path.split("."), key], value)
        return table

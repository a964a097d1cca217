"""The ``webdataset`` dataset: its settings, its splits, and the index of its shards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from mimo.data import ChatSettings, DatasetSpec, RecordDataset, SplitName, Tokenizer
from mimo.hooks import ConfigError, above_zero, at_least, at_most, hookimpl
from mimo_dataset_webdataset._cache import ShardCache
from mimo_dataset_webdataset._known import write_index
from mimo_dataset_webdataset._opening import open_known, read_headers
from mimo_dataset_webdataset._remote import Remote
from mimo_dataset_webdataset._samples import KINDS, ShardRecords, is_never_read
from mimo_dataset_webdataset._shards import Shards, find_shards
from mimo_dataset_webdataset._writer import write_shards

_KIND = re.compile(r"[a-z]\w*")


@attrs.frozen(kw_only=True)
class WebdatasetConfig:
    """Settings of ``data.plugin = "webdataset"``.

    Args:
        path: the training shards: a folder of ``*.tar``, a path with braces ``train-{000000..000127}.tar`` or a glob,
            or an address with braces.
        evaluation_path: the shards of evaluations; without it there are none.
        index: a folder for what `mimo data index` finds; empty: beside the shards.
        cache: a folder for shards that are fetched from elsewhere.
        cache_bytes: that they have together at most.
        timeout: seconds without an answer or a byte after which a request over HTTP has failed.
        members: for extensions what their members are, ``image``, ``audio`` or another modality, ``text``, ``json`` for
            the record, or ``ignore``.
        chat: how conversations become tokens.
    """

    path: str
    evaluation_path: str | None = None
    index: str = ""
    cache: str = ""
    cache_bytes: int = attrs.field(
        default=1 << 35, validator=[at_least(1, where="data"), at_most(1 << 50, where="data")]
    )
    timeout: float = attrs.field(default=60.0, validator=above_zero(where="data"))
    members: Mapping[str, str] = attrs.field(factory=dict)
    chat: ChatSettings = attrs.field(factory=ChatSettings)

    @members.validator
    def _check_members(self, _: attrs.Attribute[Mapping[str, str]], value: Mapping[str, str]) -> None:
        for extension, kind in value.items():
            if not extension or extension != extension.lower() or extension.startswith(".") or "/" in extension:
                raise ConfigError(
                    "data.members", expected='extensions in small letters, such as "seg.png"', got=repr(extension)
                )
            if is_never_read(extension):
                raise ConfigError(
                    "data.members",
                    expected="extensions of members that can be decoded without running what they hold",
                    got=repr(extension),
                    fix="Such members are always left out: build shards with another format.",
                )
            if not _KIND.fullmatch(kind):
                raise ConfigError(
                    f"data.members.{extension}",
                    expected='"text", "json", "ignore", or a modality such as "image"',
                    got=repr(kind),
                )


def open_webdataset(config: WebdatasetConfig, tokenizer: Tokenizer, split: SplitName) -> RecordDataset | None:
    """Return one split; see `DatasetSpec`."""
    shards = _shards(config, split)
    if shards is None:
        return None
    known, opener = open_known(shards, _cache(config, shards))
    if not len(known.table):
        raise ConfigError(
            shards.setting, expected="shards with at least one sample", got=f"{shards.expression!r}, without any"
        )
    records = ShardRecords(source=shards, known=known, opener=opener, kinds={**KINDS, **config.members})
    return RecordDataset(records, tokenizer, config.chat)


def index_shards(config: WebdatasetConfig, split: SplitName) -> Path | None:
    """Read the headers of all shards of a split, write the index, and return its path; None without such a split.

    Shards that lie elsewhere are fetched once, one after the other, through the cache.

    Raises:
        ConfigError: a setting is wrong, a shard is no tar of samples, or the index can't be written.
        DataError: a shard can't be read.
    """
    shards = _shards(config, split)
    return None if shards is None else write_index(shards, read_headers(shards, _cache(config, shards)))


def _shards(config: WebdatasetConfig, split: SplitName) -> Shards | None:
    setting, path = ("data.path", config.path) if split == "train" else ("data.evaluation_path", config.evaluation_path)
    return None if path is None else find_shards(path, config.index, setting)


def _cache(config: WebdatasetConfig, shards: Shards) -> ShardCache | None:
    if shards.is_local:
        return None
    if not config.cache:
        raise ConfigError(
            "data.cache",
            expected=f"a folder for shards that lie elsewhere, as {shards.setting} does",
            got="none",
            fix='Set data.cache = "cache", and data.cache_bytes.',
        )
    return ShardCache(folder=Path(config.cache), bytes=config.cache_bytes, remote=Remote(timeout=config.timeout))


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``webdataset``."""
    return [
        DatasetSpec(
            name="webdataset",
            config=WebdatasetConfig,
            open=open_webdataset,
            encodes_samples=True,
            index=index_shards,
            build=write_shards,
        )
    ]

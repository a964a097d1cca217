"""The datasets ``parquet`` and ``huggingface``: rows of tables as samples."""

from __future__ import annotations

from pathlib import Path

import attrs

from mimo.data import ChatSettings, DatasetSpec, RecordDataset, SplitName, Tokenizer, index_place
from mimo.hooks import ConfigError, at_least, at_most, hookimpl
from mimo_dataset_parquet._arrow import open_arrow
from mimo_dataset_parquet._cells import TableError
from mimo_dataset_parquet._columns import ColumnSettings, check_column, find_columns
from mimo_dataset_parquet._folders import parquet_files, split_files
from mimo_dataset_parquet._parquet import open_parquet
from mimo_dataset_parquet._records import TableRecords
from mimo_dataset_parquet._table import Table

_CACHE = 1 << 28
_ARROW = ".arrow"


@attrs.frozen(kw_only=True)
class TableConfig:
    """Settings that both plugins have.

    Args:
        columns: which columns samples are made of.
        prefix: what the text of each sample begins with, such as ``<image>`` where texts are captions.
        index: a folder for what `mimo data index` finds; empty: beside the data.
        chat: how conversations become tokens.
        cache_bytes: of decoded groups of rows that each process keeps.
    """

    columns: ColumnSettings = attrs.field(factory=ColumnSettings)
    prefix: str = ""
    index: str = ""
    chat: ChatSettings = attrs.field(factory=ChatSettings)
    cache_bytes: int = attrs.field(
        default=_CACHE, validator=[at_least(0, where="data"), at_most(1 << 50, where="data")]
    )


@attrs.frozen(kw_only=True)
class ParquetConfig(TableConfig):
    """Settings of ``data.plugin = "parquet"``.

    Args:
        path: the training samples: a file, or a folder of files named ``*.parquet``.
        evaluation_path: the samples of evaluations; without it there are none.
    """

    path: str
    evaluation_path: str | None = None


@attrs.frozen(kw_only=True)
class HuggingFaceConfig(TableConfig):
    """Settings of ``data.plugin = "huggingface"``.

    Args:
        path: a folder made by `save_to_disk` of `datasets`, or a cloned repository with files of parquet.
        split: that is trained on.
        evaluation_split: of evaluations; without it there are none.
    """

    path: str
    split: str = "train"
    evaluation_split: str | None = None


def open_parquet_split(config: ParquetConfig, tokenizer: Tokenizer, split: SplitName) -> RecordDataset | None:
    """Return one split; see `DatasetSpec`."""
    if split == "train":
        setting, path = "data.path", config.path
    elif config.evaluation_path is None:
        return None
    else:
        setting, path = "data.evaluation_path", config.evaluation_path
    files = parquet_files(Path(path), setting)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    records = read_tables(files, config, setting=setting, name=path, index=path, folder=folder)
    return RecordDataset(records, tokenizer, config.chat)


def open_hugging_face_split(config: HuggingFaceConfig, tokenizer: Tokenizer, split: SplitName) -> RecordDataset | None:
    """Return one split; see `DatasetSpec`."""
    setting, name = (
        ("data.split", config.split) if split == "train" else ("data.evaluation_split", config.evaluation_split)
    )
    if name is None:
        return None
    folder = Path(config.path)
    files = split_files(folder, name, setting)
    index = str(folder / name)  # of each split its own
    records = read_tables(files, config, setting=setting, name=config.path, index=index, folder=folder)
    return RecordDataset(records, tokenizer, config.chat)


def read_tables(
    files: list[Path], config: TableConfig, *, setting: str, name: str, index: str, folder: Path
) -> TableRecords:
    """Return the rows of some files, of which footers, or headers of batches, are read.

    Args:
        files: in order.
        config: how they are read.
        setting: that named them, for messages.
        name: of all of them.
        index: path of data, beside which its index lies.
        folder: that items lie in.

    Raises:
        ConfigError: a file is none that can be read, they have no rows, or not the columns of a sample.
    """
    tables: list[Table] = []
    for path in files:
        try:
            tables.append(open_arrow(path) if path.suffix == _ARROW else open_parquet(path))
        except (OSError, TableError) as error:
            raise ConfigError(setting, expected="files of a table", got=f"{str(path)!r}: {error}") from error
    columns = find_columns(tables[0].schema, config.columns, str(files[0]))
    for table in tables[1:]:
        for column in columns.names:
            check_column(table.schema, column, str(table.path))
    if config.prefix and "messages" in columns.keys:
        fix = "Write <image> into the messages, or leave it out."
        raise ConfigError(
            "data.prefix", expected="none, since the samples are conversations", got=repr(config.prefix), fix=fix
        )
    records = TableRecords(
        name=name,
        index=index_place(index, config.index),
        folder=folder.resolve(),
        tables=tables,
        columns=columns,
        prefix=config.prefix,
        cache_bytes=config.cache_bytes,
    )
    if not len(records):
        raise ConfigError(setting, expected="a table with at least one row", got=f"{name!r}, which has none")
    return records


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``parquet`` and ``huggingface``."""
    return [
        DatasetSpec(name="parquet", config=ParquetConfig, open=open_parquet_split, encodes_samples=True),
        DatasetSpec(name="huggingface", config=HuggingFaceConfig, open=open_hugging_face_split, encodes_samples=True),
    ]

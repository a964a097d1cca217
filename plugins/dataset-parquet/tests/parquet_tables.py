"""Tables for the tests: written by pyarrow, or byte by byte where it would refuse."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from mimo.data import ChatSettings, Dataset, Tokenizer
from mimo.data.text import byte_tokenizer
from mimo_dataset_parquet import (
    ColumnSettings,
    HuggingFaceConfig,
    ParquetConfig,
    open_hugging_face_split,
    open_parquet_split,
)

TOKENIZER: Tokenizer = byte_tokenizer.build(byte_tokenizer.ByteConfig(), ["image", "audio", "sonar"])
CHAT = ChatSettings(template="chatml")


def png(shade: int, width: int = 4, height: int = 3) -> bytes:
    """Return the file of a grey picture."""
    file = io.BytesIO()
    Image.new("L", (width, height), shade).save(file, "PNG")
    return file.getvalue()


def write(path: Path, columns: Mapping[str, Sequence[Any]] | pa.Table, **options: Any) -> Path:
    """Write a parquet file, with groups of two rows unless options say otherwise."""
    table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **({"row_group_size": 2} | options))
    return path


def write_stream(path: Path, table: pa.Table, rows: int = 2, **options: Any) -> Path:
    """Write a file of Arrow's streaming format, with batches of so many rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def opened(path: Path, **settings: Any) -> Dataset:
    """Open parquet as training samples; names of columns are given as a dict."""
    columns = ColumnSettings(**settings.pop("columns", {}))
    config = ParquetConfig(path=str(path), columns=columns, chat=CHAT, **settings)
    dataset = open_parquet_split(config, TOKENIZER, "train")
    assert dataset is not None
    return dataset


def opened_folder(path: Path, **settings: Any) -> Dataset:
    """Open a folder of `datasets` as training samples."""
    dataset = open_hugging_face_split(HuggingFaceConfig(path=str(path), chat=CHAT, **settings), TOKENIZER, "train")
    assert dataset is not None
    return dataset


def facts(dataset: Dataset, sample: int) -> dict[str, Any]:
    """Return all that a dataset says of a sample but its place, pictures by their pixels and files by their bytes."""
    infos = dataset.infos(sample)
    raw = [dataset.raw(sample, info.index) for info in infos]
    return {
        "tokens": list(dataset.tokens(sample)),
        "weights": getattr(dataset, "weights")(sample),  # noqa: B009 - optional in the protocol
        "ends": getattr(dataset, "ends")(sample),  # noqa: B009
        "infos": infos,
        "raw": [_content(item) for item in raw],
    }


def _content(item: Any) -> Any:
    if isinstance(item, Path):
        return item.read_bytes()
    return item if isinstance(item, bytes) else (item.mode, item.size, item.tobytes())

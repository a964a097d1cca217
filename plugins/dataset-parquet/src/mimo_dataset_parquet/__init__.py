"""Parquet files and folders of Hugging Face datasets as samples: rows read in any order, in bounded memory."""

from mimo_dataset_parquet._columns import ColumnSettings
from mimo_dataset_parquet._plugin import (
    HuggingFaceConfig,
    ParquetConfig,
    open_hugging_face_split,
    open_parquet_split,
)
from mimo_dataset_parquet._records import TableRecords

__all__ = [
    "ColumnSettings",
    "HuggingFaceConfig",
    "ParquetConfig",
    "TableRecords",
    "open_hugging_face_split",
    "open_parquet_split",
]

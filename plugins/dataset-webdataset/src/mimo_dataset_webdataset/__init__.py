"""Tar shards in WebDataset's form, here or elsewhere, with random access; and how such shards are written."""

from mimo_dataset_webdataset._plugin import WebdatasetConfig, index_shards
from mimo_dataset_webdataset._writer import write_shards

__all__ = ["WebdatasetConfig", "index_shards", "write_shards"]

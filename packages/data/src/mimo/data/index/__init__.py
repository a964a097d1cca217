"""What is known of data without reading it again: arrays in files beside it, and digests that show a stale one."""

from mimo.data.index.digest import digest_of_file, digest_of_text
from mimo.data.index.place import Origin, index_place
from mimo.data.index.sizes import (
    ItemSize,
    SampleSize,
    SampleSizes,
    arrays_of,
    sizes_of_arrays,
    write_sizes,
)
from mimo.data.index.store import IndexFileError, StoredArrays, read_arrays, write_arrays

__all__ = [
    "IndexFileError",
    "ItemSize",
    "Origin",
    "SampleSize",
    "SampleSizes",
    "StoredArrays",
    "arrays_of",
    "digest_of_file",
    "digest_of_text",
    "index_place",
    "read_arrays",
    "sizes_of_arrays",
    "write_arrays",
    "write_sizes",
]

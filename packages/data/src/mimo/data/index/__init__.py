"""What is known of data without reading it again: arrays in files beside it, and digests that show a stale one."""

from mimo.data.index.digest import digest_of_file, digest_of_text
from mimo.data.index.known import (
    DatasetIndex,
    JoinedIndex,
    SupportsOrigin,
    SupportsSizes,
    SupportsSources,
    origin_of,
    sizes_of,
    sources_of,
)
from mimo.data.index.place import Origin, index_place
from mimo.data.index.sizes import (
    ItemSize,
    SampleSize,
    SampleSizes,
    arrays_of,
    sizes_of_arrays,
    write_sizes,
)
from mimo.data.index.store import IndexFileError, StoredArrays, check_arrays, read_arrays, write_arrays
from mimo.data.index.tokens import (
    SampleTokens,
    TokenArrays,
    arrays_of_tokens,
    tokens_of_arrays,
    tokens_of_file,
    write_tokens,
)

__all__ = [
    "DatasetIndex",
    "IndexFileError",
    "ItemSize",
    "JoinedIndex",
    "Origin",
    "SampleSize",
    "SampleSizes",
    "SampleTokens",
    "StoredArrays",
    "SupportsOrigin",
    "SupportsSizes",
    "SupportsSources",
    "TokenArrays",
    "arrays_of",
    "arrays_of_tokens",
    "check_arrays",
    "digest_of_file",
    "digest_of_text",
    "index_place",
    "origin_of",
    "read_arrays",
    "sizes_of",
    "sizes_of_arrays",
    "sources_of",
    "tokens_of_arrays",
    "tokens_of_file",
    "write_arrays",
    "write_sizes",
    "write_tokens",
]

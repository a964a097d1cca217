"""Arrays in one file: what is read back, and every damage that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.data.index import IndexFileError, check_arrays, digest_of_file, digest_of_text, read_arrays, write_arrays


def test_data_index_store_reads_back_what_was_written(tmp_path: Path) -> None:
    """Arrays of all kinds, empty ones too, as pages of the file, and texts; a second write takes the first's place."""
    path = tmp_path / "a.index"
    write_arrays(path, {"old": np.zeros(3, dtype=np.int64)}, {})
    kinds = (np.uint8, np.int32, np.int64, np.float32, np.float64)
    arrays = {np.dtype(kind).name: np.arange(6, dtype=kind).reshape(2, 3) for kind in kinds}
    arrays["none"] = np.empty((0, 4), dtype=np.int32)
    write_arrays(path, arrays, {"digest": "ä"})
    found = read_arrays(path)
    assert found.about == {"digest": "ä"}
    assert found.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert np.array_equal(found.arrays[name], array)
    assert isinstance(found.arrays["int64"], np.memmap)
    assert [each.name for each in tmp_path.iterdir()] == ["a.index"]


def test_data_index_store_leaves_nothing_of_a_write_that_fails(tmp_path: Path) -> None:
    """The folder is as it was."""
    (tmp_path / "a.index").mkdir()
    with pytest.raises(OSError, match=r"a\.index"):
        write_arrays(tmp_path / "a.index", {}, {})
    assert [each.name for each in tmp_path.iterdir()] == ["a.index"]


def test_data_index_store_refuses_files_that_are_cut(tmp_path: Path) -> None:
    """Wherever it is cut."""
    path = tmp_path / "a.index"
    write_arrays(path, {"a": np.arange(5), "b": np.arange(3, dtype=np.uint8)}, {"k": "v"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(IndexFileError):
            read_arrays(path)


def test_data_index_store_finds_any_byte_that_was_changed(tmp_path: Path) -> None:
    """In the header, the checksum or the arrays, whatever texts it has; a file as it was written is sound."""
    path = tmp_path / "a.index"
    arrays: dict[str, Any] = {"a": np.arange(6).reshape(2, 3), "b": np.arange(3, dtype=np.uint8), "none": np.arange(0)}
    write_arrays(path, arrays, {"k": '"checksum":"12345678"'})
    check_arrays(path)
    assert read_arrays(path).about == {"k": '"checksum":"12345678"'}
    whole = path.read_bytes()
    for place in range(8, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(IndexFileError, match="its checksum is"):
            check_arrays(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 2**43]},
        {"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "I64", "shape": [1], "data_offsets": [8, 0]},
        {"dtype": "I64", "shape": [2**62, 4], "data_offsets": [0, 0]},
        {"dtype": "O", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "I64", "shape": 1, "data_offsets": [0, 8]},
        {"dtype": "I64", "shape": [1]},
        [1],
        None,
    ],
)
def test_data_index_store_refuses_headers_that_lie(tmp_path: Path, entry: Any) -> None:
    """A header may promise no more than the file holds, and nothing but numbers."""
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "a.index"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(IndexFileError, match="its header describes no arrays"):
        read_arrays(path)


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff"])
def test_data_index_store_refuses_what_is_no_header(tmp_path: Path, header: bytes) -> None:
    """JSON that is no object, and what is no JSON."""
    path = tmp_path / "a.index"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(IndexFileError, match="its header is no JSON"):
        read_arrays(path)
    path.write_bytes((2**60).to_bytes(8, "little") + header)
    with pytest.raises(IndexFileError, match="its header of 1,152,921,504,606,846,976 bytes is longer than"):
        read_arrays(path)


def test_data_index_digest_follows_a_file(tmp_path: Path) -> None:
    """Another size, another begin, end or middle of a small file; a large one's size, begin and end."""
    path = tmp_path / "a"
    for size in (100, 5 << 20):
        whole = bytearray(size)
        path.write_bytes(whole)
        digests = {digest_of_file(path)}
        assert digests == {digest_of_file(path)}
        for place in (0, size - 1, *((size // 2,) if size < 1000 else ())):
            path.write_bytes(whole[:place] + b"\1" + whole[place + 1 :])
            digests.add(digest_of_file(path))
        path.write_bytes(whole[:-1])
        digests.add(digest_of_file(path))
        path.write_bytes(whole + b"\0")
        digests.add(digest_of_file(path))
        assert len(digests) == (6 if size < 1000 else 5)


def test_data_index_digest_of_settings() -> None:
    """It follows from what they say, and not from the order of keys."""
    assert digest_of_text({"a": 1, "b": [2]}) == digest_of_text({"b": [2], "a": 1}) != digest_of_text({"a": 1})

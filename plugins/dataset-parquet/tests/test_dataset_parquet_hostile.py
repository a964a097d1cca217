"""Files that are damaged or lie: each is refused by file and row, before it can take much memory or run anything."""

from __future__ import annotations

import base64
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from parquet_tables import facts, opened, opened_folder, png, write, write_stream

from mimo.hooks import ConfigError, DataError, UserError
from mimo_dataset_parquet import _arrow, _cells, _parquet

LETTERS = 1 << 20
ROWS = 12345
"""No other number in a file has its bytes."""


def peak(read: Callable[[], Any]) -> int:
    """Return the bytes that Arrow had at most at once beyond what it has anyway, over all processes' reads so far."""
    before: int = pa.default_memory_pool().bytes_allocated()
    read()
    return int(pa.default_memory_pool().max_memory() or 0) - before


def saved(folder: Path, table: pa.Table, **options: Any) -> Path:
    """Write a folder as `datasets` saves it, with one file; return that file."""
    path = write_stream(folder / "a.arrow", table, **options)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}], "_split": null}')
    return path


def replace(path: Path, old: bytes, new: bytes, *, count: int) -> Path:
    """Replace bytes of a file, which are in it so many times."""
    content = path.read_bytes()
    assert content.count(old) == count
    path.write_bytes(content.replace(old, new))
    return path


def varint(number: int) -> bytes:
    """Return a number as Thrift's compact protocol writes it."""
    left, found = number << 1, []
    while left > 127:
        found.append(left & 127 | 128)
        left >>= 7
    return bytes([*found, left])


@pytest.mark.parametrize("keep", [0, 3, 8, 12, 200, -1, -9])
def test_parquet_files_cut_short_are_refused(tmp_path: Path, keep: int) -> None:
    """However much of one is there."""
    path = write(tmp_path / "a.parquet", {"text": ["a" * 50] * 9})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ConfigError, match=r"data\.path: expected files of a table, got '.*a\.parquet': (no parquet file|a fi)"
    ):
        opened(path)


@pytest.mark.parametrize("keep", [0, 3, 100, -20, -150])
def test_parquet_streams_cut_short_are_refused(tmp_path: Path, keep: int) -> None:
    """A stream may end without its last marker, but in no message."""
    path = saved(tmp_path, pa.table({"text": ["a" * 50] * 9}))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"data\.split: expected files of a table, got '.*a\.arrow': "):
        opened_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "a pointer of git-lfs in its place: run `git lfs",
        ),
        (b"PAR1" + b"\0" * 20 + b"\xff\xff\xff\x7fPAR1", "no parquet file, or one that was cut short"),
        (b"PAR1" + b"\0" * 20 + b"\x08\0\0\0PARE", "an encrypted file"),
        (b"PAR1" + b"\xff" * 20 + b"\x14\0\0\0PAR1", "Couldn't deserialize thrift"),
    ],
)
def test_parquet_refuses_what_is_no_table(tmp_path: Path, content: bytes, said: str) -> None:
    """Pointers of git-lfs, footers longer than the file, encrypted and damaged ones."""
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"a\.parquet': {said}"):
        opened(path)


def test_parquet_waits_for_no_pipe(tmp_path: Path) -> None:
    """A pipe among files of a saved folder would never end."""
    saved(tmp_path, pa.table({"text": ["a"]})).unlink()
    os.mkfifo(tmp_path / "a.arrow")
    with pytest.raises(ConfigError, match=r"a\.arrow': no file"):
        opened_folder(tmp_path)


def test_parquet_bounds_footers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A footer is read whole, so a large one is refused."""
    path = write(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setattr(_parquet, "MAX_FOOTER", 100)
    with pytest.raises(ConfigError, match=r"a footer of \d+ bytes, more than 100"):
        opened(path)


@pytest.mark.parametrize("number", [ROWS - 1, ROWS + 1])
def test_parquet_refuses_footers_that_lie_of_rows(tmp_path: Path, number: int) -> None:
    """The headers of pages say how many values there are."""
    path = write(tmp_path / "a.parquet", {"text": ["a"] * ROWS}, row_group_size=ROWS, use_dictionary=False)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:footer] + content[footer:].replace(varint(ROWS), varint(number)))
    with pytest.raises(
        DataError, match=rf"a\.parquet:row 7: .*row group 0: {number:,} rows, .*'text' has 12,345 values"
    ):
        opened(path).tokens(7)


def test_parquet_values_that_share_an_entry_take_little(tmp_path: Path) -> None:
    """A million rows that share a text of a mebibyte are a terabyte, and are read without being one."""
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * LETTERS, pa.int32()), pa.array(["x" * LETTERS]))
    path = write(tmp_path / "a.parquet", pa.table({"text": shared}), row_group_size=LETTERS)
    assert path.stat().st_size < LETTERS
    dataset = opened(path)
    assert peak(lambda: dataset.tokens(LETTERS - 1)) < 1 << 29
    assert len(dataset) == LETTERS == len(dataset.tokens(7)) - 1


def test_parquet_refuses_a_row_that_shares_an_entry_too_often(tmp_path: Path) -> None:
    """A list of a million texts of a mebibyte each is not made."""
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * LETTERS, pa.int32()), pa.array(["x" * LETTERS]))
    rows = pa.ListArray.from_arrays(pa.array([0, LETTERS], pa.int32()), shared)
    dataset = opened(write(tmp_path / "a.parquet", pa.table({"text": ["a"], "images": rows})))
    with pytest.raises(DataError, match=r"a\.parquet:row 0: .*a row of more than 268,435,456 bytes"):
        dataset.tokens(0)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd", "use_dictionary": False},
        {"compression": "gzip", "use_dictionary": False, "data_page_version": "2.0"},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "compression": "none"},
    ],
    ids=["pages", "pages of version 2", "shared beginnings"],
)
def test_parquet_refuses_groups_that_would_be_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A file of kilobytes that would be 64 MiB is not decoded where fewer are allowed."""
    path = write(tmp_path / "a.parquet", {"text": ["x" * (1 << 16)] * 1024}, row_group_size=1024, **options)
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(_parquet, "MAX_GROUP", 1 << 25)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    with pytest.raises(DataError, match=r"a\.parquet:row 0: .*row group 0: more than 33,554,432 bytes in the columns"):
        opened(path).tokens(0)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_parquet_bounds_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What a row holds in the columns that are read is bounded, whatever lies beside them."""
    table = pa.table({"text": ["a" * 50, "b" * 5000], "other": ["c" * 9000] * 2})
    saved(tmp_path, table)
    dataset = opened(write(tmp_path / "a.parquet", table)) if kind == "parquet" else opened_folder(tmp_path)
    monkeypatch.setattr(_cells, "MAX_ROW", 1000)
    assert len(dataset.tokens(0)) == 51
    with pytest.raises(DataError, match=r":row 1: expected a row that can be read, got a row of more than 1,000 bytes"):
        dataset.tokens(1)


def test_parquet_refuses_codecs_that_are_not_known(tmp_path: Path) -> None:
    """The footer names the codec of each column."""
    path = write(tmp_path / "a.parquet", {"text": ["a"]}, compression="none")
    replace(path, b"\x04text\x15\x00\x16", b"\x04text\x15\x12\x16", count=1)
    with pytest.raises(
        DataError, match=r"a\.parquet:row 0: .*row group 0: .*compressed by codec 9, which is not known"
    ):
        opened(path).tokens(0)


@pytest.mark.parametrize(
    ("writer", "is_fine"),
    [("parquet-mr version 1.2.8", False), ("parquet-mr version 1.13.1", True), ("Parquet-MR", False), ("duckdb", True)],
)
def test_parquet_refuses_writers_whose_footers_are_wrong(tmp_path: Path, writer: str, is_fine: bool) -> None:
    """Of old ones pyarrow reads more pages than have been measured."""
    path = write(tmp_path / "a.parquet", {"text": ["a"]}, compression="none", store_schema=False)
    own = pq.read_metadata(path).created_by.encode()
    replace(path, own, writer.encode().ljust(len(own)), count=1)
    if is_fine:
        assert len(opened(path)) == 1
    else:
        with pytest.raises(
            ConfigError, match=rf"a\.parquet': a file of '{writer} *', whose footers are wrong: write it an"
        ):
            opened(path)


class _Keys(pe.KmsClient):  # type: ignore[misc]  # pyarrow ships no types
    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize("plain", [True, False])
def test_parquet_refuses_encrypted_columns(tmp_path: Path, plain: bool) -> None:
    """Whether the footer is encrypted too, or only some columns."""
    path = tmp_path / "a.parquet"
    config = pe.EncryptionConfiguration(footer_key="f", column_keys={"k": ["text"]}, plaintext_footer=plain)
    encryption = pe.CryptoFactory(lambda _: _Keys()).file_encryption_properties(pe.KmsConnectionConfig(), config)
    table = pa.table({"text": ["a"], "other": ["b"]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=encryption) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match=r"a\.parquet.* encrypted"):
        opened(path).tokens(0)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_parquet_runs_no_types_that_files_bring(tmp_path: Path, kind: str) -> None:
    """A pickled type in a schema, which older versions of pyarrow ran, is no more than a note there."""
    program = b"cposix\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    note = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": program}
    fields = [pa.field("text", pa.string()), pa.field("other", pa.string(), metadata=note)]
    table = pa.table({"text": ["a"], "other": ["b"]}).cast(pa.schema(fields))
    saved(tmp_path, table)
    dataset = opened(write(tmp_path / "a.parquet", table)) if kind == "parquet" else opened_folder(tmp_path)
    assert bytes(dataset.tokens(0)[:-1]) == b"a"
    assert not (tmp_path / "ran").exists()


def test_parquet_refuses_types_of_libraries(tmp_path: Path) -> None:
    """A column of a type that some library has registered is refused where it is read, and ignored elsewhere."""
    table = pa.table({"text": ["a"], "other": pa.array(['{"a": 1}'], pa.json_())})
    assert len(opened(write(tmp_path / "a.parquet", table)).tokens(0)) == 2
    saved(tmp_path, table.rename_columns(["other", "text"]))
    with pytest.raises(
        ConfigError, match=r"data\.columns: expected a plain type of column 'text', got .*json.* in .*a\.arrow"
    ):
        opened_folder(tmp_path)


def test_parquet_refuses_deep_schemas(tmp_path: Path) -> None:
    """A column of lists of lists without end is no sample."""
    kind = pa.string()
    for _ in range(90):
        kind = pa.list_(kind)
    path = write(tmp_path / "a.parquet", pa.table({"text": ["a"], "images": pa.array([None], kind)}))
    with pytest.raises(UserError, match=r"a\.parquet.*nested"):
        opened(path).tokens(0)


def test_parquet_refuses_streams_that_are_compressed(tmp_path: Path) -> None:
    """A batch says how large its values are once they are no longer compressed, which it might not be true of."""
    saved(tmp_path, pa.table({"text": ["a" * 1000] * 3}), compression="zstd")
    with pytest.raises(ConfigError, match=r"a\.arrow': record batch 0 that is compressed: save it without"):
        opened_folder(tmp_path)


def test_parquet_refuses_streams_of_other_messages(tmp_path: Path) -> None:
    """Dictionaries beside the batches are not read, nor are files of another format."""
    path = saved(tmp_path, pa.table({"text": ["a"], "other": pa.array(["b"]).dictionary_encode()}))
    with pytest.raises(
        ConfigError, match=r"a\.arrow': a message of kind 2 at byte \d+, where record batches are expected"
    ):
        opened_folder(tmp_path)
    path.write_bytes(b"ARROW1\0\0" + path.read_bytes())
    with pytest.raises(ConfigError, match=r"a\.arrow': no stream of Arrow at byte 0"):
        opened_folder(tmp_path)


def test_parquet_bounds_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description of a batch is read whole, so a large one is refused."""
    saved(tmp_path, pa.table({"text": ["a"]}))
    monkeypatch.setattr(_arrow, "MAX_MESSAGE", 100)
    with pytest.raises(ConfigError, match=r"a\.arrow': a message of \d+ bytes at byte 0, of at most 100"):
        opened_folder(tmp_path)


@pytest.mark.parametrize("wrong", [1 << 30, -5, 2900])
@pytest.mark.parametrize("offsets", [(0, 1011, 2024, 3041), (0, 211, 424, 424)], ids=["texts", "lists"])
def test_parquet_refuses_offsets_that_lie(tmp_path: Path, wrong: int, offsets: tuple[int, ...]) -> None:
    """Texts and lists that would begin before their values, end behind them, or end before they begin."""
    texts = ["a" * 1011, "b" * 1013, "c" * 1017]
    path = saved(tmp_path, pa.table({"text": texts, "images": [["p"] * 211, ["q"] * 213, []]}), rows=3)
    written = b"".join(value.to_bytes(4, "little") for value in offsets)
    replace(path, written, written[:4] + wrong.to_bytes(4, "little", signed=True) + written[8:], count=1)
    dataset = opened_folder(tmp_path)
    with pytest.raises(DataError, match=r"a\.arrow:row 1: expected a row that can be read, got "):
        facts(dataset, 1)


def test_parquet_refuses_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    """What was counted at the beginning holds for the run."""
    path = write(tmp_path / "a.parquet", {"text": list("abcd")})
    dataset = opened(path)
    write(path, {"text": list("abc")})
    with pytest.raises(
        DataError, match=r"a\.parquet:row 3: .*row group 1: 2 rows, for which column 'text' has 1 values"
    ):
        dataset.tokens(3)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet:row 1: expected a file that stays readable, got .*No such file"):
        dataset.tokens(1)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_parquet_damage_ends_in_errors_of_ours(tmp_path: Path, kind: str) -> None:
    """Bytes changed at random places give other samples or errors with their place, and no other end."""
    table = pa.table(
        {
            "text": [f"text {number} <image>" for number in range(6)],
            "image": [{"bytes": png(number), "path": None} for number in range(6)],
            "weight": [0.5] * 6,
        }
    )
    path = write(tmp_path / "a.parquet", table) if kind == "parquet" else saved(tmp_path, table)
    content = path.read_bytes()
    drawn = random.Random(5)
    ends = dict.fromkeys(("sample", "error"), 0)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(drawn.choice([1, 1, 2, 4])):
            damaged[drawn.randrange(len(damaged))] = drawn.choice([0, 127, 128, 255, drawn.randrange(256)])
        path.write_bytes(damaged)
        try:
            dataset = opened(path) if kind == "parquet" else opened_folder(tmp_path)
            for sample in range(min(len(dataset), 6)):
                try:
                    facts(dataset, sample)
                    ends["sample"] += 1
                except DataError:
                    ends["error"] += 1
        except ConfigError:
            ends["error"] += 1
    assert min(ends.values()) > 30

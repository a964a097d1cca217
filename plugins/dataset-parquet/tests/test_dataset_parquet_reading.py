"""Rows in any order: where they lie, how much of a file is read for them, and from threads and forked processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_tables import CHAT, TOKENIZER, facts, opened, opened_folder, png, write, write_stream

from mimo.data import DATASETS, Dataset
from mimo.hooks import RunError, discover
from mimo.testing import failing_files
from mimo_dataset_parquet import ParquetConfig, TableRecords, open_parquet_split
from mimo_dataset_parquet._parquet import ParquetTable


def records(dataset: Dataset) -> TableRecords:
    """Return the source that a dataset reads."""
    found = dataset._records  # type: ignore[attr-defined]
    assert isinstance(found, TableRecords)
    return found


def text(dataset: Dataset, sample: int) -> str:
    """Return the text of a sample."""
    return TOKENIZER.decode(dataset.tokens(sample)[:-1])


def folder_of_files(folder: Path) -> list[tuple[str, int, str]]:
    """Write files of several groups, one of them without rows; return file, row and text of each row, in order."""
    wanted = []
    for name, rows in (("a-0", 5), ("a-1", 0), ("a-2", 1), ("b", 4)):
        texts = [f"{name} {row}" for row in range(rows)]
        write(folder / f"{name}.parquet", {"text": pa.array(texts, pa.string())})
        wanted += [(f"{name}.parquet", row, value) for row, value in enumerate(texts)]
    return wanted


def test_parquet_rows_have_a_place(tmp_path: Path) -> None:
    """Files are read in the order of their names, and a message names file and row, counted from 0."""
    wanted = folder_of_files(tmp_path)
    dataset = opened(tmp_path)
    for sample in (9, 0, 4, 5, 6, 8, 1, 2, 3, 7):
        name, row, value = wanted[sample]
        assert dataset.where(sample) == f"{tmp_path / name}:row {row}"
        assert text(dataset, sample) == value
    assert len(dataset) == len(wanted) == 10


def test_parquet_says_which_rows_lie_together(tmp_path: Path) -> None:
    """Shards are groups of rows, which are decoded together, in order."""
    folder_of_files(tmp_path)
    assert list(records(opened(tmp_path)).shards) == [2, 2, 1, 1, 2, 2]
    write_stream(tmp_path / "saved" / "a.arrow", pa.table({"text": list("abcdefg")}), rows=3)
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    assert list(records(opened_folder(tmp_path / "saved")).shards) == [3, 3, 1]


def test_parquet_origin_changes_with_any_file(tmp_path: Path) -> None:
    """The digest is over all files; the index lies beside the data, or where it is set."""
    folder_of_files(tmp_path / "data")
    origin = records(opened(tmp_path / "data")).origin()
    before = origin.digest()
    assert before == records(opened(tmp_path / "data")).origin().digest()
    assert (origin.name, origin.index) == (str(tmp_path / "data"), tmp_path / "data")
    assert records(opened(tmp_path / "data", index=str(tmp_path))).origin().index.parent == tmp_path
    write(tmp_path / "data" / "a-2.parquet", {"text": ["x"]})
    assert origin.digest() != before


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that file and group are added to as a group is decoded."""
    reads = []
    read = ParquetTable.read

    def counted(table: ParquetTable, group: int, columns: Any) -> Any:
        reads.append((table.path.name, group))
        return read(table, group, columns)

    monkeypatch.setattr(ParquetTable, "read", counted)
    return reads


def test_parquet_decodes_a_group_once_while_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a group come from one decoding; how many groups are kept is bounded by bytes."""
    for name in "ab":
        write(tmp_path / f"{name}.parquet", {"text": [letter * 10_000 for letter in "cdef"]}, use_dictionary=False)
    reads = count_reads(monkeypatch)
    everything = [("a.parquet", 0), ("a.parquet", 1), ("b.parquet", 0), ("b.parquet", 1)]
    roomy, narrow, none = (opened(tmp_path, cache_bytes=size) for size in (1 << 20, 25_000, 0))
    for sample in (0, 2, 4, 6, 1, 3, 5, 7):
        roomy.tokens(sample)
    assert reads == everything
    reads.clear()
    for sample in (0, 1, 2, 3, 1, 4, 5, 6, 7):
        narrow.tokens(sample)
    assert reads == everything  # sample 1 was parsed before, and is remembered itself
    reads.clear()
    for sample in (0, 1, 2):
        none.tokens(sample)
    assert reads == [everything[0], everything[0], everything[1]]


def test_parquet_decodes_no_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only columns that samples are made of are read, and a damaged one beside them is no matter."""
    path = write(tmp_path / "a.parquet", {"other": ["qqqqqqqq"] * 4, "text": list("abcd")}, compression="none")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x08\0\0\0qqqqqqqq", b"\xff\xff\xff\x7fqqqqqqqq"))
    assert path.read_bytes() != content
    dataset = opened(path)
    assert [text(dataset, sample) for sample in range(4)] == list("abcd")
    with pytest.raises(OSError, match=r"Unexpected end of stream|page|string"):
        pq.read_table(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_parquet_serves_threads_and_forked_processes(tmp_path: Path, kind: str) -> None:
    """Whoever asks for a row in whatever order gets the same, with hardly any cache."""
    count = 40
    table = pa.table(
        {
            "text": [f"<image> {number}" for number in range(count)],
            "image": [{"bytes": png(number), "path": None} for number in range(count)],
        }
    )
    write(tmp_path / "a.parquet", table, row_group_size=7)
    write_stream(tmp_path / "a.arrow", table, rows=7)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')

    def open_again() -> Dataset:
        return opened(tmp_path, cache_bytes=9000) if kind == "parquet" else opened_folder(tmp_path, cache_bytes=1 << 17)

    wanted = [facts(open_again(), sample) for sample in range(count)]
    dataset = open_again()
    orders = [np.random.default_rng(seed).permutation(count).tolist() for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda order: [facts(dataset, sample) for sample in order], orders)
        assert all(each == [wanted[sample] for sample in order] for each, order in zip(found, orders, strict=True))
    children = []
    for order in orders[:2]:
        child = os.fork()
        if not child:
            os._exit(0 if [facts(dataset, sample) for sample in order] == [wanted[sample] for sample in order] else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]


def test_parquet_tries_again_where_the_file_system_fails(tmp_path: Path) -> None:
    """A group is read at the third attempt; without success at the fourth the run ends, by no fault of the row."""
    dataset = opened(write(tmp_path / "e.parquet", {"text": list("abcd")}))
    with failing_files(tmp_path, 2) as waits:
        assert text(dataset, 2) == "c"
    assert waits == [0.1, 0.5]
    expected = r"e\.parquet:row 1: expected a file system that can be read, got \[Errno 5\] Input/output error"
    with failing_files(tmp_path, 99) as waits, pytest.raises(RunError, match=expected):
        dataset.tokens(1)
    assert waits == [0.1, 0.5, 2.0]


def test_parquet_pages_of_many_kinds_are_read(tmp_path: Path) -> None:
    """Whatever pyarrow writes is measured and read: versions of pages, codecs, encodings, dictionaries or none."""
    table = pa.table(
        {
            "text": [f"text {number % 7} " * 50 for number in range(300)],
            "images": pa.array([["p.png"] * (number % 3) for number in range(300)], pa.list_(pa.large_string())),
            "weight": pa.array([number / 8 if number % 5 else None for number in range(300)], pa.float32()),
        }
    )
    wanted = [text(opened(write(tmp_path / "plain.parquet", table)), sample) for sample in (0, 150, 299)]
    several: list[dict[str, Any]] = [
        *({"compression": name} for name in ("none", "snappy", "gzip", "brotli", "lz4", "zstd")),
        {"data_page_version": "2.0", "compression": "zstd"},
        {"use_dictionary": False, "data_page_size": 200},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
        {"use_dictionary": False, "column_encoding": {"weight": "BYTE_STREAM_SPLIT"}},
        {"dictionary_pagesize_limit": 100, "write_page_index": True, "write_page_checksum": True},
        {"use_content_defined_chunking": True, "version": "1.0"},
    ]
    for options in several:
        dataset = opened(write(tmp_path / "a.parquet", table, row_group_size=128, **options))
        assert [text(dataset, sample) for sample in (0, 150, 299)] == wanted
        for sample in (0, 7, 299):
            weights = dataset.weights(sample)  # type: ignore[attr-defined]
            assert (weights and weights[0]) == table.column("weight")[sample].as_py()
        assert len(records(dataset).read(299).items) == 2


def test_parquet_is_found_by_both_names() -> None:
    """The plugin is registered, and opens what its settings name."""
    assert [discover(DATASETS).find(name, where="data.plugin").name for name in ("parquet", "huggingface")] == [
        "parquet",
        "huggingface",
    ]


def test_parquet_evaluation_has_its_own_path(tmp_path: Path) -> None:
    """Without one there are no held-out samples."""
    write(tmp_path / "a.parquet", {"text": ["a"]})
    write(tmp_path / "b.parquet", {"text": ["b", "c"]})
    config = ParquetConfig(path=str(tmp_path / "a.parquet"), chat=CHAT)
    assert open_parquet_split(config, TOKENIZER, "evaluation") is None
    config = ParquetConfig(path=str(tmp_path / "a.parquet"), evaluation_path=str(tmp_path / "b.parquet"))
    dataset = open_parquet_split(config, TOKENIZER, "evaluation")
    assert dataset is not None
    assert [text(dataset, sample) for sample in range(2)] == ["b", "c"]


def test_parquet_readme_program_prints_what_it_says(tmp_path: Path) -> None:
    """The program of the page runs, and what it prints stands in its comments."""
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == re.findall(r"print\(.*\)  # (.*)$", program, flags=re.MULTILINE)

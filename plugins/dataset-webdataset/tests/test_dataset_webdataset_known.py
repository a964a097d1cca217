"""Which shards a setting means, and the index of shards: what it saves, and when it is refused."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from mimo.data import read_arrays, write_arrays
from mimo.hooks import ConfigError
from mimo_dataset_webdataset import WebdatasetConfig, _known, index_shards, write_shards
from mimo_dataset_webdataset._braces import expand_braces
from mimo_dataset_webdataset._opening import open_known, read_headers
from mimo_dataset_webdataset._shards import find_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of two samples."""
    write_shards(((f"{n}", {"txt": b"text %d" % n, "cls": b"x" * n}) for n in range(6)), tmp_path / "a", max_samples=2)
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{000..002}.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{x,y}/{0,1}.tar", ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"]),
        ("{0..0}", ["0"]),
        ("{a,}b", ["ab", "b"]),
    ],
)
def test_dataset_webdataset_braces_name_shards(expression: str, names: list[str]) -> None:
    """Lists and ranges, digits kept where they begin with 0, several of them in the order of reading."""
    assert expand_braces(expression) == names


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("{a", "a brace without its other half"),
        ("{a,{b,c}}", "a brace without its other half, or one within another"),
        ("{abc}", "neither a list {a,b} nor a range"),
        ("{9..1}", "which runs backwards"),
        ("{0..999999999999}", "more than 1,048,576 names"),
        ("{0..9999}{0..9999}", "more than 1,048,576 names"),
        ("{0..99999999999999999999}", "neither a list"),
    ],
)
def test_dataset_webdataset_braces_refuse(expression: str, says: str) -> None:
    """What is no list or range, or means too many shards, is refused before any name is made."""
    with pytest.raises(ConfigError, match=f"data.path: expected a path or an address of shards, .*{says}"):
        find_shards(expression, "", "data.path")


def test_dataset_webdataset_shards_are_found_however_they_are_named(folder: Path) -> None:
    """A folder, a glob, braces, a file and an address of files mean the same shards in the same order."""
    wanted = [str(folder / f"train-00000{number}.tar") for number in range(3)]
    for expression in (folder, f"{folder}/*.tar", f"{folder}/train-{{000000..000002}}.tar", f"file://{folder}"):
        assert [shard.address for shard in find_shards(str(expression), "", "data.path").shards] == wanted
    assert [shard.address for shard in find_shards(wanted[1], "", "data.path").shards] == [wanted[1]]


@pytest.mark.parametrize("name", ["missing.tar", "*.none", "train-{000000..000003}.tar", ""])
def test_dataset_webdataset_shards_that_are_missing_are_refused(folder: Path, name: str) -> None:
    """A shard or folder that isn't there, or without shards, is refused, by its name where others are there."""
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data\.path: expected existing tar shards, or a folder of \*\.tar, got '"):
        find_shards(str(folder / (name or "empty")), "", "data.path")
    os.mkfifo(folder / "pipe.tar")
    with pytest.raises(ConfigError, match=r"of which '.*pipe\.tar' is missing"):
        find_shards(str(folder), "", "data.path")
    with pytest.raises(ConfigError, match=r"data\.path: expected a path after file://"):
        find_shards("file://elsewhere/a.tar", "", "data.path")


@pytest.mark.parametrize("index", ["", "kept/here"])
def test_dataset_webdataset_index_says_what_headers_say(folder: Path, index: str) -> None:
    """Read back, an index has the arrays that reading the headers gives; opening with it reads no header."""
    index = str(folder / index) if index else ""
    path = index_shards(WebdatasetConfig(path=str(folder), index=index), "train")
    shards = find_shards(str(folder), index, "data.path")
    expected = read_headers(shards, None)
    assert path == (_known.index_path(shards))
    assert path.parent == (Path(index) if index else folder.parent)
    with patch.object(_known, "read_members", side_effect=AssertionError):
        known, _ = open_known(shards, None)
    assert [known.table.of_sample(sample) for sample in range(6)] == [
        expected.table.of_sample(sample) for sample in range(6)
    ]
    assert [known.table.keys[sample] for sample in range(6)] == list("012345")
    assert known.digest(shards.shards) == expected.digest(shards.shards)


def test_dataset_webdataset_index_of_an_expression_lies_beside_the_shards(folder: Path) -> None:
    """Globs and braces have an index each, in the folder of the first shard, under a name that fits a file."""
    paths = {
        index_shards(WebdatasetConfig(path=f"{folder}/{name}"), "train")
        for name in ("train-{000000..000002}.tar", "*.tar", "train-000001.tar")
    }
    assert len(paths) == 3
    assert {path.parent for path in paths if path} == {folder}
    assert len(find_shards(str(folder), "", "data.path").shards) == 3
    assert index_shards(WebdatasetConfig(path=str(folder)), "evaluation") is None


def test_dataset_webdataset_index_is_kept_by_copies_and_refused_for_other_shards(folder: Path) -> None:
    """A file with a new time and the same bytes is the same shard; with other bytes, or beside others, it is stale."""
    shards = find_shards(str(folder), "", "data.path")
    index_shards(WebdatasetConfig(path=str(folder)), "train")
    first = Path(shards.shards[0].address)
    os.utime(first, ns=(1, 1))
    assert _known.read_index(shards) is not None
    first.write_bytes(first.read_bytes().replace(b"text 0", b"text 9"))
    with pytest.raises(
        ConfigError, match=r"data\.path: expected the shards of which the index .*, got another .*Run mimo data"
    ):
        _known.read_index(shards)
    (folder / "train-000002.tar").unlink()
    with pytest.raises(ConfigError, match=r"got 2 shards, not 3"):
        _known.read_index(find_shards(str(folder), "", "data.path"))
    (folder / "train-000001.tar").rename(folder / "train-000009.tar")
    (folder / "train-000010.tar").write_bytes(b"")
    first.write_bytes(first.read_bytes().replace(b"text 9", b"text 0"))
    with pytest.raises(ConfigError, match=r"got '.*train-000009\.tar' in the place of '.*train-000001\.tar'"):
        _known.read_index(find_shards(str(folder), "", "data.path"))


def test_dataset_webdataset_index_that_is_damaged_is_refused(folder: Path) -> None:
    """A file that is cut, of another kind, of another format, or whose arrays don't fit is refused by its path."""
    shards = find_shards(str(folder), "", "data.path")
    path = index_shards(WebdatasetConfig(path=str(folder)), "train")
    assert path is not None
    whole, stored = path.read_bytes(), read_arrays(path)
    for content in (whole[:-8], b"", b"none" * 99, whole.replace(b'"format":"1"', b'"format":"2"')):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"data\.path: expected a sound index in .*a\.shards', got one of which"):
            _known.read_index(shards)
    for name, array in (
        ("samples", np.array([2, 2, 9], dtype=np.int64)),
        ("samples", np.array([-1, 2, 5], dtype=np.int64)),
        ("starts", np.zeros(2, dtype=np.int64)),
        ("sizes", np.zeros((3, 1), dtype=np.int64)),
        ("extensions", np.zeros(12, dtype=np.int64)),
    ):
        write_arrays(path, {**stored.arrays, name: array}, stored.about)
        with pytest.raises(ConfigError, match=r"expected a sound index"):
            _known.read_index(shards)


def test_dataset_webdataset_index_with_places_outside_is_refused_when_used(folder: Path) -> None:
    """Places that a damaged index names are checked before anything is read or allocated."""
    from mimo.data import TOKENIZERS
    from mimo.hooks import DataError, discover
    from mimo_dataset_webdataset._plugin import open_webdataset

    byte = discover(TOKENIZERS).find("byte", "here")
    config = WebdatasetConfig(path=str(folder))
    path = index_shards(config, "train")
    assert path is not None
    stored = read_arrays(path)
    for name, value, says in (
        ("member_sizes", 1 << 50, r"bytes, more than"),
        ("member_sizes", -1, r"bytes, more than"),
        ("member_sizes", 1 << 20, r"its shard has become shorter"),
        ("starts", 1 << 50, r"its shard has become shorter"),
        ("extensions", 99, r"members that its index misplaces"),
        ("members", 1 << 40, r"members that its index misplaces"),
    ):
        array = np.array(stored.arrays[name])
        array[:-1] = value
        write_arrays(path, {**stored.arrays, name: array}, stored.about)
        dataset = open_webdataset(config, byte.build(byte.config(), []), "train")
        assert dataset is not None
        with pytest.raises(DataError, match=f"train-000000.tar:0: expected .*{says}"):
            dataset.tokens(0)


def test_dataset_webdataset_index_needs_a_folder_that_can_be_written(folder: Path) -> None:
    """Where the index can't be written, the setting that helps is named."""
    (folder / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data\.index: expected a folder that can be written, .* Set data\.index"):
        index_shards(WebdatasetConfig(path=str(folder), index=str(folder / "file" / "in")), "train")

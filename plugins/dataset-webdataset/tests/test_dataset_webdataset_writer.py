"""Shards that are written: the same bytes each time, whole or not at all, and resumed where they stopped."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mimo.hooks import ConfigError, DataError
from mimo_dataset_webdataset import write_shards

Sample = tuple[str, Mapping[str, bytes | Path]]


def samples(count: int = 7) -> Iterator[Sample]:
    """Yield samples of 110 bytes or so."""
    for number in range(count):
        yield f"sub/{number:03d}", {"txt": b"t" * (number + 1), "jpg": b"j" * 100}


def contents(paths: list[Path]) -> list[bytes]:
    """Return what files hold."""
    return [path.read_bytes() for path in paths]


def test_dataset_webdataset_writer_writes_what_tar_reads(tmp_path: Path) -> None:
    """Names in order, bytes unchanged, times and owners of 0; files are copied, names may be long."""
    (tmp_path / "file").write_bytes(b"from a file" * 1000)
    name = "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 200
    (path,) = write_shards([*samples(1), (name, {"bin": tmp_path / "file"})], tmp_path / "out")
    with tarfile.open(path) as file:
        found = [(each.name, each.mtime, each.uid, each.uname, each.mode) for each in file]
        assert found == [(each, 0, 0, "", 0o644) for each in ("sub/000.jpg", "sub/000.txt", f"{name}.bin")]
        content = file.extractfile(f"{name}.bin")
        assert content is not None
        assert content.read() == b"from a file" * 1000


def test_dataset_webdataset_writer_is_deterministic_and_bounded(tmp_path: Path) -> None:
    """Shards end before a sample that is one too many or has too many bytes; a larger sample has one of its own."""
    first = write_shards(samples(), tmp_path / "a", max_samples=3)
    assert contents(first) == contents(write_shards(samples(), tmp_path / "b", max_samples=3))
    assert [path.name for path in first] == ["train-000000.tar", "train-000001.tar", "train-000002.tar"]
    # Two members of a block each with a header of one, and two blocks at the end.
    for number, shards in ((3 * 2048 + 1023, 4), (3 * 2048 + 1024, 3)):
        paths = write_shards(samples(), tmp_path / str(number), max_bytes=number)
        assert len(paths) == shards
        assert max(path.stat().st_size for path in paths) <= number
    assert len(write_shards(samples(), tmp_path / "d", max_bytes=1, pattern="x{}.tar")) == 7
    assert write_shards([], tmp_path / "e") == []


def test_dataset_webdataset_writer_resumes(tmp_path: Path) -> None:
    """Stopped in the middle of a shard, it leaves those that were finished, and then writes only the others."""

    def stopping() -> Iterator[Sample]:
        yield from samples(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(stopping(), tmp_path / "a", max_samples=2)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "a").iterdir()}
    assert sorted(before) == ["train-000000.tar", "train-000001.tar"]
    paths = write_shards(samples(), tmp_path / "a", max_samples=2)
    assert contents(paths) == contents(write_shards(samples(), tmp_path / "b", max_samples=2))
    assert {path.name: path.stat().st_ino for path in paths[:2]} == before


def test_dataset_webdataset_writer_refuses_other_shards(tmp_path: Path) -> None:
    """Shards of other samples, more of them than there should be, and damaged ones are never mixed with new ones."""
    write_shards(samples(), tmp_path, max_samples=3)
    with pytest.raises(
        ConfigError, match=r"train-000000\.tar: expected the same samples as before, got other ones\. Name"
    ):
        write_shards(samples(), tmp_path, max_samples=2)
    with pytest.raises(ConfigError, match=r"expected 2 shards, got also train-000002\.tar"):
        write_shards(samples(6), tmp_path, max_samples=3)
    (tmp_path / "train-000001.tar").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"train-000001\.tar: expected a shard that was written here, got .*cut"):
        write_shards(samples(), tmp_path, max_samples=3)
    with pytest.raises(ConfigError, match=r"pattern: expected a name with a place for the number"):
        write_shards(samples(), tmp_path, pattern="a.tar")


@pytest.mark.parametrize(
    ("key", "members", "says"),
    [
        ("a.b", {"txt": b""}, "keys without a dot in their last part"),
        ("../a", {"txt": b""}, "keys without a dot"),
        ("/a", {"txt": b""}, "keys without a dot"),
        ("__a__", {"txt": b""}, "keys without a dot"),
        ("", {"txt": b""}, "keys without a dot"),
        ("a", {}, "at least one member"),
        ("a", {"TXT": b""}, "an extension in small letters that can be read again, got 'TXT'"),
        ("a", {"pkl": b""}, "an extension in small letters that can be read again, got 'pkl'"),
        ("a", {"b/c": b""}, "an extension in small letters"),
        ("a" * 1024, {"txt": b""}, "names of at most 1,024 bytes"),
        ("a", {"txt": Path("missing")}, "an item that can be read"),
    ],
)
def test_dataset_webdataset_writer_refuses_samples(
    tmp_path: Path, key: str, members: Mapping[str, bytes | Path], says: str
) -> None:
    """What could not be read again as the same sample is refused by key, and leaves no shard."""
    with pytest.raises(DataError, match=says):
        write_shards([*samples(1), (key, members)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_dataset_webdataset_writer_refuses_a_key_twice(tmp_path: Path) -> None:
    """A key that comes again in a shard, at once or later, is refused."""
    for again in (["a", "a"], ["a", "b", "a"]):
        with pytest.raises(DataError, match=r"train-000000\.tar: expected each key once, got two"):
            write_shards(((key, {"txt": b""}) for key in again), tmp_path)

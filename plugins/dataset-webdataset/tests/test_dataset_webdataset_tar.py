"""Headers of tars: read as `tarfile` reads them, grouped as the WebDataset library does, and refused if hostile."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.hooks import ConfigError
from mimo_dataset_webdataset import _tar
from mimo_dataset_webdataset._opening import read_headers
from mimo_dataset_webdataset._shards import find_shards
from mimo_dataset_webdataset._table import TableBuilder, split_name
from mimo_dataset_webdataset._tar import BLOCK, Member, TarError, read_members

ASSETS = Path(__file__).parent / "assets"
"""Shards made by the library `webdataset` 1.0.2 and by `tarfile`, and the samples that the library finds in both."""
END = bytes(2 * BLOCK)


def members(raw: bytes) -> list[Member]:
    """Return the members of an archive."""
    return list(read_members(io.BytesIO(raw), len(raw)))


def header(name: str = "a.txt", size: int = 0, kind: bytes = tarfile.REGTYPE, **fields: str) -> bytearray:
    """Return a header."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    for field, value in fields.items():
        setattr(info, field, value)
    return bytearray(info.tobuf(tarfile.USTAR_FORMAT))


def summed(raw: bytearray, **fields: tuple[int, bytes]) -> bytes:
    """Return a header with bytes put at places, and a checksum that is right."""
    for place, content in fields.values():
        raw[place : place + len(content)] = content
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    return bytes(raw)


def pax(*records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    """Return an extended header and its content."""
    content = b"".join(records)
    return bytes(header("pax", len(content), kind)) + content.ljust(-(-len(content) // BLOCK) * BLOCK, b"\0")


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=90).filter(
    lambda name: name not in (".", "..")
)


@given(
    files=st.lists(st.tuples(NAMES, NAMES, st.integers(0, 1500)), max_size=5),
    form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_dataset_webdataset_tar_members_lie_where_tarfile_finds_them(
    files: list[tuple[str, str, int]], form: int
) -> None:
    """Names, places and sizes in archives of both forms, with any letters, are those that Python finds."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for folder, name, size in files:
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = size
            archive.addfile(info, io.BytesIO(bytes(size)))
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        expected = [(each.name, each.offset_data, each.size) for each in archive]
    assert [(each.name, each.start, each.size) for each in members(file.getvalue())] == expected


@pytest.mark.parametrize("name", ["library.tar", "names.tar"])
def test_dataset_webdataset_tar_samples_are_those_of_the_library(name: str) -> None:
    """Keys, extensions and order are those that the WebDataset library finds, in names of every kind."""
    builder = TableBuilder()
    builder.add_shard(members((ASSETS / name).read_bytes()))
    table = builder.table()
    found = [
        [table.keys[sample], {member.name: member.size for member in table.of_sample(sample)}]
        for sample in range(len(table))
    ]
    assert found == json.loads((ASSETS / "library.json").read_text(encoding="utf-8"))[name]


def test_dataset_webdataset_tar_takes_what_programs_write() -> None:
    """Sizes in GNU's binary form, sums of signed bytes, prefixes, comments for all members, and folders are read."""
    binary = summed(header("a.txt"), size=(124, b"\x80" + (3).to_bytes(11)))
    signed = bytearray(header("\N{LATIN SMALL LETTER A WITH DIAERESIS}.b", 0))
    unsigned = sum(signed) - sum(signed[148:156]) + 256
    large = sum(byte >= 128 for byte in signed[:148] + signed[156:])
    signed[148:156] = f"{unsigned - 256 * large:06o}\0 ".encode()
    folder = bytes(header("sub/", 0, tarfile.DIRTYPE))
    deep = bytes(header("d" * 60 + "/" + "e" * 60 + ".txt"))
    comment = pax(b"18 comment=by git\n", kind=tarfile.XGLTYPE)
    raw = comment + binary + b"abc".ljust(BLOCK, b"\0") + bytes(signed) + folder + deep + END
    assert [(each.name, each.size) for each in members(raw)] == [
        ("a.txt", 3),
        ("\N{LATIN SMALL LETTER A WITH DIAERESIS}.b", 0),
        ("d" * 60 + "/" + "e" * 60 + ".txt", 0),
    ]
    assert large == 2


def whole() -> bytes:
    """Return a sound archive of one member of 600 bytes."""
    return bytes(header("a.txt", 600)) + bytes(2 * BLOCK) + END


HOSTILE: list[tuple[str, Callable[[], bytes], str]] = [
    ("empty", lambda: b"", "0 bytes that was cut: it has no end"),
    ("no end", lambda: whole()[: 3 * BLOCK], "that was cut: it has no end"),
    ("half an end", lambda: whole()[: -BLOCK], "cut within its end"),
    ("cut content", lambda: whole()[:1000], "'a.txt' of 600 bytes of which 488 are there"),
    ("gzip", lambda: gzip.compress(whole(), 0), "that gzip compressed"),
    ("zstd", lambda: b"\x28\xb5\x2f\xfd".ljust(BLOCK, b"x") + END, "that zstd compressed"),
    ("checksum", lambda: whole().replace(b"a.txt", b"b.txt"), "byte 0 whose checksum is wrong"),
    ("joined", lambda: whole() + whole(), "bytes after its end at byte 1,536: archives that were joined"),
    ("endless end", lambda: whole() + bytes(2 << 20), "bytes after its end"),
    ("negative", lambda: summed(header(), size=(124, b"\xff" * 12)) + END, "a negative number in the header"),
    ("huge", lambda: summed(header(), size=(124, b"\x80" + b"\x7f" * 11)) + END, "bytes of which 1,024 are there"),
    ("no octal", lambda: summed(header(), size=(124, b"99999999999\0")) + END, "the number b'99999999999"),
    ("signed octal", lambda: summed(header(), size=(124, b"-0000000001\0")) + END, "the number b'-0000000001"),
    ("symbolic link", lambda: bytes(header("a", 0, tarfile.SYMTYPE, linkname="/etc")) + END, "a symbolic link 'a'"),
    ("hard link", lambda: bytes(header("a", 0, tarfile.LNKTYPE, linkname="b")) + END, "a hard link 'a'"),
    ("device", lambda: bytes(header("a", 0, tarfile.CHRTYPE)) + END, "a device 'a'"),
    ("pipe", lambda: bytes(header("a", 0, tarfile.FIFOTYPE)) + END, "a named pipe 'a'"),
    ("sparse", lambda: bytes(header("a", 0, tarfile.GNUTYPE_SPARSE)) + END, "a sparse file 'a'"),
    ("unknown", lambda: bytes(header("a", 0, b"Z")) + END, "unknown type 'Z'"),
    ("sparse pax", lambda: pax(b"22 GNU.sparse.major=1\n") + bytes(header()) + END, "a sparse file at byte 0"),
    ("two sizes", lambda: pax(b"11 size=99\n") + bytes(header("a", 5)) + bytes(BLOCK) + END, "two sizes of member 'a'"),
    ("pax size", lambda: pax(b"20 size=99999999999\n") + bytes(header("a")) + END, "99,999,999,999 bytes of which"),
    ("bad size", lambda: pax(b"11 size=-1\n") + bytes(header("a")) + END, "the size b'-1'"),
    ("bad record", lambda: pax(b"99 path=a\n") + bytes(header("a")) + END, "an extended header at byte 0"),
    ("no record", lambda: pax(b"rubbish") + bytes(header("a")) + END, "an extended header at byte 0"),
    ("global path", lambda: pax(b"10 path=a\n", kind=tarfile.XGLTYPE) + END, "that names all members"),
    ("long name bomb", lambda: bytes(header("L", 1 << 30, b"L")) + END, "1,073,741,824 bytes about a member"),
    ("long name", lambda: bytes(header("L", 2048, b"L")) + b"a" * 2048 + bytes(header()) + END, "name of 2,048 bytes"),
    ("chain", lambda: pax(b"11 mtime=1\n") * 9 + bytes(header()) + END, "more than 4 headers about"),
    ("header alone", lambda: pax(b"10 path=a\n") + END, "after a header that announces a member"),
    ("climbs", lambda: bytes(header("a/../../b.txt")) + END, "'a/../../b.txt', which lies outside"),
    ("absolute", lambda: bytes(header("/etc/passwd")) + END, "'/etc/passwd', which lies outside"),
    ("pax climbs", lambda: pax(b"16 path=../b.tx\n") + bytes(header()) + END, "which lies outside"),
    ("no name", lambda: summed(header(), name=(0, bytes(100))) + END, "a name of 0 bytes"),
    ("no letters", lambda: summed(header(), name=(0, b"\xff\xfe")) + END, "is no UTF-8"),
    ("full folder", lambda: bytes(header("a/", 512, tarfile.DIRTYPE)) + bytes(BLOCK) + END, "folder 'a/' of 512"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "says"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_dataset_webdataset_tar_refuses_hostile_archives(tmp_path: Path, make: Callable[[], bytes], says: str) -> None:
    """What is damaged, cut, joined, or asks for more than there is, is refused by shard, without reading it whole."""
    path = tmp_path / "train-0.tar"
    path.write_bytes(make())
    with pytest.raises(ConfigError, match=f"^data.held_out: expected tars of samples, got '.*train-0.tar', .*{says}"):
        read_headers(find_shards(str(path), "", "data.held_out"), None)


@given(raw=st.binary(max_size=2048), place=st.integers(0, 2560))
def test_dataset_webdataset_tar_any_bytes_give_members_within_or_a_refusal(raw: bytes, place: int) -> None:
    """Whatever is written over an archive, it is refused as one, or its members lie inside."""
    made = bytearray(whole())
    made[place : place + len(raw)] = raw
    try:
        found = members(bytes(made))
    except TarError:
        return
    assert all(0 < member.start <= member.start + member.size <= len(made) for member in found)


@given(name=st.text("a._/", min_size=1, max_size=12))
def test_dataset_webdataset_tar_names_are_split_as_by_the_library(name: str) -> None:
    """Key and extension are those of the library's pattern, and names that it leaves out belong to no sample."""
    found = None if re.match(r"__[^/]*__($|/)", name) else re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name)
    assert split_name(name) == (None if found is None else found.groups())


def test_dataset_webdataset_tar_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive of more members than a shard may have is given up at the first of these."""
    monkeypatch.setattr(_tar, "MAX_MEMBERS", 3)
    assert len(members(bytes(header()) * 2 + END)) == 2
    with pytest.raises(TarError, match="more than 3 members"):
        members(bytes(header()) * 3 + END)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a.txt", "b.txt", "a.png"], "two samples with the key 'a'"),
        (["a.png", "a.PNG"], "two members 'a.PNG'"),
        ([f"a.{number}" for number in range(4097)], "more than 4,096 different extensions"),
    ],
)
def test_dataset_webdataset_tar_refuses_keys_and_extensions(names: list[str], says: str) -> None:
    """A key that comes again, an extension that comes again in a sample, and endless different ones are refused."""
    with pytest.raises(TarError, match=says):
        TableBuilder().add_shard(Member(name, BLOCK, 0) for name in names)


def test_dataset_webdataset_tar_samples_end_with_their_shard() -> None:
    """Members of one key in two shards are two samples."""
    builder = TableBuilder()
    builder.add_shard([Member("a.txt", BLOCK, 1)])
    builder.add_shard([])
    builder.add_shard([Member("a.png", BLOCK, 1), Member("b.png", 2 * BLOCK, 1)])
    table = builder.table()
    assert [table.keys[sample] for sample in range(3)] == ["a", "a", "b"]
    assert (table.samples.tolist(), [table.shard(sample) for sample in range(3)]) == ([1, 0, 2], [0, 2, 2])

"""Samples as they are written into shards: of each a key, and what its members hold by extension."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from mimo.data.sources.lines import Lines, find_lines
from mimo.data.sources.record import LISTS, RecordError, parse_object, read_record
from mimo.data.sources.record_dataset import path_inside
from mimo.data.text import rename_items
from mimo.hooks import ConfigError, DataError, JsonNode, JsonSource

_NOT_ITEMS = ("", ".", ".txt", ".json", ".npy", ".npz", ".pt", ".pth", ".pkl", ".pickle", ".ten", ".pyd")
"""Suffixes by which members are texts, or are never read; what is within is the encoder's to say."""
_TEXTS = ("txt", "json")
"""Extensions of what a sample of a folder must have one of."""


def read_members(source: Path) -> Iterator[tuple[str, Mapping[str, bytes | Path]]]:
    """Yield the samples of a jsonl file, or of a folder of items with a text or a record beside each.

    A line's key is its number; its record names its items as members. In a folder, files with one name up to the first
    dot are a sample (``cat.png``, ``cat.txt``); folders in it are looked into, and hidden files left out.

    Raises:
        ConfigError: there is no such file or folder, or nothing in it.
        DataError: a sample is none.
    """
    if source.is_dir():
        yield from _of_folder(source)
    elif source.is_file():
        yield from _of_lines(source)
    else:
        raise ConfigError("SOURCE", expected="an existing jsonl file, or a folder", got=repr(str(source)))


def _of_folder(folder: Path) -> Iterator[tuple[str, Mapping[str, bytes | Path]]]:
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    paths = {name: path for name, path in paths.items() if not any(part.startswith(".") for part in name.split("/"))}
    for name, path in paths.items():
        if path.is_symlink() and path.is_dir():
            raise DataError(
                f"{folder}/{name}",
                expected="a folder itself",
                got=f"a link to {str(path.readlink())!r}",
                fix="Move the folder there, or build from the one that it names.",
            )
    shown = sorted((_key(name), name) for name, path in paths.items() if path.is_file())
    if not shown:
        raise ConfigError("SOURCE", expected="a folder with files", got=repr(str(folder)))
    root = folder.resolve()
    for key, group in groupby(shown, key=lambda pair: pair[0]):
        where = f"{folder}/{key}"
        members: dict[str, Path] = {}
        for _, name in group:
            extension = name[len(key) + 1 :].lower()
            if extension in members:
                raise DataError(where, expected="each extension once", got=f"two files .{extension}", fix="Rename one.")
            members[extension] = path_inside(root, name, where=where, holder="folder")
        if not any(extension in members for extension in _TEXTS):
            raise DataError(
                where,
                expected="a text or a record beside each item, .txt or .json",
                got=", ".join(f".{extension}" for extension in members),
            )
        yield key, members


def _key(name: str) -> str:
    folders, _, last = name.rpartition("/")
    key = last.partition(".")[0]
    return f"{folders}/{key}" if folders else key


def _of_lines(path: Path) -> Iterator[tuple[str, Mapping[str, bytes | Path]]]:
    lines = find_lines(path)
    if not len(lines):
        raise ConfigError(
            "SOURCE", expected="a jsonl file with at least one sample", got=f"{str(path)!r}, an empty one"
        )
    for sample in range(len(lines)):
        yield f"{lines.number(sample):09d}", _of_line(lines, sample)


def _of_line(lines: Lines, sample: int) -> Mapping[str, bytes | Path]:
    where = lines.where(sample)
    files: dict[str, Path] = {}

    def rename(reference: str) -> str:
        file = lines.item(sample, reference)
        if not file.is_file():  # a named pipe would wait forever
            msg = f"{reference!r}: there is no such file"
            raise ValueError(msg)
        suffix = file.suffix.lower()
        name = f"{len(files)}{'.bin' if suffix in _NOT_ITEMS else suffix}"
        files[name] = file
        return name

    try:
        record = parse_object(lines.bytes_of(sample))
        read_record(record, where)
        content = json.dumps(_renamed(record, rename, where), ensure_ascii=False, separators=(",", ":")).encode()
    except RecordError as error:
        raise DataError(where, expected=error.expected, got=error.got, fix=error.fix) from None
    except DataError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # circles of links; null bytes in names
        raise DataError(where, expected="items that can be read", got=str(error)) from error
    return {"json": content, **files}


def _renamed(record: Mapping[str, Any], rename: Callable[[str], str], where: str) -> Mapping[str, Any]:
    """Return a record with other names of its items."""
    # Also lists of none, or members would be taken for items because of their suffixes.
    found = {**record, **{key: list(map(rename, record.get(key, []))) for key in LISTS}}
    if "items" in record:
        found["items"] = {modality: list(map(rename, paths)) for modality, paths in record["items"].items()}
    if "messages" in record:
        found["messages"] = rename_items(JsonNode(record["messages"], JsonSource(where=where, error=DataError)), rename)
    return found

"""Which files of a folder hold a split, as `datasets` saves it, or as a cloned repository of the hub has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mimo.hooks import ConfigError, parse_json

_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_MAX_JSON = 1 << 24
"""Bytes of a file of settings."""
_SPLIT_FILE = re.compile(r"(?P<split>.+?)(?:-\d+-of-\d+|-\d+)?\.parquet")
"""``train.parquet``, ``train-00000-of-00002.parquet``."""


def parquet_files(path: Path, setting: str) -> list[Path]:
    """Return a file, or those of a folder, in the order of their names.

    Raises:
        ConfigError: there are none.
    """
    if path.is_file():
        return [path]
    if files := _parquet_in(path):
        return files
    raise ConfigError(
        setting,
        expected="an existing parquet file, or a folder of files named *.parquet",
        got=repr(str(path)),
        fix="Check the path; it is relative to the folder in which the command runs.",
    )


def split_files(path: Path, split: str, setting: str) -> list[Path]:
    """Return the files of a split of a folder that `Dataset.save_to_disk` made, or of a cloned repository.

    Args:
        path: of the folder.
        split: ``train``, for example.
        setting: that named the split, for messages.

    Raises:
        ConfigError: the folder is neither, has no such split, or says of its files what can't be.
    """
    if not path.is_dir():
        raise ConfigError(
            "data.path",
            expected="a folder made by save_to_disk, or a cloned repository of a dataset",
            got=repr(str(path)),
            fix="Check the path; it is relative to the folder in which the command runs.",
        )
    if (path / _SPLITS).is_file():
        listed = _json(path / _SPLITS, "splits")
        names = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
        if split not in names:
            raise _no_split(path, split, names, setting)
        return _saved_files(_inside(path, split))
    if (path / _STATE).is_file():
        own = str(_json(path / _STATE, "_split", optional=True) or "train")
        if split != own:
            raise _no_split(path, split, [own], setting)
        return _saved_files(path)
    splits = _splits_of_repository(path)
    if split in splits:
        return splits[split]
    raise _no_split(path, split, sorted(splits), setting)


def _splits_of_repository(path: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for folder in (each for each in (path, path / "data") if each.is_dir()):
        for file in _parquet_in(folder):
            if named := _SPLIT_FILE.fullmatch(file.name):
                found.setdefault(named["split"], []).append(file)
        for inner in sorted(each for each in folder.iterdir() if each.is_dir() and each != path / "data"):
            found.setdefault(inner.name, []).extend(_parquet_in(inner))
    return {split: files for split, files in found.items() if files}


def _parquet_in(folder: Path) -> list[Path]:
    return sorted(each for each in folder.glob("*.parquet") if each.is_file() and not each.name.startswith("."))


def _saved_files(folder: Path) -> list[Path]:
    state = folder / _STATE
    if _json(state, "_indices_data_files", optional=True):
        fix = "Save it with a newer version of datasets, or call flatten_indices() before."
        raise ConfigError("data.path", expected="rows in their own order", got=f"{state} with indices", fix=fix)
    files = _json(state, "_data_files")
    names = (
        [each.get("filename") if isinstance(each, dict) else None for each in files] if isinstance(files, list) else []
    )
    if not names:
        raise ConfigError("data.path", expected=f"files of data in {state}", got="none")
    return [_inside(folder, name) for name in names]


def _inside(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or not name or Path(name).name != name or name in (".", ".."):
        raise ConfigError("data.path", expected=f"names of what lies in {str(folder)!r}", got=repr(name))
    if not (folder / name).exists():
        raise ConfigError("data.path", expected=f"{name!r} in {str(folder)!r}", got="no such file")
    return folder / name


def _json(path: Path, key: str, *, optional: bool = False) -> Any:
    if not path.is_file():  # a pipe would be waited for
        raise ConfigError("data.path", expected=f"a file {str(path)!r}", got="none")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_JSON + 1)
        value = parse_json(content) if len(content) <= _MAX_JSON else None
    except (OSError, ValueError) as error:
        raise ConfigError("data.path", expected=f"JSON in {path}", got=f"something else ({error})") from None
    if not isinstance(value, dict) or (key not in value and not optional):
        raise ConfigError("data.path", expected=f"a JSON object with {key!r} in {path}", got="something else")
    return value.get(key)


def _no_split(path: Path, split: str, splits: list[str], setting: str) -> ConfigError:
    said = ", ".join(map(repr, splits)) or "none"
    return ConfigError(setting, expected=f"one of the splits {said} of {str(path)!r}", got=repr(split))

"""Which shards a setting means: files here, or addresses elsewhere that a file system of fsspec opens."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import attrs

from mimo.data import digest_of_text, index_place
from mimo.hooks import ConfigError
from mimo_dataset_webdataset._braces import MAX_SHARDS, expand_braces

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_LOCAL = ("file", "local")
_GLOB = re.compile(r"[*?\[]")
_UNFIT = re.compile(r"[^\w.-]+")


@attrs.frozen(kw_only=True)
class Shard:
    """One tar.

    Args:
        address: path, or what fsspec opens.
        is_local: whether it is a path.
    """

    address: str
    is_local: bool

    @property
    def identity(self) -> str:
        """The address without what lets somebody in: names, passwords, and what follows a question mark."""
        if self.is_local:
            return self.address
        scheme, _, rest = self.address.partition("?")[0].partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"

    @property
    def name(self) -> str:
        """The last part of its address, for messages about samples."""
        return self.identity.rpartition("/")[2]


@attrs.frozen(kw_only=True)
class Shards:
    """The shards of a split.

    Args:
        setting: path of the setting that names them.
        expression: as it is set.
        shards: in order.
        index: see `mimo.data.Origin`.
    """

    setting: str
    expression: str
    shards: tuple[Shard, ...]
    index: Path

    @property
    def is_local(self) -> bool:
        """Whether all lie here."""
        return all(shard.is_local for shard in self.shards)


def find_shards(expression: str, index: str, setting: str) -> Shards:
    """Return the shards of an expression: of files here only those that are there.

    Args:
        expression: path with braces or a glob, folder of ``*.tar``, or address with braces.
        index: folder for what is known of them; empty: beside the shards, which must lie here then.
        setting: path of the setting, for messages.

    Raises:
        ConfigError: it means no shards, one that isn't there, or something that can't be listed.
    """
    try:
        names = expand_braces(expression)
    except ValueError as error:
        raise ConfigError(
            setting,
            expected="a path or an address of shards, with lists {a,b} or ranges {000..127}",
            got=f"{_shown(expression)!r}: {error}",
        ) from None
    scheme = _SCHEME.match(expression)
    if scheme and scheme[1].lower() not in _LOCAL:
        return _remote(expression, names, index, setting)
    if scheme:
        names = [_path_of(name, setting) for name in names]
    paths = [path for name in names for path in _paths(name)]
    if len(paths) > MAX_SHARDS:
        raise ConfigError(setting, expected=f"at most {MAX_SHARDS:,} shards", got=f"{len(paths):,}")
    # Not `open` alone: a named pipe would wait forever.
    missing = next((path for path in paths if not Path(path).is_file()), None)
    if missing is not None or not paths:
        raise ConfigError(
            setting,
            expected="existing tar shards, or a folder of *.tar",
            got=repr(expression) + (f", of which {missing!r} is missing" if missing and missing != expression else ""),
            fix="Check the path; it is relative to the folder in which the command runs.",
        )
    return Shards(
        setting=setting,
        expression=expression,
        shards=tuple(Shard(address=path, is_local=True) for path in paths),
        index=_place(names, paths[0], expression, index),
    )


def _remote(expression: str, names: list[str], index: str, setting: str) -> Shards:
    if "*" in expression:
        raise ConfigError(
            setting,
            expected="an address that names its shards, such as https://host/train-{000..127}.tar",
            got=repr(_shown(expression)),
            fix="Write a range in braces instead of *: what lies elsewhere isn't listed.",
        )
    if not index:
        raise ConfigError(
            "data.index",
            expected=f"a folder for what is known of shards that lie elsewhere, as {setting} does",
            got="none",
            fix='Set data.index = "index".',
        )
    shards = tuple(Shard(address=name, is_local=False) for name in names)
    identity = Shard(address=expression, is_local=False).identity
    if len({shard.identity for shard in shards}) < len(set(names)):
        raise ConfigError(
            setting,
            expected="shards whose addresses differ before any question mark, as these are their names",
            got=repr(identity),
        )
    place = Path(index) / f"{_slug(identity)}-{digest_of_text(identity)[:12]}"
    return Shards(setting=setting, expression=identity, shards=shards, index=place)


def _shown(expression: str) -> str:
    """Return an expression for messages: of an address without what may be secret."""
    return Shard(address=expression, is_local=not _SCHEME.match(expression)).identity


def _path_of(address: str, setting: str) -> str:
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(setting, expected="a path after file://, as in file:///data/a.tar", got=repr(_shown(address)))
    return unquote(address.partition("://")[2].removeprefix(parts.netloc))


def _paths(name: str) -> list[str]:
    if Path(name).is_dir():
        return sorted(map(str, Path(name).glob("*.tar")))
    if _GLOB.search(name) and not Path(name).exists():
        return sorted(glob.glob(name))  # noqa: PTH207 - pathlib's takes no absolute patterns
    return [name]


def _place(names: list[str], first: str, expression: str, index: str) -> Path:
    if len(names) == 1 and Path(names[0]).exists():
        return index_place(names[0], index)
    name = f"{_slug(expression)}-{digest_of_text(expression)[:12]}"
    return (Path(index) if index else Path(first).parent) / name


def _slug(expression: str) -> str:
    return _UNFIT.sub("_", expression.rpartition("/")[2].removesuffix(".tar"))[:80].strip("_") or "shards"

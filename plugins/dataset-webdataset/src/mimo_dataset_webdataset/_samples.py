"""Samples made of members: what is the record, and which members are its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, BinaryIO

import attrs

from mimo.data import Origin, Record, RecordError, digest_of_text, parse_object, read_record
from mimo.hooks import UserError
from mimo_dataset_webdataset._known import REINDEX, Known
from mimo_dataset_webdataset._opening import Opener
from mimo_dataset_webdataset._shards import Shards
from mimo_dataset_webdataset._tar import Member

MAX_MEMBER = 1 << 30
"""Bytes of an item that is read."""
MAX_TEXT = 1 << 28
"""Bytes of a record that is parsed."""
NEVER = frozenset({"npy", "npz", "pickle", "pkl", "pt", "pth", "pyd", "ten"})
"""Extensions of what may run code when it is decoded, or that other programs decode so: these are never read."""
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("bmp", "gif", "jpeg", "jpg", "png", "ppm", "tif", "tiff", "webp"), "image"),
    **dict.fromkeys(("flac", "mp3", "ogg", "wav"), "audio"),
    "json": "json",
    "txt": "text",
}
"""What members are, by extension; others are left out."""
IGNORE = "ignore"
_LISTS = {"image": "images", "audio": "audio"}
_FIX = 'Leave one out: data.members = {{"{}" = "ignore"}}.'


def is_never_read(extension: str) -> bool:
    """Whether members with this extension are left alone whatever is set."""
    return extension.lower().rpartition(".")[2] in NEVER


@attrs.frozen(kw_only=True, eq=False)
class ShardRecords:
    """The records of shards; see `mimo.data.Records`.

    Args:
        source: the shards.
        known: where everything lies in them.
        opener: opens one.
        kinds: what members are, by extension.
    """

    source: Shards
    known: Known
    opener: Opener
    kinds: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.known.table)

    @cached_property
    def shards(self) -> Sequence[int]:
        """Number of samples of each shard, in the order of the samples."""
        found: list[int] = self.known.table.samples.tolist()
        return found

    def where(self, sample: int) -> str:
        """Return the shard and key of a sample."""
        table = self.known.table
        return f"{self.source.shards[table.shard(sample)].name}:{table.keys[sample]}"

    def origin(self) -> Origin:
        """Return the shards."""
        return Origin(
            name=self.source.expression,
            index=self.source.index,
            digest=lambda: self.known.digest(self.source.shards),
            template=lambda: digest_of_text(dict(self.kinds)),
        )

    def read(self, sample: int) -> Record:
        """Return the record of a sample: its json, or its text with all its items before it."""
        members = self._members(sample)
        items: dict[str, list[str]] = {}
        for kind, member in members:
            if kind not in ("json", "text"):
                items.setdefault(kind, []).append(member.name)
        record, text = (self._text(sample, members, kind) for kind in ("json", "text"))
        if record is None:
            if text is None:
                raise RecordError(
                    expected="a member .json or .txt",
                    got=", ".join(f".{member.name}" for member in self.known.table.of_sample(sample)),
                    fix="data.members names other extensions.",
                )
            before = "".join(f"<{kind}> " * len(names) for kind, names in items.items() if f"<{kind}>" not in text)
            return read_record(_listed({"text": before + text}, items), self.where(sample))
        value = parse_object(record)
        if text is not None and isinstance(value, dict):
            if "text" in value or "messages" in value:
                raise RecordError(
                    expected="one member with what is written", got=".json and .txt", fix=_FIX.format("txt")
                )
            value = {**value, "text": text}
        return self._record(value, items, self.where(sample))

    def item(self, sample: int, reference: str) -> bytes:
        """Return what the member holds that a reference means: its name, or what of it follows the sample's key."""
        key = self.known.table.keys[sample]
        members = {member.name: member for member in self.known.table.of_sample(sample)}
        names = (reference.removeprefix(prefix).lower() for prefix in ("", f"{key}.", f"{key.rpartition('/')[2]}."))
        name = next((name for name in names if name in members), None)
        if name is None:
            msg = "there is no such member in the sample"
            raise ValueError(msg)
        if is_never_read(name):
            msg = f"members .{name} are never read, as decoding one may run what it holds"
            raise ValueError(msg)
        return self._content(sample, members[name], MAX_MEMBER)

    def _members(self, sample: int) -> list[tuple[str, Member]]:
        found = []
        try:
            members = self.known.table.of_sample(sample)
        except ValueError as error:
            raise RecordError(expected="a sample that can be found", got=str(error), fix=REINDEX) from None
        for member in members:
            kind = self.kinds.get(member.name, self.kinds.get(member.name.rpartition(".")[2], IGNORE))
            if kind != IGNORE and not is_never_read(member.name):
                found.append((kind, member))
        return found

    def _text(self, sample: int, members: Sequence[tuple[str, Member]], kind: str) -> Any:
        """Return the bytes of the json, or the text, of a sample; None if it has none."""
        found = [member for each, member in members if each == kind]
        if len(found) > 1:
            names = [f".{member.name}" for member in found]
            raise RecordError(
                expected=f"one member of kind {kind!r}", got=", ".join(names[:8]), fix=_FIX.format(found[-1].name)
            )
        if not found:
            return None
        try:
            content = self._content(sample, found[0], MAX_TEXT)
            return content.decode().strip() if kind == "text" else content
        except UserError:  # of the shard or the cache, no fault of the sample
            raise
        except UnicodeDecodeError as error:
            raise RecordError(expected=f"UTF-8 text in .{found[0].name}", got=f"something else ({error})") from None
        except ValueError as error:
            raise RecordError(expected=f"a member .{found[0].name} that can be read", got=str(error)) from None

    def _record(self, value: Any, items: Mapping[str, list[str]], where: str) -> Record:
        """Return the record of an object, with all members of the modalities whose items it doesn't name."""
        if isinstance(value, dict) and items:
            named: set[str] = set()
            if "messages" in value:
                unlisted = {key: each for key, each in value.items() if key != "roles"}  # maybe of items yet to list
                named = {item.modality for item in read_record(unlisted, where).items}
            others = value.get("items")
            named |= set(others) if isinstance(others, dict) else set()
            named |= {modality for modality, key in _LISTS.items() if key in value}
            value = _listed(value, {kind: names for kind, names in items.items() if kind not in named})
        try:
            return read_record(value, where)
        except RecordError as error:
            raise RecordError(
                expected=f"{error.expected} in .json",
                got=error.got,
                fix=error.fix or 'If it is no record but notes: data.members = {json = "ignore"}.',
            ) from None

    def _content(self, sample: int, member: Member, limit: int) -> bytes:
        """Return the bytes of a member.

        Raises:
            ValueError: there are too many of them, or the shard has become shorter.
            DataError: the shard can't be fetched.
            OSError: it can't be read.
        """
        if not 0 <= member.size <= limit or member.start < 0:
            msg = f"it has {member.size:,} bytes, more than {limit:,}"
            raise ValueError(msg)
        with self._opened(sample) as file:
            if member.start + member.size > file.seek(0, 2):
                msg = "its shard has become shorter"
                raise ValueError(msg)
            file.seek(member.start)
            return file.read(member.size)

    def _opened(self, sample: int) -> AbstractContextManager[BinaryIO]:
        return self.opener.opened(self.known.table.shard(sample))


def _listed(value: Mapping[str, Any], items: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return an object with lists of items."""
    lists: dict[str, Any] = {_LISTS[kind]: names for kind, names in items.items() if kind in _LISTS}
    others = {kind: names for kind, names in items.items() if kind not in _LISTS}
    if others:
        before = value.get("items", {})
        lists["items"] = {**before, **others} if isinstance(before, dict) else before
    return {**value, **lists}

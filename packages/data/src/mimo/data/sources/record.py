"""A sample as people write it, checked: an object with a text or a conversation, items and a weight.

Every source of records has this one form, whether an object is a line of a file, a row of a table or members of an
archive.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from mimo.data.samples import MAX_WEIGHT
from mimo.data.text import Conversation, RecordItem, Reference, parse_conversation, read_role
from mimo.hooks import DataError, JsonNode, JsonSource, parse_json

LISTS = {"images": "image", "audio": "audio"}
"""Keys of lists of paths, and the modality of each."""
_MAX_PATH = 4096
"""Letters of a path, as Linux has it."""
_ROLES: Mapping[str, str] = {"human": "user", "gpt": "assistant"}
"""LLaVA's names of speakers."""
_KEYS = (*LISTS, "id", "items", "messages", "roles", "text", "tools", "weight")
"""Of a record; its ``id`` is left out."""


class RecordError(ValueError):
    """What is wrong with a record, without its place, which only its source knows."""

    def __init__(self, *, expected: str, got: str, fix: str = "") -> None:
        self.expected = expected
        self.got = got
        self.fix = fix
        super().__init__(f"expected {expected}, got {got}")


@attrs.frozen(kw_only=True)
class Record:
    """A sample as it is written.

    Args:
        text: what is written, empty for a conversation.
        items: in the order of their placeholders, per modality.
        weight: how much each of its tokens counts, None for 1.
        conversation: its messages.
    """

    text: str
    items: tuple[RecordItem, ...]
    weight: float | None = None
    conversation: Conversation | None = None


def parse_record(raw: bytes, where: str) -> Record:
    """Return the record that bytes hold as JSON, of which ``where`` names the place.

    Raises:
        RecordError: they are not one JSON object, or as from `read_record`.
        DataError: its messages are no conversation.
    """
    return read_record(parse_object(raw), where)


def parse_object(raw: bytes) -> Any:
    """Return the value that bytes hold as JSON, for `read_record`; one in LLaVA's form in that of all records.

    Raises:
        RecordError: they are no JSON.
    """
    try:
        value = parse_json(raw)
    except UnicodeDecodeError as error:
        raise RecordError(
            expected="UTF-8 text", got=f"something else ({error})", fix="Save the file as UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        got = f"text that is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        raise RecordError(expected="one JSON object", got=got) from None
    except ValueError as error:  # a key twice, numbers too long, brackets too deep
        raise RecordError(expected="one JSON object", got=f"text that is not JSON ({error})") from None
    return _from_llava(value) if isinstance(value, dict) and "conversations" in value else value


def _from_llava(record: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"id": …, "image": "a.png", "conversations": […]}`` as ``{"images": ["a.png"], "messages": […]}``.

    Lines of text alone have no ``image``, or null, and may name a ``model``.
    """
    found = {key: value for key, value in record.items() if key not in ("image", "model", "conversations")}
    for old, new in (("conversations", "messages"), ("image", "images")):
        if old in record and new in record:
            raise RecordError(expected=f"one of the keys {old!r} and {new!r}", got="both")
    found["messages"] = named_messages(record["conversations"])
    if record.get("image") is not None:
        found["images"] = record["image"] if isinstance(record["image"], list) else [record["image"]]
    return found


def named_messages(messages: Any) -> Any:
    """Return messages of LLaVA's keys, ``from`` and ``value``, with ``role`` and ``content``; others as they are."""
    return [_named(message) for message in messages] if isinstance(messages, list) else messages


def _named(message: Any) -> Any:
    if not isinstance(message, dict) or "from" not in message or "role" in message:
        return message
    renamed = {"from": "role", "value": "content"}
    found = {renamed.get(key, key): value for key, value in message.items()}
    role = found["role"]
    return found | {"role": _ROLES.get(role, role) if isinstance(role, str) else ""}


def read_record(value: Any, where: str) -> Record:
    """Return the record of an object, as JSON gives one but that items may be bytes; ``where`` names the place.

    Raises:
        RecordError: it is no object with ``text`` or ``messages`` and, if it likes, items, their roles and a weight.
        DataError: its messages are no conversation, or its roles are none of its items.
    """
    if not isinstance(value, dict):
        raise RecordError(expected="one JSON object", got=_kind(value))
    for key in value:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            raise RecordError(
                expected=f"only the keys {', '.join(map(repr, _KEYS))}",
                got=repr(key),
                fix=f"Did you mean {near[0]!r}?" if near else "Remove it.",
            )
    node = JsonNode(value, JsonSource(where=where, error=DataError))
    listed = tuple(_items(value))
    if "roles" in value:
        listed = tuple(_with_roles(listed, node["roles"]))
    if "messages" not in value:
        if "tools" in value:
            raise RecordError(expected="the key 'messages' beside 'tools'", got="none")
        return Record(text=_text(value), items=listed, weight=_weight(value))
    if "text" in value:
        raise RecordError(expected="one of the keys 'text' and 'messages'", got="both")
    conversation = parse_conversation(node["messages"], node["tools"] if "tools" in value else None)
    items = _items_of(conversation, listed, value.get("roles", {}))
    return Record(text="", items=items, weight=_weight(value), conversation=conversation)


def _items_of(
    conversation: Conversation, listed: Sequence[RecordItem], roles: Mapping[str, Any]
) -> tuple[RecordItem, ...]:
    for part in conversation.parts:
        if not isinstance(part, str) and part.role and part.modality in roles:
            raise RecordError(
                expected="the role of an item in one place",
                got=f"roles of modality {part.modality!r} both in messages and in 'roles'",
                fix="Leave out either.",
            )
    try:
        return tuple(conversation.items(listed))
    except ValueError as error:
        fix = "Name all of them in messages."
        raise RecordError(expected="the items of a modality in one place", got=str(error), fix=fix) from None


def _text(record: dict[str, Any]) -> str:
    if "text" not in record:
        fix = 'Write {"images": [...], "text": "..."} or {"messages": [...]}.'
        raise RecordError(expected="the key 'text' or 'messages'", got="none", fix=fix)
    text = record["text"]
    if not isinstance(text, str):
        raise RecordError(expected="text in 'text'", got=_kind(text))
    if not text.strip():
        raise RecordError(expected="text in 'text'", got="none", fix="Leave out samples without text.")
    return text


def _items(record: dict[str, Any]) -> Iterator[RecordItem]:
    for key, modality in LISTS.items():
        for path in _paths(record.get(key, []), key):
            yield RecordItem(modality, path)
    others = record.get("items", {})
    if not isinstance(others, dict):
        raise RecordError(expected="an object of modalities in 'items'", got=_kind(others))
    for modality, paths in others.items():
        for key, own in LISTS.items():
            if modality == own:
                raise RecordError(expected=f"items of modality {own!r} in {key!r}", got="some in 'items'")
        for path in _paths(paths, f"items.{modality}"):
            yield RecordItem(modality, path)


def _with_roles(items: Sequence[RecordItem], roles: JsonNode) -> Iterator[RecordItem]:
    """Yield items with the roles that an object has for those of some modalities."""
    counts = Counter(item.modality for item in items)
    waiting = {}
    for modality, node in roles.items():
        given = [read_role(each) for each in node.list()]
        if len(given) != (count := counts[modality]):
            near = [] if count else difflib.get_close_matches(modality, counts, n=1)
            fix = f"Did you mean {near[0]!r}?" if near else "An item that a message names has its role there."
            raise node.fail(f"as many roles as the record lists items of modality {modality!r}, {count}", fix)
        waiting[modality] = iter(given)
    for item in items:
        yield attrs.evolve(item, role=next(waiting[item.modality])) if item.modality in waiting else item


def _paths(paths: Any, key: str) -> list[Reference]:
    if not isinstance(paths, list):
        raise RecordError(expected=f"a list of paths in {key!r}", got=_kind(paths))
    for path in paths:
        if not isinstance(path, bytes) and (not isinstance(path, str) or not path or len(path) > _MAX_PATH):
            raise RecordError(expected=f"paths in {key!r}", got=_kind(path))
    return paths


def _weight(record: dict[str, Any]) -> float | None:
    if "weight" not in record:
        return None
    weight = record["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise RecordError(
            expected=f"a number from 0 to {MAX_WEIGHT:.2g} in 'weight'",
            got=_kind(weight),
            fix="It is how much each token of the sample counts; without it, that is 1.",
        )
    return float(weight)


def _kind(value: Any) -> str:
    """Return a JSON value's kind and start, for a message."""
    kinds = {dict: "an object", list: "a list", str: "the text", bool: "", int: "the number", float: "the number"}
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    shown = json.dumps(value, default=lambda each: f"<{type(each).__name__}>")
    limit = 40
    return f"{kinds.get(type(value), '')} {shown if len(shown) <= limit else shown[:limit] + '…'}".strip()

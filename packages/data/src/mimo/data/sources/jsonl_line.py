"""One line of a jsonl dataset, from bytes to a checked record."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

import attrs

from mimo.data.samples import MAX_WEIGHT
from mimo.data.text import Conversation, Reference, parse_conversation
from mimo.hooks import DataError, JsonNode, JsonSource, parse_json

_LISTS = {"images": "image", "audio": "audio"}
"""Keys of lists of paths, and the modality of each."""
_MAX_PATH = 4096
"""Letters of a path, as Linux has it."""
_KEYS = (*_LISTS, "items", "messages", "text", "tools", "weight")


class LineError(ValueError):
    """What is wrong with a line, without its place, which only the dataset knows."""

    def __init__(self, *, expected: str, got: str, fix: str = "") -> None:
        self.expected = expected
        self.got = got
        self.fix = fix
        super().__init__(f"expected {expected}, got {got}")


@attrs.frozen(kw_only=True)
class Line:
    """A sample as it is written: a text or a conversation, of each item its modality and what it is, and its weight."""

    text: str
    items: tuple[tuple[str, Reference], ...]
    weight: float | None = None
    conversation: Conversation | None = None


def parse_line(raw: bytes, where: str) -> Line:
    """Return the record of a line, of which ``where`` names file and number.

    Raises:
        LineError: it is not one JSON object with ``text`` or ``messages`` and, if it likes, items and a weight.
        DataError: its messages are no conversation.
    """
    try:
        value: Any = parse_json(raw)
    except UnicodeDecodeError as error:
        raise LineError(expected="UTF-8 text", got=f"something else ({error})", fix="Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        got = f"text that is not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        raise LineError(expected="one JSON object", got=got) from None
    except ValueError as error:  # a key twice, numbers too long, brackets too deep
        raise LineError(expected="one JSON object", got=f"text that is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise LineError(expected="one JSON object", got=_kind(value))
    for key in value:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            raise LineError(
                expected=f"only the keys {', '.join(map(repr, _KEYS))}",
                got=repr(key),
                fix=f"Did you mean {near[0]!r}?" if near else "Remove it.",
            )
    return _record(value, where)


def _record(value: dict[str, Any], where: str) -> Line:
    listed = tuple(_items(value))
    if "messages" not in value:
        if "tools" in value:
            raise LineError(expected="the key 'messages' beside 'tools'", got="none")
        return Line(text=_text(value), items=listed, weight=_weight(value))
    if "text" in value:
        raise LineError(expected="one of the keys 'text' and 'messages'", got="both")
    node = JsonNode(value, JsonSource(where=where, error=DataError))
    conversation = parse_conversation(node["messages"], node["tools"] if "tools" in value else None)
    try:
        items = tuple(conversation.items(listed))
    except ValueError as error:
        fix = "Name all of them in messages."
        raise LineError(expected="the items of a modality in one place", got=str(error), fix=fix) from None
    return Line(text="", items=items, weight=_weight(value), conversation=conversation)


def _text(record: dict[str, Any]) -> str:
    if "text" not in record:
        fix = 'Write {"images": [...], "text": "..."} or {"messages": [...]}.'
        raise LineError(expected="the key 'text' or 'messages'", got="none", fix=fix)
    text = record["text"]
    if not isinstance(text, str):
        raise LineError(expected="text in 'text'", got=_kind(text))
    if not text.strip():
        raise LineError(expected="text in 'text'", got="none", fix="Leave out samples without text.")
    return text


def _items(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, modality in _LISTS.items():
        for path in _paths(record.get(key, []), key):
            yield modality, path
    others = record.get("items", {})
    if not isinstance(others, dict):
        raise LineError(expected="an object of modalities in 'items'", got=_kind(others))
    for modality, paths in others.items():
        for key, own in _LISTS.items():
            if modality == own:
                raise LineError(expected=f"items of modality {own!r} in {key!r}", got="some in 'items'")
        for path in _paths(paths, f"items.{modality}"):
            yield modality, path


def _paths(paths: Any, key: str) -> list[str]:
    if not isinstance(paths, list):
        raise LineError(expected=f"a list of paths in {key!r}", got=_kind(paths))
    for path in paths:
        if not isinstance(path, str) or not path or len(path) > _MAX_PATH:
            raise LineError(expected=f"paths in {key!r}", got=_kind(path))
    return paths


def _weight(record: dict[str, Any]) -> float | None:
    if "weight" not in record:
        return None
    weight = record["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
        raise LineError(
            expected=f"a number from 0 to {MAX_WEIGHT:.2g} in 'weight'",
            got=_kind(weight),
            fix="It is how much each token of the sample counts; without it, that is 1.",
        )
    return float(weight)


def _kind(value: Any) -> str:
    """Return a JSON value's kind and start, for a message."""
    kinds = {dict: "an object", list: "a list", str: "the text", bool: "", int: "the number", float: "the number"}
    shown = json.dumps(value)
    limit = 40
    return f"{kinds.get(type(value), '')} {shown if len(shown) <= limit else shown[:limit] + '…'}".strip()

"""A row of a table as a record: what the field writes into columns, in the words of one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo.data import Record, RecordError, named_messages, read_record
from mimo.hooks import parse_json


def record_of(values: Mapping[str, Any], items: Mapping[str, Any], prefix: str, where: str) -> Record:
    """Return the record of a row.

    Args:
        values: of its columns by key of a record; null is as if the column were not there.
        items: of its columns by modality.
        prefix: what its text begins with.
        where: its place, for messages.

    Raises:
        RecordError: it is none.
        DataError: its messages are no conversation.
    """
    record: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    if isinstance(record.get("text"), str):
        record["text"] = prefix + record["text"]
    for key in ("messages", "tools", "roles"):
        if isinstance(record.get(key), str):
            record[key] = _parsed(record[key], key)
    if "messages" in record:
        record["messages"] = _messages(record["messages"])
    if not record.get("tools", True):  # a list without any
        del record["tools"]
    for key in ("images", "audio"):
        if key in record:
            record[key] = _items(record[key], key)
    if others := {modality: _items(value, modality) for modality, value in items.items() if value is not None}:
        record["items"] = others
    return read_record(record, where)


def _parsed(text: str, key: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise RecordError(expected=f"JSON in {key!r}, since it is a text", got=f"something else ({error})") from None


def _messages(value: Any) -> Any:
    if isinstance(value, dict):  # a list for each key, as `datasets` stored lists of structs
        if not all(isinstance(column, list) for column in value.values()):
            raise RecordError(expected="a list in 'messages'", got=f"a struct of {', '.join(map(repr, value))}")
        lengths = {len(column) for column in value.values()}
        if len(lengths) != 1:
            got = f"{', '.join(map(str, sorted(lengths)))} of them"
            raise RecordError(expected="as many values of each key in 'messages'", got=got)
        value = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
        value = [{key: each for key, each in message.items() if each is not None} for message in value]
    value = named_messages(value)
    return [_message(message) for message in value] if isinstance(value, list) else value


def _message(message: Any) -> Any:
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        return message | {"content": [_part(part) for part in message["content"]]}
    return message


def _part(part: Any) -> Any:
    """Return a part of a content, with the bytes or path of an image in place of the struct of both."""
    if not isinstance(part, dict):
        return part
    return {key: _bytes_or_path(value) if _is_item(value) else value for key, value in part.items()}


def _items(value: Any, key: str) -> list[Any]:
    return [_item(each, key) for each in (value if isinstance(value, list) else [value])]


def _item(value: Any, key: str) -> Any:
    if value is None:
        raise RecordError(expected=f"items in {key!r}", got="null among them")
    if isinstance(value, dict) and not _is_item(value):
        got = f"a struct of {', '.join(map(repr, value)) or 'nulls'}"
        raise RecordError(expected=f"bytes or a path in {key!r}", got=got)
    return _bytes_or_path(value)


def _is_item(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and value.keys() <= {"bytes", "path"}


def _bytes_or_path(value: Any) -> Any:
    return value.get("bytes", value.get("path")) if isinstance(value, dict) else value

"""One line of a jsonl dataset, from bytes to a checked record."""

from __future__ import annotations

import difflib
import json
from typing import Any

import attrs

_KEYS = ("images", "text")


class LineError(ValueError):
    """What is wrong with a line, without its place, which only the dataset knows."""

    def __init__(self, *, expected: str, got: str, fix: str = "") -> None:
        self.expected = expected
        self.got = got
        self.fix = fix
        super().__init__(f"expected {expected}, got {got}")


@attrs.frozen(kw_only=True)
class Line:
    """A sample as it is written: its text, and its image paths as they stand."""

    text: str
    images: tuple[str, ...]


def parse_line(raw: bytes) -> Line:
    """Return the record of a line.

    Raises:
        LineError: it is not one JSON object with ``text`` and, if it likes, ``images``.
    """
    try:
        value: Any = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise LineError(expected="UTF-8 text", got=f"something else ({error})", fix="Save the file as UTF-8.") from None
    except LineError:
        raise
    except json.JSONDecodeError as error:
        got = f"text that is not JSON ({error.msg} at column {error.colno})"
        raise LineError(expected="one JSON object", got=got) from None
    except (ValueError, RecursionError) as error:  # numbers too long, brackets too deep
        raise LineError(expected="one JSON object", got=f"text that is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise LineError(expected="one JSON object", got=_kind(value))
    for key in value:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            raise LineError(
                expected="only the keys 'images' and 'text'",
                got=repr(key),
                fix=f"Did you mean {near[0]!r}?" if near else "Remove it.",
            )
    return Line(text=_text(value), images=_images(value))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise LineError(expected="each key once", got=f"{twice!r} twice")
    return record


def _text(record: dict[str, Any]) -> str:
    if "text" not in record:
        raise LineError(expected="the key 'text'", got="none", fix='Write {"images": [...], "text": "..."}.')
    text = record["text"]
    if not isinstance(text, str):
        raise LineError(expected="text in 'text'", got=_kind(text))
    if not text.strip():
        raise LineError(expected="text in 'text'", got="none", fix="Leave out samples without text.")
    return text


def _images(record: dict[str, Any]) -> tuple[str, ...]:
    images = record.get("images", [])
    if not isinstance(images, list):
        raise LineError(expected="a list of paths in 'images'", got=_kind(images))
    for image in images:
        if not isinstance(image, str) or not image:
            raise LineError(expected="paths in 'images'", got=_kind(image))
    return tuple(images)


def _kind(value: Any) -> str:
    """Return a JSON value's kind and start, for a message."""
    kinds = {dict: "an object", list: "a list", str: "the text", bool: "", int: "the number", float: "the number"}
    shown = json.dumps(value)
    limit = 40
    return f"{kinds.get(type(value), '')} {shown if len(shown) <= limit else shown[:limit] + '…'}".strip()

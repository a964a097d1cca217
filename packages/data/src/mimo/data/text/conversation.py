"""Conversations as the field writes them: ``[{"role": "user", "content": "…"}, …]``, from JSON to checked messages."""

from __future__ import annotations

import base64
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from mimo.data.text.placeholders import mark
from mimo.hooks import ItemRole, JsonNode

_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://|(?:data|file):", re.IGNORECASE)
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of what is thought before an answer; templates read the first, or the second."""
_REFERENCES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "image": ("image", ("image", "path", "url")),
    "image_url": ("image", ("image_url",)),
    "audio": ("audio", ("audio", "path", "url")),
    "audio_url": ("audio", ("audio_url",)),
    "input_audio": ("audio", ("input_audio",)),
}
"""For the type of a part its modality, and the keys that may say where its item is."""
_TEXTS = ("text", "input_text", "output_text")
_IGNORED = frozenset({"id", "tool_call_id"})
"""Keys of a message that a template may leave unread."""
_ITEM_ROLES: tuple[ItemRole, ...] = ("input", "output", "both")

Reference: TypeAlias = "str | bytes"
"""A path as it is written, or the bytes of an item: of a data URL, or of a source that holds them."""


@attrs.frozen
class ItemPart:
    """An item within a message: its modality, and where it is; None where it is the next of the sample's own lists."""

    modality: str
    reference: Reference | None = None
    role: ItemRole = ""


@attrs.frozen
class RecordItem:
    """An item of a record: its modality, where it is, and what the model does with it, see `mimo.hooks.ItemInfo`."""

    modality: str
    reference: Reference
    role: ItemRole = ""


@attrs.frozen(kw_only=True)
class Message:
    """What one speaker says.

    Args:
        role: ``system``, ``user``, ``assistant``, ``tool``, or what else the template knows.
        parts: texts and items in order.
        listed: whether the content is written as a list of parts.
        says: whether it has a content; calls of tools need none.
        others: the other keys of the message, as they are written.
    """

    role: str
    parts: tuple[str | ItemPart, ...]
    listed: bool = False
    says: bool = True
    others: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def text(self) -> str:
        """Return the content as one text, with a placeholder for each item."""
        return "".join(part if isinstance(part, str) else mark(part.modality) for part in self.parts)

    @property
    def structured(self) -> list[dict[str, str]]:
        """Return the content as a list of parts, as templates of models for several modalities read it."""
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.modality} for part in self.parts
        ]


@attrs.frozen(kw_only=True)
class Conversation:
    """The messages of a sample, and the tools that it describes."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        """Return what a template must read beside roles and contents."""
        found = {key for message in self.messages for key in message.others} - _IGNORED
        if found & set(_REASONING):  # it is given under two names
            found = found - set(_REASONING) | {"reasoning_content"}
        return frozenset(found | ({"tools"} if self.tools else set()))

    @property
    def parts(self) -> Iterator[str | ItemPart]:
        """Return the texts and items of all messages, in order."""
        return (part for message in self.messages for part in message.parts)

    def items(self, listed: Sequence[RecordItem]) -> list[RecordItem]:
        """Return the items in the order of their placeholders, per modality.

        Args:
            listed: the items of the sample that no message names; ``<image>`` in a text, or a part of a message that
                doesn't say where its item is, stands for the next of them. Such a part may say its role.

        Raises:
            ValueError: some of a modality are listed, and others are named by messages.
        """
        waiting: dict[str, list[RecordItem]] = {}
        for item in listed:
            waiting.setdefault(item.modality, []).append(item)
        found: list[RecordItem] = []
        named = {part.modality for part in self.parts if isinstance(part, ItemPart) and part.reference is not None}
        if mixed := next((item.modality for item in listed if item.modality in named), None):
            msg = f"items of modality {mixed!r} both in messages and in a list of the sample, whose order is not known"
            raise ValueError(msg)
        for part in self.parts:
            if isinstance(part, str):
                for modality, items in waiting.items():
                    count = part.count(mark(modality))
                    found += items[:count]
                    del items[:count]
            elif part.reference is not None:
                found.append(RecordItem(part.modality, part.reference, part.role))
            elif items := waiting.get(part.modality, []):
                item = items.pop(0)
                found.append(attrs.evolve(item, role=part.role or item.role))
        return [*found, *(item for items in waiting.values() for item in items)]


def parse_conversation(messages: JsonNode, tools: JsonNode | None = None) -> Conversation:
    """Return a checked conversation.

    Raises:
        UserError: of the node's class; a message has no role or no content, or an item is none that can be read.
    """
    found = tuple(map(_message, messages.list()))
    if not found:
        raise messages.fail("at least one message")
    return Conversation(messages=found, tools=() if tools is None else tuple(node.value for node in tools.list()))


def read_role(node: JsonNode) -> ItemRole:
    """Return what the model does with an item: ``input``, ``output`` or ``both``.

    Raises:
        UserError: of the node's class; it is none of these.
    """
    for role in _ITEM_ROLES:
        if node.value == role:
            return role
    near = difflib.get_close_matches(node.value, _ITEM_ROLES, n=1) if isinstance(node.value, str) else []
    fix = f"Did you mean {near[0]!r}?" if near else ""
    raise node.fail(f"one of the roles {', '.join(map(repr, _ITEM_ROLES))}", fix)


def rename_items(messages: JsonNode, rename: Callable[[str], str]) -> list[Any]:
    """Return messages as they are written, with other paths of their items; data URLs stay.

    Args:
        messages: see `parse_conversation`.
        rename: of a path returns the other one.

    Raises:
        UserError: of the node's class; a part of a message is none.
    """
    found = []
    for message in messages.list():
        content = dict(message.items()).get("content")
        if content is None or not isinstance(content.value, list):
            found.append(message.value)
        else:
            found.append({**message.value, "content": [_renamed(part, rename) for part in content.list()]})
    return found


def _renamed(part: JsonNode, rename: Callable[[str], str]) -> Any:
    found = _part(part)
    if not isinstance(found, ItemPart) or not isinstance(found.reference, str):
        return part.value
    _, keys = _REFERENCES.get(part["type"].text(), (found.modality, (found.modality, "path", "url")))
    key = next(key for key in keys if key in part.value)
    name, given = rename(found.reference), part.value[key]
    return {**part.value, key: {**given, "url": name} if isinstance(given, dict) else name}


def _message(node: JsonNode) -> Message:
    fields = dict(node.items())
    role = node["role"].text()
    if not role:
        raise node["role"].fail("a role, such as 'user' or 'assistant'")
    others = {key: each.value for key, each in fields.items() if key not in ("role", "content")}
    others = {key: value for key, value in others.items() if value is not None}
    reasoning = next((others[key] for key in _REASONING if key in others), None)
    if reasoning is not None:
        others = {"thinking": reasoning, **others, "reasoning_content": reasoning}
        others.pop("reasoning", None)
    content = fields.get("content")
    if content is None or content.value is None:
        if not others.get("tool_calls"):
            raise node.fail("a message with 'content'")
        return Message(role=role, parts=(), says=False, others=others)
    if isinstance(content.value, str):
        return Message(role=role, parts=(content.value,), others=others)
    if not isinstance(content.value, list):
        raise content.fail("a text or a list of parts")
    return Message(role=role, parts=tuple(map(_part, content.list())), listed=True, others=others)


def _part(node: JsonNode) -> str | ItemPart:
    if isinstance(node.value, str):
        return node.value
    kind = node["type"].text()
    if not kind:
        raise node["type"].fail("the type of a part, such as 'text' or 'image'")
    if kind in _TEXTS:
        return dict(node.fields(("type", "text")))["text"].text()
    modality, keys = _REFERENCES.get(kind, (kind, (kind, "path", "url")))
    fields = node.fields(("type",), (*keys, "detail", "role"))
    given = [fields[key] for key in keys if key in fields]
    if len(given) > 1:
        raise node.fail(f"one of the keys {', '.join(keys)}")
    role = read_role(fields["role"]) if "role" in fields else ""
    return ItemPart(modality, _reference(given[0]) if given else None, role)


def _reference(node: JsonNode) -> Reference:
    if isinstance(node.value, bytes):
        return node.value
    if isinstance(node.value, dict):
        if "data" in node.value:  # {"data": base64, "format": "wav"}
            return _decoded(node["data"], node.fields(("data",), ("format",))["data"].text())
        node = node.fields(("url",), ("detail",))["url"]
    text = node.text()
    if found := _DATA_URL.match(text):
        return _decoded(node, text[found.end() :])
    if _SCHEME.match(text):
        raise node.fail("a path inside the folder of the data, or a data URL in base64; nothing is fetched")
    if not text:
        raise node.fail("a path")
    return text


def _decoded(node: JsonNode, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # of binascii, or of letters that are not ASCII
        raise node.fail("base64 without white space") from None

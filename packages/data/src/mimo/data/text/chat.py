"""Conversations to tokens: which of them are learnt, and where a conversation may be cut."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, Protocol, cast, runtime_checkable

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.samples import Tokenizer
from mimo.data.text.chat_template import ChatTemplate, named_template, named_templates
from mimo.data.text.conversation import Conversation, Message
from mimo.data.text.limited import LimitedTokenizer
from mimo.data.text.render import Rendered, Renderer, RenderError, RenderLimitError
from mimo.hooks import ConfigError

OWN = "own"
"""The template that lies beside the tokenizer's file."""
_USER, _ASSISTANT = "user", "assistant"
_SYSTEM = ("system", "developer")
_ROLES = (*_SYSTEM, _USER, _ASSISTANT, "tool")
"""Those that a role of another spelling may mean."""
_NEAR = 0.8
"""From which ratio of `difflib` on a role is one of these, misspelt."""
_PROBE = "a text that no template has: 7f3b"
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


@attrs.frozen(kw_only=True)
class ChatSettings:
    """Settings of ``[data.chat]``, for samples that are conversations.

    Args:
        template: ``own``, which lies beside the tokenizer's file, or the name of one that comes with this package.
        system: what a conversation without a system text begins with; empty for nothing.
        learn: the turns whose tokens are learnt: all of the ``assistant``'s, the ``last`` of these, or ``all`` turns.
        cut: what is left out at the end of a conversation that is too long: whole ``turns``, or ``tokens``.
    """

    template: str = attrs.field(default=OWN)
    system: str = ""
    learn: Literal["assistant", "last", "all"] = "assistant"
    cut: Literal["turns", "tokens"] = "turns"

    @template.validator
    def _check_template(self, _attribute: Any, value: str) -> None:
        if value not in (names := [OWN, *named_templates()]):
            msg = f"expected {', '.join(map(repr, names[:-1]))} or {names[-1]!r}, got {value!r}"
            raise ValueError(msg)


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that can take conversations."""

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``text``, and of each the letters of ``text`` that it stands for, begin and end.

        Raises:
            ValueError: as from ``encode``.
        """


@attrs.frozen(kw_only=True, eq=False)
class ChatTokens:
    """A conversation as the language model sees it.

    Args:
        ids: of all turns, with a placeholder id for each item.
        weights: of each id, how much it is learnt: 1 or 0; None where all are.
        ends: numbers of ids after which a turn has ended, ascending, the last one all of them; None where any id may
            be the last.
    """

    ids: list[int]
    weights: NDArray[np.float32] | None
    ends: tuple[int, ...] | None


class ChatError(ValueError):
    """A conversation that the template or the tokenizer refuses."""


class Chat:
    """Encodes conversations for a tokenizer; its template runs in a child process.

    Args:
        settings: of the source.
        tokenizer: whose ids to return.

    Raises:
        ConfigError: the tokenizer has no template of its own, or can't say which letters a token stands for.
    """

    def __init__(self, settings: ChatSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        inner = tokenizer.inner if isinstance(tokenizer, LimitedTokenizer) else tokenizer
        if not (isinstance(tokenizer, ChatTokenizer) and isinstance(inner, ChatTokenizer)):
            raise ConfigError(
                "tokenizer.plugin",
                expected="a tokenizer with encode_spans(), since samples are conversations",
                got=type(inner).__name__,
            )
        self._tokenizer = tokenizer
        self._template = _template(settings, tokenizer)
        self._given = {**self._template.variables, "tools": None, "documents": None, "add_generation_prompt": False}
        self._renderer = Renderer(self._template.source)
        self._marks = _GENERATION.search(_COMMENT.sub("", self._template.source)) is not None
        self._takes: tuple[bool, bool] | ValueError | None = None

    def encode(self, conversation: Conversation) -> ChatTokens:
        """Return the tokens of a conversation.

        Raises:
            ChatError: saying what of the conversation the template or the tokenizer refuses.
        """
        self._check_keys(conversation)
        self._check_roles(conversation)
        messages = self._with_system(conversation.messages)
        try:
            text, learnt, turns = self._render(messages, conversation.tools)
            ids, spans = self._tokenizer.encode_spans(text)
        except RenderError as error:
            raise self._refusal(error) from error
        except ChatError:
            raise
        except ValueError as error:  # the tokenizer's
            raise ChatError(str(error)) from error
        starts, stops = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        ends = None
        if self._settings.cut == "turns":
            found = (_boundary(starts, stops, place) for place in turns)
            ends = tuple(sorted({*(end for end in found if end is not None), len(ids)}))
        return ChatTokens(ids=ids, weights=self._weights(learnt, starts, stops), ends=ends)

    def ask(self, turns: Sequence[str]) -> str:
        """Return the text of a conversation, ending with what asks for the assistant's next answer.

        Args:
            turns: what the user and the assistant say by turns; the user says the first and the last.

        Raises:
            ChatError: there is an even number of turns, or the template refuses them.
        """
        if len(turns) % 2 == 0:
            msg = f"{len(turns)} turns, of which the user would not say the first and the last"
            raise ChatError(msg)
        said = (Message(role=(_USER, _ASSISTANT)[index % 2], parts=(turn,)) for index, turn in enumerate(turns))
        return self.open(Conversation(messages=tuple(said)))

    def open(self, conversation: Conversation) -> str:
        """Return the text of a conversation, ending with what asks for the assistant's next answer.

        Raises:
            ChatError: the assistant has said the last of it, or the template refuses it.
        """
        self._check_keys(conversation)
        self._check_roles(conversation)
        if conversation.messages[-1].role == _ASSISTANT:
            msg = f"the last message has the role {_ASSISTANT!r}, so that nothing is asked"
            raise ChatError(msg)
        try:
            messages = [self._written(message) for message in self._with_system(conversation.messages)]
            given = {**self._given, "messages": messages, "tools": list(conversation.tools) or None}
            return self._renderer.render({**given, "add_generation_prompt": True}).text
        except RenderError as error:
            raise self._refusal(error) from error

    def _check_keys(self, conversation: Conversation) -> None:
        for key in sorted(conversation.keys):
            if not re.search(rf"\b{re.escape(key)}\b", self._template.source):
                msg = f"the template {self._template.name!r} does not read {key!r}; choose another, or leave it out"
                raise ChatError(msg)

    def _check_roles(self, conversation: Conversation) -> None:
        """Refuse a role that is another one, misspelt: templates write any, and learn nothing of it."""
        for index, message in enumerate(conversation.messages):
            near = _meant_role(message.role)
            if near and not any(f"{quote}{message.role}{quote}" in self._template.source for quote in "'\""):
                msg = f"message {index} has the role {message.role!r}, which the template {self._template.name!r} "
                raise ChatError(f"{msg}does not name; did you mean {near!r}?")

    def _refusal(self, error: RenderError) -> ChatError:
        return ChatError(f"the template {self._template.name!r} refuses it: {error}")

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not self._settings.system or any(message.role in _SYSTEM for message in messages):
            return messages
        return (Message(role="system", parts=(self._settings.system,)), *messages)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[str, list[tuple[int, int]] | None, list[int]]:
        """Return the text, what of it is learnt, None for all, and where turns end."""
        written = [self._written(message) for message in messages]
        answers = [index for index, message in enumerate(messages) if message.role == _ASSISTANT]
        if not answers and self._settings.learn != "all":
            roles = ", ".join(repr(role) for role in dict.fromkeys(message.role for message in messages))
            msg = f"no message has the role {_ASSISTANT!r}, so nothing would be learnt; there are {roles}"
            raise ChatError(msg)
        if self._settings.learn == "last":
            answers = answers[-1:]
        asks = [] if self._marks or self._settings.learn == "all" else answers
        firsts = [*((count, False) for count in range(1, len(written))), *((index, True) for index in asks)]
        given = {**self._given, "tools": list(tools) or None}
        found = self._renderer.render({**given, "messages": written}, firsts)
        text = found.text
        ends = [0, *found.firsts[: len(written) - 1], len(text)]
        turns = [end for end in ends[1:] if end is not None]
        if self._settings.learn == "all":
            return text, None, turns
        if self._marks:
            first = ends[answers[0]] if answers and self._settings.learn == "last" else 0
            if first is None:
                raise ChatError(self._unstable(answers[0]))
            return text, [(begin, end) for begin, end in _generated(found) if begin >= first], turns
        learnt = []
        for index, begin in zip(answers, found.firsts[len(written) - 1 :], strict=True):
            end = ends[index + 1]
            if begin is None or end is None or begin > end:
                raise ChatError(self._unstable(index))
            learnt.append((begin, end))
        return text, learnt, turns

    def _unstable(self, index: int) -> str:
        return (
            f"the template {self._template.name!r} writes the turns up to message {index} otherwise where others "
            "follow, so what the model is to write can't be found; choose a template with {% generation %}, "
            'or set learn = "all"'
        )

    def _weights(
        self, learnt: Sequence[tuple[int, int]] | None, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> NDArray[np.float32] | None:
        if learnt is None:
            return None
        weights = np.zeros(len(starts), dtype=np.float32)
        for begin, end in learnt:
            if begin == end:
                continue
            first, last = int(np.searchsorted(stops, begin, side="right")), int(np.searchsorted(starts, end))
            if not self._marks and first < last and (starts[first] < begin or stops[last - 1] > end):
                msg = "a token stands for letters on both sides of the begin or the end of an answer"
                raise ChatError(msg)
            weights[first:last] = 1
        return weights

    def _written(self, message: Message) -> dict[str, Any]:
        """Return a message as the template takes it."""
        if self._takes is None:
            try:
                self._takes = self._probe()
            except (ChatError, RenderError) as error:
                self._takes = error
        if isinstance(self._takes, ValueError):  # of the template, so that no other conversation is tried
            raise self._takes.with_traceback(None)
        texts, parts = self._takes
        listed = parts and (message.listed or not texts)
        content: Any = message.structured if listed else message.text
        return {"role": message.role, **({"content": content} if message.says else {}), **message.others}

    def _probe(self) -> tuple[bool, bool]:
        """Return whether the template writes a content that is a text, and one that is a list of parts.

        Raises:
            ChatError: it writes neither.
            RenderError: it refuses a few short conversations.
        """
        refusals: list[RenderError] = []
        takes = self._writes(_PROBE, refusals), self._writes([{"type": "text", "text": _PROBE}], refusals)
        if any(takes):
            return takes
        if refusals:
            raise refusals[0]
        msg = f"the template {self._template.name!r} writes neither a text nor a list of parts of a message"
        raise ChatError(msg)

    def _writes(self, content: Any, refusals: list[RenderError]) -> bool:
        """Return whether the template writes a content in one of a few short conversations; add those it refuses."""
        user, system, answer = ({"role": role, "content": content} for role in (_USER, "system", _ASSISTANT))
        for messages in ([user], [user, answer], [system, user], [system, user, answer]):
            try:
                text = self._renderer.render({**self._given, "messages": messages}).text
            except RenderLimitError:
                raise
            except RenderError as error:
                refusals.append(error)
                continue
            if _PROBE in text:
                return "'text'" not in text and '"text"' not in text  # else it is Python's own picture of a list
        return False


def _meant_role(role: str) -> str:
    """Return the usual role that one is, misspelt or in other letters; empty where it is none, or a longer name."""
    plain = role.strip().lower()
    if role in _ROLES or any(known in plain and known != plain for known in _ROLES):
        return ""
    return next(iter(difflib.get_close_matches(plain, _ROLES, n=1, cutoff=_NEAR)), "")


def template_source(settings: ChatSettings, tokenizer: Tokenizer) -> tuple[str, Mapping[str, str]] | None:
    """Return the template that conversations are written by, and what it is given; None if there is none."""
    found = _find_template(settings, tokenizer)
    return None if found is None else (found.source, found.variables)


def _find_template(settings: ChatSettings, tokenizer: Tokenizer) -> ChatTemplate | None:
    if settings.template != OWN:
        return named_template(settings.template)
    own = getattr(tokenizer, "chat_template", None)
    return cast("ChatTemplate | None", own()) if own is not None else None


def _template(settings: ChatSettings, tokenizer: Tokenizer) -> ChatTemplate:
    found = _find_template(settings, tokenizer)
    if found is None:
        raise ConfigError(
            "data.chat.template",
            expected="the name of a template, since samples are conversations and the tokenizer has none of its own",
            got=repr(OWN),
            fix=f"Set it to one of {', '.join(named_templates())}, or lay chat_template.jinja beside the tokenizer.",
        )
    return found


def _generated(found: Rendered) -> Iterator[tuple[int, int]]:
    """Yield begin and end of what the model is to write."""
    ends = accumulate(len(text) for text, _ in found.pieces)
    for (text, generated), end in zip(found.pieces, ends, strict=True):
        if generated:
            yield end - len(text), end


def _boundary(starts: NDArray[np.int64], stops: NDArray[np.int64], place: int) -> int | None:
    """Return how many tokens stand for the letters before a place; None where one stands for letters on both sides."""
    count = int(np.searchsorted(stops, place, side="right"))
    return None if count < len(starts) and starts[count] < place else count

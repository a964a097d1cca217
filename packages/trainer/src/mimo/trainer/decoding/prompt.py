"""Prompts: a text with placeholders, and an item for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mimo.data import Chat, ChatError, ChatSettings, Dataset, SampleLayout, Tokenizer
from mimo.hooks import ConfigError, DataError, ItemInfo, UserError
from mimo.model import EncoderSpec
from mimo.trainer.config.structure import structure
from mimo.trainer.items.finite_items import finite_item
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.job.measured_dataset import decoded

_FLAGS = ("image", "audio")
"""Modalities that have an option of their own."""


def flag(modality: str) -> str:
    """Return the option by which `mimo generate` takes items of a modality."""
    return f"--{modality}" if modality in _FLAGS else f"--item {modality}=FILE"


@attrs.frozen(kw_only=True)
class Prompt:
    """One unfinished sample: a text with placeholders, and raw items for them by modality; a `mimo.data.Dataset`."""

    tokenizer: Tokenizer
    text: str
    items: Sequence[tuple[ItemInfo, Any]]

    def __len__(self) -> int:
        """Return 1."""
        return 1

    def tokens(self, _sample: int) -> Sequence[int]:
        """Return the text's ids, open at the end."""
        try:
            return self.tokenizer.encode(self.text)
        except ValueError as error:
            raise ConfigError("--text", expected="text that the tokenizer can write", got=str(error)) from error

    def infos(self, _sample: int) -> Sequence[ItemInfo]:
        """Return the items."""
        return [info for info, _ in self.items]

    def raw(self, _sample: int, index: int) -> Any:
        """Return an item."""
        return self.items[index][1]

    def where(self, _sample: int) -> str:
        """Name the prompt in messages."""
        return "the prompt"


@attrs.frozen(kw_only=True)
class WithItem:
    """The items of a sequence, and one more that was made behind them.

    Args:
        inner: has the others.
        index: of this one.
        item: raw.
    """

    inner: Dataset
    index: int
    item: Any

    def __len__(self) -> int:
        """Return as many samples as there were."""
        return len(self.inner)

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of the prompt."""
        return self.inner.tokens(sample)

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the items of the prompt."""
        return self.inner.infos(sample)

    def raw(self, sample: int, index: int) -> Any:
        """Return an item."""
        return self.item if index == self.index else self.inner.raw(sample, index)

    def where(self, sample: int) -> str:
        """Name the prompt in messages."""
        return self.inner.where(sample)


def measured_item(module: JobModule, raw: Any) -> tuple[int, ...]:
    """Return the size of an item as its encoder measures it."""
    assert isinstance(module.spec, EncoderSpec)
    return tuple(module.spec.measure(raw))


def prompt_of(job: Job, text: str, raws: Mapping[str, Sequence[Any]] | None = None) -> Prompt:
    """Return a prompt of ``text`` and raw items; an empty text is one placeholder for each item.

    Args:
        job: of the model that continues it.
        text: with a placeholder ``<modality>`` for each item, in any order.
        raws: for each modality its items in the order of their placeholders: what the datasets of its encoder give,
            or the path of a file.

    Raises:
        ConfigError: no encoder reads a modality, or not this item.
    """
    items: list[tuple[ItemInfo, Any]] = []
    marks = []
    for modality, given in (raws or {}).items():
        encoder = _encoder(job, modality)
        for raw in given:
            size, read = _read(encoder, raw)
            items.append((ItemInfo(sample=0, index=len(items), modality=modality, size=size), read))
            marks.append(f"<{modality}>")
    return Prompt(tokenizer=job.tokenizer, text=text or "".join(marks), items=items)


def chat_text(job: Job, turns: Sequence[str], raws: Mapping[str, Sequence[Any]] | None = None) -> str:
    """Return the text of a prompt that asks for the next answer in a conversation, by the chat template of the data.

    Args:
        job: of the model that answers.
        turns: what the user and the assistant say by turns, the user first and last; if none of them has a placeholder
            for an item, the items come first.
        raws: the items, see `prompt_of`.

    Raises:
        ConfigError: the job's data has no chat template, or not one alone, or the template refuses the turns.
    """
    marks = [f"<{modality}>" for modality, given in (raws or {}).items() for _ in given]
    if not any(mark in turn for mark in marks for turn in turns):
        turns = ["".join([*marks, turns[0]]), *turns[1:]] if turns else []
    try:
        return chat_of(job, "--message", "Write the prompt with --text, as the template would.").ask(turns)
    except ChatError as error:
        raise ConfigError("--message", expected="turns that the chat template takes", got=str(error)) from error


def chat_of(job: Job, where: str, fix: str) -> Chat:
    """Return what writes conversations as the job's data does.

    Args:
        job: of the model that answers.
        where: names the option that has a conversation, in errors.
        fix: what to do instead.

    Raises:
        ConfigError: the job's data has no chat template, or not one alone.
    """
    data = job.plain["data"]
    sources = data.get("sources", {})
    tables = {f"data.sources.{name}.chat": source["chat"] for name, source in sources.items() if "chat" in source}
    tables |= {"data.chat": data["chat"]} if "chat" in data else {}
    found = {place: structure(table, ChatSettings, place) for place, table in tables.items()}
    ways = {(settings.template, settings.system) for settings in found.values()}
    if len(ways) != 1:
        raise ConfigError(
            where,
            expected="one chat template in the settings of the data",
            got=", ".join(f"{place}.template = {found[place].template!r}" for place in found) or "none",
            fix=fix,
        )
    return Chat(next(iter(found.values())), job.tokenizer)


def lay_out_prompt(job: Job, prompt: Dataset, sample: int = 0) -> SampleLayout:
    """Return where every token and item of a prompt lies.

    Args:
        job: of the model that continues it.
        prompt: a `Prompt`, or a dataset of prompts.
        sample: which of them.

    Raises:
        ConfigError: it is empty or too long, or its placeholders are not those of its items.
    """
    if isinstance(prompt, Prompt):
        _check_placeholders(job, prompt)
    try:
        layout = job.lay_out(prompt, sample)
    except DataError as error:
        raise ConfigError(error.where, expected=error.expected, got=error.got, fix=error.fix) from error
    limit, where = job.settings.data.max_tokens, prompt.where(sample)
    if layout.truncated:
        raise ConfigError(
            where,
            expected=f"at most data.max_tokens = {limit} tokens, rows of items included",
            got="more",
            fix="Shorten it; what is written after it may be longer.",
        )
    if not len(layout.tokens):
        raise ConfigError(where, expected="at least one token", got="none", fix="Give a text or an item.")
    return layout


def _check_placeholders(job: Job, prompt: Prompt) -> None:
    ids = list(prompt.tokens(0))
    for module in job.encoders_of(job.language):
        marks = ids.count(job.tokenizer.placeholder(module.modality))
        items = sum(info.modality == module.modality for info in prompt.infos(0))
        if marks != items:
            raise ConfigError(
                "the prompt",
                expected=f"one <{module.modality}> in the text for each item of {flag(module.modality)}",
                got=f"{marks} for {items} item{'' if items == 1 else 's'}",
                fix="Write it where the item belongs, in the order in which they are given.",
            )


def prepared_item(module: JobModule, prompt: Dataset, info: ItemInfo) -> Mapping[str, Any]:
    """Return what an encoder computes on of an item.

    Raises:
        UserError: it is broken behind its header.
    """
    assert isinstance(module.spec, EncoderSpec)
    try:
        return finite_item(module.spec.prepare(module.config, prompt.raw(info.sample, info.index)))
    except (ValueError, TypeError, OSError) as error:
        raise _unreadable(module, error, None if isinstance(prompt, Prompt) else prompt.where(info.sample)) from error


def _encoder(job: Job, modality: str) -> JobModule:
    for module in job.encoders_of(job.language):
        if module.modality == modality:
            return module
    known = [flag(module.modality) for module in job.encoders_of(job.language)]
    raise ConfigError(
        flag(modality),
        expected="a model that reads it",
        got=f"no encoder of {modality!r}",
        fix=f"This one takes {' and '.join(known)}." if known else "This one reads text alone.",
    )


def _read(module: JobModule, raw: Any) -> tuple[tuple[int, ...], Any]:
    """Return an item's size, and the item as datasets give it."""
    assert isinstance(module.spec, EncoderSpec)
    try:
        read = decoded(module.spec, raw)
        return tuple(module.spec.measure(read)), read
    except (ValueError, TypeError, OSError) as error:
        raise _unreadable(module, error) from error


def _unreadable(module: JobModule, error: Exception, where: str | None = None) -> UserError:
    """Return the error of an item, at its place or, without one, the option by which it was given."""
    if isinstance(error, UserError):
        return error
    return ConfigError(
        where or flag(module.modality),
        expected=f"what encoder {module.spec.name!r} can read",
        got=f"something else: {error}",
    )

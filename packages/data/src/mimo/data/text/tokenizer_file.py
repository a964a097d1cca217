"""The file tokenizer: any ``tokenizer.json``, read by the `tokenizers` library, with its own ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from mimo.data.samples import TokenizerSpec
from mimo.data.text.chat_template import ChatTemplate, template_of_folder
from mimo.data.text.item_texts import ItemTexts
from mimo.data.text.placeholders import Placeholders, mark
from mimo.hooks import ConfigError

if TYPE_CHECKING:
    import tokenizers


@attrs.frozen(kw_only=True)
class FileConfig:
    """Settings of ``tokenizer.plugin = "file"``.

    Args:
        path: a ``tokenizer.json``; it must hold a token ``<modality>`` for each modality of the model.
        end: the token that closes every sample but conversations, which their templates close.
        placeholders: for modalities whose placeholder is another token than ``<modality>``, that token:
            ``{image = "<|image_pad|>"}``. In texts both stand for an item.
        markers: what else stands for an item in texts, such as what a chat template writes for it.
        items: for modalities whose items have text around them that the model was trained with, that text with the
            placeholder in it, once: ``{image = "<img><IMG_CONTEXT></img>"}``. It takes the place of ``<modality>`` and
            of the marker before a text becomes tokens.
    """

    path: str
    end: str = "</s>"
    placeholders: Mapping[str, str] = attrs.field(factory=dict)
    markers: Mapping[str, str] = attrs.field(factory=dict)
    items: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class FileTokenizer:
    """The library's tokenizer; what its file would add around a text (begin and end tokens) is left out."""

    path: str
    end: int
    placeholders: Placeholders
    backend: tokenizers.Tokenizer
    vocabulary: int
    texts: Mapping[str, str]
    """The token of each modality's placeholder."""
    aliases: Mapping[int, int]
    """The id that the library gives to ``<modality>`` where another token is the placeholder, and that token's."""
    markers: Mapping[str, str]
    """What else stands for an item of each modality."""
    replaced: ItemTexts
    """What takes the place of these before a text becomes tokens."""

    def placeholder(self, modality: str) -> int:
        """Return the id of a modality's placeholder; `ConfigError` where it has none."""
        return self.placeholders.id_of(modality)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``.

        Raises:
            ValueError: the library refuses the text, or the file's rules take a placeholder for text or the reverse.
        """
        return self._encoding(text)[0]

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of ``text``, and where the text of each begins and ends; errors as `encode`."""
        ids, encoding = self._encoding(text)
        return ids, self.replaced.spans_in(text, encoding.offsets)

    def item_texts(self, modality: str) -> tuple[str, ...]:
        """Return the texts that stand for one item."""
        marker = [self.markers[modality]] if modality in self.markers else []
        return tuple(dict.fromkeys((mark(modality), self.texts[modality], *marker)))

    def chat_template(self) -> ChatTemplate | None:
        """Return the template that lies beside the file, None if there is none."""
        return template_of_folder(Path(self.path).parent)

    def _encoding(self, text: str) -> tuple[list[int], tokenizers.Encoding]:
        with _refusals("the tokenizer refuses the text"):
            encoding = self.backend.encode(self.replaced.instead_of(text), add_special_tokens=False)
        ids: list[int] = [self.aliases.get(number, number) for number in encoding.ids] if self.aliases else encoding.ids
        for modality, number in self.placeholders.ids.items():
            texts = self.item_texts(modality)
            written, found = sum(map(text.count, texts)), ids.count(number)
            if written != found:
                said = " or ".join(texts)
                msg = f"{said} stands in the text {written} times but the tokenizer finds it {found} times"
                raise ValueError(msg)
        return ids, encoding

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, placeholders and other special tokens included; ids beyond the vocabulary vanish."""
        shown = [number for number in ids if number != self.end]
        try:
            with _refusals("its decoder fails"):
                text: str = self.backend.decode(shown, skip_special_tokens=False)
        except ValueError as error:
            raise _unusable(self.path, str(error)) from error
        return text


def build(config: FileConfig, modalities: Sequence[str]) -> FileTokenizer:
    """Return the tokenizer; see `TokenizerSpec`."""
    backend = _read(config.path)
    end = backend.token_to_id(config.end)
    if end is None:
        special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        raise ConfigError(
            "tokenizer.end",
            expected=f"a token of {config.path}",
            got=repr(config.end),
            fix=f"Its special tokens are {', '.join(map(repr, special))}." if special else "It has no special tokens.",
        )
    tables = {"placeholders": config.placeholders, "markers": config.markers, "items": config.items}
    for key, modality in [(key, modality) for key, table in tables.items() for modality in table]:
        if modality not in modalities:
            raise ConfigError(
                f"tokenizer.{key}.{modality}",
                expected=f"a modality of the model: {', '.join(map(repr, modalities)) or 'it has none'}",
                got=repr(modality),
            )
    found: dict[str, int] = {}
    texts = {modality: config.placeholders.get(modality, mark(modality)) for modality in modalities}
    for modality, text in texts.items():
        number = backend.token_to_id(text)
        if number is None:
            raise ConfigError(
                "tokenizer.path",
                expected=f"a tokenizer with the token {text}, the placeholder of modality {modality!r}",
                got=f"{config.path!r}, which has none",
                fix=f'Add it and save: tokenizer.add_special_tokens(["{text}"]); tokenizer.save(...). '
                f"Or name the token that stands for an item in tokenizer.placeholders.{modality}.",
            )
        found[modality] = number
    # Not the number of tokens: files may leave gaps between ids.
    vocabulary = 1 + max(backend.get_vocab(with_added_tokens=True).values())
    # A token of the plain vocabulary would be split; as a special one it keeps its id and is found whole.
    backend.add_special_tokens(list(texts.values()))
    stands_for = [
        (text, modality) for modality in modalities for text in (mark(modality), config.markers.get(modality))
    ]
    others = {text: modality for text, modality in stands_for if text not in (None, texts[modality])}
    replaced = ItemTexts.of(config.items, texts, others)
    others = {text: modality for text, modality in others.items() if modality not in config.items}
    backend.add_special_tokens(list(others))
    aliases = {backend.token_to_id(text): found[modality] for text, modality in others.items()}
    # Limits that the file may carry would cut or pad samples unseen; ours is `max_tokens`.
    backend.no_truncation()
    backend.no_padding()
    # It adds nothing here, and may take white space out of the letters that a token stands for.
    backend.post_processor = None
    return FileTokenizer(
        path=config.path,
        end=end,
        placeholders=Placeholders(found),
        backend=backend,
        vocabulary=vocabulary,
        texts=texts,
        aliases={alias: number for alias, number in aliases.items() if alias is not None},
        markers=config.markers,
        replaced=replaced,
    )


def _read(path: str) -> tokenizers.Tokenizer:
    import tokenizers

    if not Path(path).is_file():
        raise ConfigError(
            "tokenizer.path",
            expected="an existing tokenizer.json",
            got=repr(path),
            fix="Check the path; it is relative to the folder in which the command runs.",
        )
    try:
        with _refusals("it can't be read"):
            return tokenizers.Tokenizer.from_file(path)
    except ValueError as error:
        raise _unusable(path, str(error)) from error


def _unusable(path: str, why: str) -> ConfigError:
    return ConfigError(
        "tokenizer.path",
        expected="a tokenizer.json that the tokenizers library reads",
        got=f"{path!r} ({why})",
        fix="Save it with tokenizer.save(...) of the tokenizers library.",
    )


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Have the library raise `ValueError`: it raises bare `Exception`, and where its Rust panics not even that.

    Raises:
        ValueError: saying ``what``, and why.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        msg = f"{what}: {error}"
        raise ValueError(msg) from error


SPEC = TokenizerSpec(name="file", config=FileConfig, build=build)

"""Text of tokens as they come: all pieces together are the whole, and none shows half a letter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mimo.data import TOKENIZERS, Tokenizer
from mimo.hooks import discover
from mimo.trainer._streamed import StreamedText

TEXT = "zwölf Boxkämpfer — 😀 e\u0301 jagen  Eva. 北京"


def tokenizer(plugin: str, **config: Any) -> Tokenizer:
    """Return an installed tokenizer that knows images."""
    spec = discover(TOKENIZERS).find(plugin, "tokenizer.plugin")
    built: Tokenizer = spec.build(spec.config(**config), ["image"])
    return built


def trained(folder: Path, kind: str) -> Tokenizer:
    """Return a tokenizer file of one of the ways in which the `tokenizers` library writes spaces and bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE(byte_fallback=kind == "fallback"))
    special = ["</s>", "<image>"]
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet = []
        special += [f"<0x{byte:02X}>" for byte in range(256)] if kind == "fallback" else []
    text = "zwei Boxer jagen Eva. zwei jagen zwei" if kind == "fallback" else TEXT
    made.train_from_iterator([text], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    made.save(str(folder / "tokenizer.json"))
    return tokenizer("file", path=str(folder / "tokenizer.json"))


def streamed(given: Tokenizer, ids: list[int]) -> list[str]:
    """Return the pieces, the last of which comes when no more tokens do."""
    text = StreamedText(given)
    return [*(text.add(token) for token in ids), text.end()]


@pytest.mark.parametrize("kind", ["byte", "bytes", "fallback", "spaces"])
def test_all_pieces_are_the_whole_text(kind: str, tmp_path: Path) -> None:
    """Of a true text, and of tokens that nobody would write.

    But for a tokenizer that shows a letter otherwise once a broken one follows: what was told stays.
    """
    given = tokenizer("byte") if kind == "byte" else trained(tmp_path, kind)
    ids = list(given.encode(TEXT))
    assert "".join(streamed(given, ids)) == given.decode(ids)
    rng = random.Random(1)
    known = [number for number in range(given.vocabulary) if number != given.end]
    for _ in range(60):
        drawn = rng.choices(known, k=rng.randint(1, 12))
        if kind != "fallback" or "\N{REPLACEMENT CHARACTER}" not in given.decode(drawn):
            assert "".join(streamed(given, drawn)) == given.decode(drawn), drawn


def test_a_letter_comes_whole() -> None:
    """One of four bytes with the last of them, an open one at the end as what it is."""
    given = tokenizer("byte")
    assert streamed(given, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]
    assert streamed(given, [0xF0, 0x9F]) == ["", "", "\N{REPLACEMENT CHARACTER}"]
    assert streamed(given, [0xF0, ord("a")]) == ["", "\N{REPLACEMENT CHARACTER}a", ""]


def test_words_have_spaces_between_them() -> None:
    """And none before the first."""
    given = tokenizer("word", words=("the", "digit", "is"))
    assert streamed(given, list(given.encode("the digit is"))) == ["the", " digit", " is", ""]

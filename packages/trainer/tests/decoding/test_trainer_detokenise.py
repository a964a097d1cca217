"""Text of tokens as they come: all pieces together are the whole, and none shows half a letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.data import TOKENIZERS, Tokenizer
from mimo.hooks import discover
from mimo.trainer.decoding.detokenise import StreamedText

TEXT = "zwölf Boxkämpfer — 😀 e\u0301 jagen  Eva. 北京"


def tokenizer(plugin: str, **config: Any) -> Tokenizer:
    """Return an installed tokenizer that knows images."""
    spec = discover(TOKENIZERS).find(plugin, "tokenizer.plugin")
    built: Tokenizer = spec.build(spec.config(**config), ["image"])
    return built


def trained(folder: Path, kind: str) -> Tokenizer:
    """Return a tokenizer file of one of the ways in which the `tokenizers` library writes spaces and bytes."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    bytes_, text = [f"<0x{byte:02X}>" for byte in range(256)], "zwei Boxer jagen Eva. zwei jagen  zwei"
    shown: dict[str, Any] = {
        "bytes": decoders.ByteLevel(),
        "fallback": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        "spaces": decoders.Metaspace(),
        "unigram": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
        # As Llama 2 has it.
        "stripped": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        "wordpiece": decoders.WordPiece(),
        "suffixes": decoders.BPEDecoder(),
    }
    special = ["</s>", "<image>", "<unk>"]
    if kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))  # noqa: S106
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.train_from_iterator([TEXT], trainers.WordPieceTrainer(special_tokens=special))
    elif kind == "unigram":
        parts = [*special, *bytes_, *dict.fromkeys(text.replace(" ", "▁")), "▁zwei", "▁jag", "en", "▁▁"]
        made = tokenizers.Tokenizer(
            models.Unigram([(part, -float(at)) for at, part in enumerate(parts)], unk_id=2, byte_fallback=True)
        )
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.add_special_tokens(special)
    else:
        falls = kind in {"fallback", "stripped"}
        suffix: dict[str, Any] = {"end_of_word_suffix": "</w>"} if kind == "suffixes" else {}
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=falls, **suffix))
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
        if kind == "bytes":
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        elif kind == "suffixes":
            made.pre_tokenizer = pre_tokenizers.Whitespace()
        elif kind == "stripped":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(
            special_tokens=special + (bytes_ if falls else []), initial_alphabet=alphabet, show_progress=False, **suffix
        )
        made.train_from_iterator([text if falls else TEXT], trainer)
    made.decoder = shown[kind]
    made.save(str(folder / "tokenizer.json"))
    return tokenizer("file", path=str(folder / "tokenizer.json"))


def streamed(given: Tokenizer, ids: list[int]) -> list[str]:
    """Return the pieces, the last of which comes when no more tokens do."""
    text = StreamedText(given)
    return [*(text.add(token) for token in ids), text.end()]


KINDS = ("byte", "bytes", "fallback", "spaces", "unigram", "stripped", "wordpiece", "suffixes")


@pytest.fixture(scope="module")
def tokenizers_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """All kinds, built once."""
    return {
        kind: tokenizer("byte") if kind == "byte" else trained(tmp_path_factory.mktemp(kind), kind) for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_all_pieces_are_the_whole_text(kind: str, tokenizers_of: dict[str, Tokenizer], data: st.DataObject) -> None:
    """Of a true text, and of tokens that nobody would write: broken bytes, marks between the bytes of a letter."""
    given_ = tokenizers_of[kind]
    known = [number for number in range(given_.vocabulary) if number != given_.end]
    texts = st.text(alphabet="zei ▁—😀é\u0301北\ufffd", max_size=8).map(lambda text: encoded(given_, text))
    parts = st.one_of(texts, st.lists(st.sampled_from(known), max_size=6), st.just([given_.end]))
    ids = [number for part in data.draw(st.lists(parts, max_size=4)) for number in part]
    assert "".join(streamed(given_, ids)) == given_.decode(ids), ids


def encoded(given_: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, none where the tokenizer can't write it."""
    try:
        return list(given_.encode(text))
    except ValueError:
        return []


def test_a_row_of_bytes_waits_for_its_end(tokenizers_of: dict[str, Tokenizer]) -> None:
    """As one more that is broken would show all of them as broken; text behind it ends the waiting."""
    given_ = tokenizers_of["fallback"]
    backend: Any = given_
    letter = [backend.backend.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    (word,) = (backend.backend.token_to_id("z"),)
    assert streamed(given_, [word, *letter, word, word]) == ["z", "", "", "éz", "z", ""]
    assert streamed(given_, [word, *letter, letter[0]]) == ["z", "", "", "", 3 * "\N{REPLACEMENT CHARACTER}"]


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

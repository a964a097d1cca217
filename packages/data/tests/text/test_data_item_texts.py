"""What takes the place of an item's placeholder in text, and which letters tokens stand for then."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from mimo.data.text import tokenizer_file
from mimo.data.text.item_texts import ItemTexts
from mimo.hooks import ConfigError

SOFT, START, STOP = "<soft>", "<start>", "<stop>"
ITEM = f"\n\n{START}{SOFT}{STOP}\n\n"


def letters(path: Path) -> str:
    """Write a tokenizer of single letters, and of runs of line ends, with some special tokens."""
    words = {letter: number for number, letter in enumerate("abcdefgh :\n")}
    words |= {"\n\n": len(words), "\n\n\n": len(words) + 1, "[?]": len(words) + 2}
    tokenizer = Tokenizer(models.BPE(words, [("\n", "\n"), ("\n\n", "\n")], unk_token="[?]"))  # noqa: S106 - no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Split("a-h", "isolated")
    tokenizer.add_special_tokens([SOFT, START, STOP, "</s>"])
    tokenizer.save(str(path))
    return str(path)


def built(tmp_path: Path, **keys: object) -> tokenizer_file.FileTokenizer:
    """Return the tokenizer with settings."""
    config = tokenizer_file.FileConfig(path=letters(tmp_path / "tokenizer.json"), **keys)  # type: ignore[arg-type]
    return tokenizer_file.build(config, ["image"])


def gemma(tmp_path: Path) -> tokenizer_file.FileTokenizer:
    """Return it with the settings of models whose items stand between two tokens and line ends."""
    return built(tmp_path, placeholders={"image": SOFT}, markers={"image": START}, items={"image": ITEM})


@pytest.mark.parametrize("written", ["<image>", START])
def test_all_that_stands_for_an_item_becomes_its_text(tmp_path: Path, written: str) -> None:
    """The text is that which the model was trained with, so line ends join those before it."""
    tokenizer = gemma(tmp_path)
    ids = tokenizer.encode(f"ab\n{written}c")
    assert ids == tokenizer.backend.encode(f"ab\n{ITEM}c").ids
    assert ids.count(tokenizer.placeholder("image")) == 1
    assert tokenizer.backend.id_to_token(ids[2]) == "\n\n\n"


def test_tokens_of_an_item_stand_for_what_was_written(tmp_path: Path) -> None:
    """Spans are those in the text before: a learnt answer keeps its letters wherever an item moves them."""
    tokenizer = gemma(tmp_path)
    text = "ab\n<image>c"
    ids, spans = tokenizer.encode_spans(text)
    tokens = [tokenizer.backend.id_to_token(number) for number in ids]
    assert tokens == ["a", "b", "\n\n\n", START, SOFT, STOP, "\n\n", "c"]
    assert [text[begin:end] for begin, end in spans] == ["a", "b", "\n<image>", *["<image>"] * 4, "c"]


@given(parts=st.lists(st.sampled_from(["<image>", "ab", "c", "\n", " "])))
def test_spans_of_what_stays_are_its_letters(parts: list[str]) -> None:
    """Of each letter that stays its own place, of each that is put in that of what was there."""
    written = ItemTexts({"<image>": "xyz!"})
    text = "".join(parts)
    other = written.instead_of(text)
    spans = written.spans_in(text, [(at, at + 1) for at in range(len(other))])
    wanted = []
    at = 0
    for part in parts:
        wanted += [(at, at + 7)] * 4 if part == "<image>" else [(at + i, at + i + 1) for i in range(len(part))]
        at += len(part)
    assert spans == wanted


def test_a_marker_alone_is_the_placeholder(tmp_path: Path) -> None:
    """Without a text of items what stands for one becomes the placeholder's id."""
    tokenizer = built(tmp_path, placeholders={"image": SOFT}, markers={"image": START})
    soft = tokenizer.placeholder("image")
    assert tokenizer.encode(f"a{START}<image>{SOFT}") == [tokenizer.encode("a")[0], soft, soft, soft]


def test_settings_of_items_are_checked(tmp_path: Path) -> None:
    """The text of an item holds its placeholder once, and the modality is one of the model's."""
    with pytest.raises(ConfigError, match=r"tokenizer.items.image: expected a text that holds the placeholder <soft>"):
        built(tmp_path, placeholders={"image": SOFT}, items={"image": "<image>"})
    with pytest.raises(ConfigError, match=r"tokenizer.markers.audio: expected a modality of the model: 'image'"):
        built(tmp_path, placeholders={"image": SOFT}, markers={"audio": START})

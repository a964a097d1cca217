"""The built-in tokenizers: ids, text, and what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from mimo.data import Tokenizer
from mimo.data.sources import jsonl
from mimo.data.text import byte_tokenizer, tokenizer_file, word_tokenizer
from mimo.hooks import ConfigError, DataError

WORDS = ("the", "digit", "is", "seven")


def word(*modalities: str) -> Tokenizer:
    """Return a word tokenizer of `WORDS`."""
    return word_tokenizer.build(word_tokenizer.WordConfig(words=WORDS), modalities)


def byte(*modalities: str) -> Tokenizer:
    """Return a byte tokenizer."""
    return byte_tokenizer.build(byte_tokenizer.ByteConfig(), modalities)


def save(
    path: Path, vocabulary: dict[str, int] | None = None, adapt: Callable[[tokenizers.Tokenizer], Any] | None = None
) -> str:
    """Write a tokenizer.json of whole words and return its path."""
    vocabulary = vocabulary or {"</s>": 0, "<image>": 1, "[UNK]": 2, "the": 3, "digit": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106 - no secret
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if adapt is not None:
        adapt(backend)
    backend.save(str(path))
    return str(path)


def test_data_word_numbers_end_placeholders_words() -> None:
    """The end is 0, then placeholders, then words."""
    tokenizer = word("image", "audio", "image")
    assert tokenizer.end == 0
    assert (tokenizer.placeholder("image"), tokenizer.placeholder("audio")) == (1, 2)
    assert tokenizer.encode("the digit is seven") == [3, 4, 5, 6]
    assert tokenizer.vocabulary == 7


def test_data_word_placeholder_may_touch_words() -> None:
    """Placeholders are found without white space around them."""
    tokenizer = word("image")
    assert tokenizer.encode("the<image><image>digit\n is") == [2, 1, 1, 3, 4]
    assert tokenizer.decode([2, 1, 3, 0]) == "the <image> digit"


def test_data_word_shows_foreign_ids() -> None:
    """An id that no word has, which a model may write, shows as a replacement character."""
    assert word().decode([1, 99, -1]) == "the \N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("text", ["the nine", "the <nine> digit"])
def test_data_word_refuses_unknown_word(text: str) -> None:
    """A word outside the list is named; so is a placeholder of a modality that the model does not have."""
    with pytest.raises(ValueError, match=f"the word '{text.split()[1]}' is not among the tokenizer's 4 words"):
        word("image").encode(text)


def test_data_word_reads_file(tmp_path: Path) -> None:
    """Words of the file follow those of the list; line ends of any system are fine."""
    file = tmp_path / "words.txt"
    file.write_bytes("eins\r\nzwölf\n".encode())
    tokenizer = word_tokenizer.build(word_tokenizer.WordConfig(words=("null",), file=str(file)), [])
    assert tokenizer.encode("null eins zwölf") == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "tokenizer.words: expected at least one word, got none. List them, or name a file"),
        (("a", "a"), "tokenizer.words: expected different words, got 'a' (word 2), which stands there twice"),
        (("a b",), "tokenizer.words: expected different words, got 'a b' (word 1), which empty or holds white space"),
        (("",), "got '' (word 1)"),
        (("a<image>",), "got 'a<image>' (word 1), which holds a placeholder, which has an id of its own"),
    ],
)
def test_data_word_refuses_list(words: tuple[str, ...], message: str) -> None:
    """A list that cannot serve is refused, the word and its place named."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        word_tokenizer.build(word_tokenizer.WordConfig(words=words), ["image"])


def test_data_word_refuses_file(tmp_path: Path) -> None:
    """A file that is missing, not UTF-8 or holds a word twice is refused by path, the latter by line."""
    file = tmp_path / "words.txt"
    config = word_tokenizer.WordConfig(words=("a",), file=str(file))
    with pytest.raises(ConfigError, match=r"tokenizer\.file: expected a readable UTF-8 text file .*No such file"):
        word_tokenizer.build(config, [])
    file.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.file: expected a readable UTF-8 .*can't decode"):
        word_tokenizer.build(config, [])
    file.write_text("b\na\n")
    with pytest.raises(ConfigError, match=re.escape(f"tokenizer.file: expected different words, got 'a' ({file}:2)")):
        word_tokenizer.build(config, [])


@pytest.mark.parametrize("tokenizer", [word("image"), byte("image")])
def test_data_placeholder_of_unknown_modality(tokenizer: Tokenizer) -> None:
    """A modality that the tokenizer was not built for has no placeholder."""
    with pytest.raises(ConfigError, match=re.escape("tokenizer: expected a placeholder <audio>, got one built with")):
        tokenizer.placeholder("audio")


@given(st.text())
def test_data_byte_round_trip(text: str) -> None:
    """Any text comes back as it was; placeholders in it are one id each."""
    tokenizer = byte("image")
    ids = tokenizer.encode(f"{text}<image>")
    assert ids[-1] == tokenizer.placeholder("image") == 257
    assert tokenizer.end == 256
    assert tokenizer.vocabulary == 258
    assert tokenizer.decode([*ids, tokenizer.end]) == f"{text}<image>"


def test_data_byte_knows_only_its_modalities() -> None:
    """The placeholder of another modality is plain text."""
    assert byte("image").encode("<audio>") == list(b"<audio>")
    assert byte().encode("<image>") == list(b"<image>")


def test_data_byte_decodes_what_a_model_may_write() -> None:
    """Broken UTF-8 and foreign ids show as replacement characters."""
    assert byte().decode([0xC3, 256, 65, 999]) == "\N{REPLACEMENT CHARACTER}A\N{REPLACEMENT CHARACTER}"


def test_data_byte_refuses_half_a_character() -> None:
    """A lone surrogate, which JSON can carry, has no bytes."""
    with pytest.raises(ValueError, match="surrogates not allowed"):
        byte().encode("\ud800")


def test_data_file_uses_ids_of_the_file(tmp_path: Path) -> None:
    """Ids, end and placeholder are the file's; a placeholder of its plain vocabulary is still found whole."""
    config = tokenizer_file.FileConfig(path=save(tmp_path / "tokenizer.json"))
    tokenizer: Tokenizer = tokenizer_file.build(config, ["image"])
    assert (tokenizer.end, tokenizer.placeholder("image"), tokenizer.vocabulary) == (0, 1, 5)
    assert tokenizer.encode("the<image>digit <audio>")[:3] == [3, 1, 4]
    assert tokenizer.decode([3, 1, 4, 0]) == "the <image> digit"


def test_data_file_ignores_limits_of_the_file(tmp_path: Path) -> None:
    """Truncation and padding that were saved with a tokenizer do not touch samples."""

    def limit(backend: tokenizers.Tokenizer) -> None:
        backend.enable_truncation(2)
        backend.enable_padding(length=9)

    tokenizer = tokenizer_file.build(tokenizer_file.FileConfig(path=save(tmp_path / "t.json", adapt=limit)), [])
    assert tokenizer.encode("the digit the digit") == [3, 4, 3, 4]


def test_data_file_vocabulary_covers_gaps(tmp_path: Path) -> None:
    """The vocabulary reaches to the largest id, though ids below it are unused."""
    path = save(tmp_path / "t.json", {"</s>": 0, "[UNK]": 40})
    assert tokenizer_file.build(tokenizer_file.FileConfig(path=path), []).vocabulary == 41


def test_data_file_refuses_path(tmp_path: Path) -> None:
    """A missing file and one of another kind are told apart."""
    with pytest.raises(ConfigError, match=r"tokenizer\.path: expected an existing tokenizer\.json, got 'no\.json'"):
        tokenizer_file.build(tokenizer_file.FileConfig(path="no.json"), [])
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.path: expected a tokenizer\.json that the tokenizers library"):
        tokenizer_file.build(tokenizer_file.FileConfig(path=str(tmp_path / "t.json")), [])


def test_data_file_refuses_modality_without_placeholder(tmp_path: Path) -> None:
    """A modality without a placeholder token is told with the file and what to do."""
    path = save(tmp_path / "t.json")
    message = (
        "tokenizer.path: expected a tokenizer with the token <audio>, the placeholder of modality 'audio', "
        f"got {path!r}, which has none. Add it and save: tokenizer.add_special_tokens"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        tokenizer_file.build(tokenizer_file.FileConfig(path=path), ["image", "audio"])


def test_data_file_refuses_end(tmp_path: Path) -> None:
    """An end that the file does not know is told with the special tokens that it has."""
    path = save(tmp_path / "t.json", adapt=lambda backend: backend.add_special_tokens(["<eos>", "<bos>"]))
    with pytest.raises(ConfigError, match=re.escape("Its special tokens are '<eos>', '<bos>'.")) as error:
        tokenizer_file.build(tokenizer_file.FileConfig(path=path, end="<end>"), [])
    assert str(error.value).startswith(f"tokenizer.end: expected a token of {path}, got '<end>'.")
    with pytest.raises(ConfigError, match=re.escape("It has no special tokens.")):
        tokenizer_file.build(tokenizer_file.FileConfig(path=save(tmp_path / "u.json"), end="<end>"), [])


def test_data_file_placeholder_is_exact(tmp_path: Path) -> None:
    """A file that folds case before it looks for tokens does not take other text for a placeholder."""

    def fold(backend: tokenizers.Tokenizer) -> None:
        backend.normalizer = normalizers.Lowercase()
        backend.add_tokens([tokenizers.AddedToken("<image>", normalized=True)])

    tokenizer = tokenizer_file.build(tokenizer_file.FileConfig(path=save(tmp_path / "t.json", adapt=fold)), ["image"])
    assert tokenizer.encode("THE <image>") == [3, 1]
    try:
        ids = tokenizer.encode("<IMAGE>")
    except ValueError:  # what it comes to with older versions of the library
        ids = []
    assert 1 not in ids


def test_data_file_refuses_swallowed_placeholder(tmp_path: Path) -> None:
    """A token of the file that holds a placeholder and takes its place does not pass unseen."""
    path = save(tmp_path / "t.json", adapt=lambda backend: backend.add_special_tokens(["digit<image>"]))
    tokenizer = tokenizer_file.build(tokenizer_file.FileConfig(path=path), ["image"])
    assert tokenizer.encode("the <image>") == [3, 1]
    with pytest.raises(ValueError, match="<image> stands in the text 1 times but the tokenizer finds it 0 times"):
        tokenizer.encode("the digit<image>")


def test_data_file_tells_refused_text(tmp_path: Path) -> None:
    """Text that the library refuses is a ValueError with the library's reason."""
    path = save(tmp_path / "t.json", {"</s>": 0, "the": 1})
    tokenizer = tokenizer_file.build(tokenizer_file.FileConfig(path=path), [])
    with pytest.raises(ValueError, match=r"the tokenizer refuses the text: .*\[UNK\]"):
        tokenizer.encode("digit")


def panicking(tmp_path: Path, **parts: object) -> tokenizer_file.FileConfig:
    """Return settings of a file of which some part is such that the library's Rust panics."""
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"},
        **parts,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return tokenizer_file.FileConfig(path=str(tmp_path / "tokenizer.json"))


def test_a_file_on_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    """A panic is no `Exception`; merges of a token that is shorter than its prefix make one."""
    config = panicking(tmp_path, model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]})
    with pytest.raises(ConfigError, match=r"tokenizer.path: expected a tokenizer.json that .* got '.*tokenizer.json'"):
        tokenizer_file.build(config, [])


def test_a_text_on_which_the_library_panics_is_refused_by_file_and_line(tmp_path: Path) -> None:
    """As one that it refuses."""
    tokenizer = tokenizer_file.build(panicking(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0}), [])
    with pytest.raises(ValueError, match="the tokenizer refuses the text: chunk size must be non-zero"):
        tokenizer.encode("a")
    (tmp_path / "train.jsonl").write_text('\n{"text": "a"}\n')
    dataset = jsonl.open_jsonl(jsonl.JsonlConfig(path=str(tmp_path / "train.jsonl")), tokenizer, "train")
    assert dataset is not None
    with pytest.raises(
        DataError, match=r"train.jsonl:2: expected text that the tokenizer can encode, got .* chunk size"
    ):
        dataset.tokens(0)


def test_ids_on_which_the_library_panics_are_refused(tmp_path: Path) -> None:
    """By the file, whose decoder it is."""
    decoder = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
    tokenizer = tokenizer_file.build(panicking(tmp_path, decoder=decoder), [])
    with pytest.raises(ConfigError, match=r"tokenizer.path: .*its decoder fails: index out of bounds"):
        tokenizer.decode([1])

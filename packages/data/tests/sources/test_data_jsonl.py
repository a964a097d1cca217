"""The jsonl dataset: what it reads, and every refusal with file and line."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mimo.data import ChatSettings, Dataset, MadeItem, RecordItem, ends_of, lay_out, read_record, weights_of
from mimo.data.sources import lines as lines_module
from mimo.data.sources.jsonl import JsonlConfig, open_jsonl
from mimo.data.sources.lines import MAX_LINE, find_lines
from mimo.data.text import byte_tokenizer, word_tokenizer
from mimo.hooks import ConfigError, DataError, RunError
from mimo.testing import failing_files

TOKENIZER = byte_tokenizer.build(byte_tokenizer.ByteConfig(), ["image"])
KEYS = "'images', 'audio', 'id', 'items', 'messages', 'roles', 'text', 'tools', 'weight'"
HERE = r"train\.jsonl:1: "


def write(folder: Path, *lines: Any) -> str:
    """Write lines, bytes as they are and others as JSON, and return the file's path."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path = folder / "train.jsonl"
    path.write_bytes(b"\n".join(raw))
    return str(path)


def opened(path: str) -> Dataset:
    """Open a file as training samples."""
    dataset = open_jsonl(JsonlConfig(path=path), TOKENIZER, "train")
    assert dataset is not None
    return dataset


def picture(path: Path, width: int = 4, height: int = 3) -> Path:
    """Write a grey image."""
    Image.new("L", (width, height), 7).save(path)
    return path


@pytest.mark.parametrize("first", [b'{"text": "a"}\n', b"\n", b"  \n", b""])
def test_data_jsonl_leaves_out_a_byte_order_mark(first: bytes, tmp_path: Path) -> None:
    """As some editors write one before the first line, blank or not; the offsets that are kept leave it out, too."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + first + b'{"text": "b"}\n')
    texts = ["a", "b"] if b"a" in first else ["b"]
    for _ in range(2):
        data = opened(str(path))
        assert [bytes(data.tokens(sample)[:-1]).decode() for sample in range(len(data))] == texts
        lines_module.write_lines(path)
    path.write_bytes(b"\xef\xbb\xbf")
    assert len(find_lines(path)) == 0


def test_data_jsonl_reads_conversations_in_the_form_of_llava(tmp_path: Path) -> None:
    """They are the samples that the same ones with messages are; both at once are refused."""
    picture(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A dot."}]
    roles = [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": "A dot."}]
    path = write(
        tmp_path,
        {"id": "7", "image": "a.png", "conversations": turns},
        {"images": ["a.png"], "messages": roles},
        {"messages": roles, "conversations": turns},
        {"image": "a.png", "images": ["a.png"], "conversations": turns},
        {"conversations": "none"},
        {"id": "8", "model": "", "image": None, "conversations": [turns[0] | {"value": "What?"}, turns[1]]},
        {"id": 9, "images": ["a.png"], "messages": roles},
        {"id": None, "text": "A dot."},
        {"text": "A dot."},
    )
    data = open_jsonl(JsonlConfig(path=path, chat=ChatSettings(template="chatml")), TOKENIZER, "train")
    assert data is not None
    assert data.tokens(0) == data.tokens(1)
    assert [info.size for info in data.infos(0)] == [(3, 4)]
    with pytest.raises(DataError, match=r"train\.jsonl:3: expected one of the keys 'conversations' and 'messages'"):
        data.tokens(2)
    with pytest.raises(DataError, match=r"train\.jsonl:4: expected one of the keys 'image' and 'images', got both"):
        data.tokens(3)
    with pytest.raises(DataError, match=r"train\.jsonl:5\.messages: expected an array"):
        data.tokens(4)
    assert len(data.tokens(5)) > 0
    assert not data.infos(5)
    assert data.tokens(6) == data.tokens(1)  # what names a sample is left out
    assert data.tokens(7) == data.tokens(8)


def test_data_jsonl_reads_samples(tmp_path: Path) -> None:
    """Samples with two images, none, and no list at all; sizes are (height, width)."""
    picture(tmp_path / "a.png")
    (tmp_path / "sub").mkdir()
    picture(tmp_path / "sub" / "b.jpg", 5, 6)
    path = write(
        tmp_path,
        {"images": ["a.png", "sub/../sub/b.jpg"], "text": "<image> ä <image>"},
        {"images": [], "text": "none"},
        {"text": "none"},
    )
    dataset = opened(path)
    assert len(dataset) == 3
    assert dataset.tokens(0) == [257, 32, 0xC3, 0xA4, 32, 257, 256]
    assert [(info.sample, info.index, info.modality, info.size) for info in dataset.infos(0)] == [
        (0, 0, "image", (3, 4)),
        (0, 1, "image", (6, 5)),
    ]
    assert dataset.infos(1) == dataset.infos(2) == []
    assert dataset.tokens(1) == dataset.tokens(2) == [*b"none", 256]
    image = dataset.raw(0, 0)
    assert (image.size, image.mode, image.getpixel((0, 0))) == ((4, 3), "L", 7)
    assert dataset.raw(0, 1).size == (5, 6)


def test_data_jsonl_leaves_other_modalities_to_their_encoders(tmp_path: Path) -> None:
    """Clips and items of any other modality are paths inside the folder, without a size; images come first."""
    picture(tmp_path / "a.png")
    line = {
        "items": {"sonar": ["s.bin"]},
        "audio": ["b.wav", "sub/c.flac"],
        "images": ["a.png"],
        "text": "a",
    }
    dataset = opened(write(tmp_path, line))
    assert [(info.index, info.modality, info.size) for info in dataset.infos(0)] == [
        (0, "image", (3, 4)),
        (1, "audio", ()),
        (2, "audio", ()),
        (3, "sonar", ()),
    ]
    assert [dataset.raw(0, index) for index in (1, 2, 3)] == [
        tmp_path.resolve() / name for name in ("b.wav", "sub/c.flac", "s.bin")
    ]


def test_data_jsonl_keeps_other_modalities_inside_its_folder(tmp_path: Path) -> None:
    """A clip's path may leave the folder as little as an image's."""
    dataset = opened(write(tmp_path, {"audio": ["../b.wav"], "text": "a"}))
    with pytest.raises(DataError, match=HERE + r"expected paths relative .* got '\.\./b\.wav', which leaves it"):
        dataset.raw(0, 0)


def test_data_jsonl_weighs_samples(tmp_path: Path) -> None:
    """A line's weight is that of each of its tokens; without one there is none."""
    dataset = opened(write(tmp_path, {"text": "ab", "weight": 0.25}, {"text": "c"}, {"weight": 0, "text": "d"}))
    assert [weights_of(dataset, sample) for sample in range(3)] == [[0.25] * 3, None, [0.0] * 2]
    found = lay_out(dataset, 0, tokenizer=TOKENIZER, rows={}, max_tokens=2)
    assert found.weights is not None
    assert found.weights.tolist() == [0.25, 0]


def test_data_jsonl_skips_blank_lines(tmp_path: Path) -> None:
    """Blank lines are no samples, but count in messages; line ends of any system and a missing last one are fine."""
    path = write(tmp_path, {"text": "a"}, b"", b'  \t\r\n{"text": "b"}\r', {"text": "c"})
    dataset = opened(path)
    assert [bytes(dataset.tokens(sample)[:-1]) for sample in range(len(dataset))] == [b"a", b"b", b"c"]
    assert [dataset.where(sample) for sample in range(3)] == [f"{path}:1", f"{path}:4", f"{path}:5"]


@given(st.lists(st.sampled_from([b"\n", b"a", b" ", b"{x}", b"\r", b"\n\n"]), max_size=14), st.integers(1, 9))
def test_data_jsonl_finds_the_lines_that_python_finds(pieces: list[bytes], block: int) -> None:
    """Whatever the blocks that a file is read in: those that hold more than white space, with bytes and numbers."""
    raw = b"".join(pieces)
    with tempfile.TemporaryDirectory() as folder, patch.object(lines_module, "BLOCK", block):
        path = Path(folder) / "train.jsonl"
        path.write_bytes(raw)
        lines = find_lines(path)
        found = [(lines.number(sample), raw[slice(*lines.span(sample))]) for sample in range(len(lines))]
    assert found == [(number, line) for number, line in enumerate(io.BytesIO(raw), start=1) if line.strip()]


def test_data_jsonl_refuses_a_line_without_end(tmp_path: Path) -> None:
    """A line that is longer than any sample is refused before it is read."""
    path = tmp_path / "train.jsonl"
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(MAX_LINE + 1)  # a hole: no such bytes lie on the disk
    with pytest.raises(DataError, match=HERE + "expected a line of at most 268,435,456 bytes, got one of 268,435,457"):
        opened(str(path)).tokens(0)


def test_data_jsonl_splits(tmp_path: Path) -> None:
    """The evaluation split is the second file, or none."""
    train, evaluation = write(tmp_path, {"text": "a"}), tmp_path / "evaluation.jsonl"
    evaluation.write_text('{"text": "b"}\n{"text": "c"}\n')
    config = JsonlConfig(path=train, evaluation_path=str(evaluation))
    found = open_jsonl(config, TOKENIZER, "evaluation")
    assert found is not None
    assert len(found) == 2
    assert open_jsonl(JsonlConfig(path=train), TOKENIZER, "evaluation") is None


def test_data_jsonl_opening_parses_nothing(tmp_path: Path) -> None:
    """A broken line is found when its sample is used, not before, and others stay usable."""
    dataset = opened(write(tmp_path, b"{", {"text": "a"}))
    assert dataset.tokens(1) == [97, 256]
    with pytest.raises(DataError, match=HERE):
        dataset.tokens(0)


@pytest.mark.parametrize("setting", ["path", "evaluation_path"])
def test_data_jsonl_refuses_missing_file(tmp_path: Path, setting: str) -> None:
    """A file that is missing, a folder, empty or an archive is refused when opened, by its setting."""
    config: dict[str, Any] = {"path": write(tmp_path, {"text": "a"})}
    split: Any = "train" if setting == "path" else "evaluation"
    for path in ("nowhere/x.jsonl", str(tmp_path)):
        expected = f"data.{setting}: expected an existing jsonl file, got {path!r}. Check the path; it is relative"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            open_jsonl(JsonlConfig(**config | {setting: path}), TOKENIZER, split)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(
        ConfigError, match=rf"data\.{setting}: expected a jsonl file with at least one sample, got '.*em"
    ):
        open_jsonl(JsonlConfig(**config | {setting: str(tmp_path / "empty.jsonl")}), TOKENIZER, split)
    (tmp_path / "a.tar").write_bytes(tarfile.TarInfo("a.png").tobuf())
    with pytest.raises(ConfigError, match=rf"^data\.{setting}: expected a jsonl file, .*, got '.*a\.tar', which"):
        open_jsonl(JsonlConfig(**config | {setting: str(tmp_path / "a.tar")}), TOKENIZER, split)


@pytest.mark.parametrize("setting", ["path", "evaluation_path"])
@pytest.mark.parametrize(
    ("raw", "got"),
    [
        (
            b"\nOnce upon a time\nthere was",
            'whose line 2 begins with \'Once upon a time\'. Write each sample on a line, such as {"text": "…"}.',
        ),
        (b"a" * (1 << 20), f"whose line 1 begins with '{'a' * 40}'. Write each sample on a line, such"),
        (
            b'[\n{"text": "a"},\n{"text": "b"}\n]',
            "whose line 1 begins with '['. Write each sample on a line, as `jq -c '.[]' FILE` does.",
        ),
        (
            b'[{"text": "a"}]',
            "whose line 1 begins with '[{\"text\": \"a\"}]'. Write each sample on a line, as `jq -c '.[]' FILE` does.",
        ),
        (
            b'{\n"text": "a",\n"id": {}\n}\n',
            "whose line 1 begins with '{'. Write each sample on a line, as `jq -c . FILE` does.",
        ),
        ('{"text": "a"}\n'.encode("utf-16"), "which is in UTF-16. Save it as UTF-8."),
    ],
)
def test_data_jsonl_refuses_another_kind_of_file(tmp_path: Path, raw: bytes, got: str, setting: str) -> None:
    """Text, and JSON over some lines or in an array, is refused when opened, with what to do."""
    path = tmp_path / "other.jsonl"
    path.write_bytes(raw)
    config: dict[str, Any] = {"path": "", setting: str(path)}
    expected = f"data.{setting}: expected a jsonl file, a JSON object on each line, got {str(path)!r}, {got}"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        open_jsonl(JsonlConfig(**config), TOKENIZER, "train" if setting == "path" else "evaluation")


@pytest.mark.parametrize(
    "first", [b"{", b"[]", b"# a remark", b'{"text": "a"},', b"{" + b" " * (1 << 17) + b"}", b"\n" * (1 << 17)]
)
def test_data_jsonl_opens_files_with_broken_lines(tmp_path: Path, first: bytes) -> None:
    """Whatever the first line is, another one is read; also where the first is long."""
    dataset = opened(write(tmp_path, first, {"text": "a"}))
    assert dataset.tokens(len(dataset) - 1) == [97, 256]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'text': 'a'}", "expected one JSON object, got text that is not JSON (Expecting property name"),
        (b'{"text": "a"', "expected one JSON object, got text that is not JSON (Expecting ',' delimiter at column 13)"),
        (b'{"text": "a', "expected one JSON object, got text that is not JSON (Unterminated string starting at column"),
        (b"[" * 100_000, "expected one JSON object, got text that is not JSON (too many levels of nesting"),
        (b'{"text": ' + b"9" * 9_999 + b"}", "expected one JSON object, got text that is not JSON (Exceeds the limit"),
        (b'{"text": "\xff"}', "expected UTF-8 text, got something else ('utf-8' codec can't decode byte 0xff"),
        (b"[1, 2]", "expected one JSON object, got a list [1, 2]."),
        (b'"a"', 'expected one JSON object, got the text "a".'),
        (b"null", "expected one JSON object, got null."),
        ({}, "expected the key 'text' or 'messages', got none."),
        ({"images": ["a.png"]}, "expected the key 'text' or 'messages', got none."),
        ({"text": 3}, "expected text in 'text', got the number 3."),
        ({"text": True}, "expected text in 'text', got true."),
        ({"text": ["a" * 100]}, "expected text in 'text', got a list [\"aaaa"),
        ({"text": ""}, "expected text in 'text', got none. Leave out samples without text."),
        ({"text": " \n"}, "expected text in 'text', got none."),
        (
            {"text": "a", "image": []},
            f"expected only the keys {KEYS}, got 'image'. Did you mean 'images'?",
        ),
        (
            {"text": "a", "source": 1},
            f"expected only the keys {KEYS}, got 'source'. Remove it.",
        ),
        (b'{"text": "a", "text": "b"}', "expected one JSON object, got text that is not JSON ('text' is given twice)."),
        ({"text": "a", "images": "a.png"}, "expected a list of paths in 'images', got the text \"a.png\"."),
        ({"text": "a", "images": None}, "expected a list of paths in 'images', got null."),
        ({"text": "a", "images": [["a.png"]]}, "expected paths in 'images', got a list [\"a.png\"]."),
        ({"text": "a", "audio": "b.wav"}, "expected a list of paths in 'audio', got the text \"b.wav\"."),
        ({"text": "a", "items": ["b"]}, "expected an object of modalities in 'items', got a list [\"b\"]."),
        ({"text": "a", "items": {"sonar": "s"}}, "expected a list of paths in 'items.sonar', got the text \"s\"."),
        ({"text": "a", "items": {"image": []}}, "expected items of modality 'image' in 'images', got some in 'items'."),
        ({"text": "a", "images": [""]}, "expected paths in 'images', got the text \"\"."),
        (
            {"text": "a", "weight": -0.5},
            "expected a number from 0 to 3.4e+38 in 'weight', got the number -0.5. It is how",
        ),
        ({"text": "a", "weight": "2"}, "expected a number from 0 to 3.4e+38 in 'weight', got the text \"2\"."),
        ({"text": "a", "weight": True}, "expected a number from 0 to 3.4e+38 in 'weight', got true."),
        ({"text": "a", "weight": 1e39}, "expected a number from 0 to 3.4e+38 in 'weight', got the number 1e+39."),
        ({"text": "a", "weight": 10**400}, "expected a number from 0 to 3.4e+38 in 'weight', got the number 1000"),
        (
            b'{"text": "a", "weight": 1e999}',
            "expected a number from 0 to 3.4e+38 in 'weight', got the number Infinity.",
        ),
        (b'{"text": "a", "weight": NaN}', "expected one JSON object, got text that is not JSON"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "role": "input"}]}]}
            | {"images": ["a.png"], "roles": {"image": ["output"]}},
            "expected the role of an item in one place, got roles of modality 'image' both in messages and in 'roles'.",
        ),
    ],
)
def test_data_jsonl_refuses_line(tmp_path: Path, line: Any, message: str) -> None:
    """Whatever is wrong with a line is told with file and line, by tokens and infos alike."""
    path = write(tmp_path, {"text": "fine"}, line)
    dataset = opened(path)
    for use in (dataset.tokens, dataset.infos):
        with pytest.raises(DataError, match=re.escape(f"{path}:2: {message}")):
            use(1)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["output"], '.roles: expected an object, got ["output"].'),
        ({"image": "output"}, '.roles.image: expected an array, got "output".'),
        (
            {"image": ["input", "outptu"]},
            (
                ".roles.image[1]: expected one of the roles 'input', 'output', 'both', got \"outptu\". "
                "Did you mean 'output'?"
            ),
        ),
        ({"image": [None, "input"]}, ".roles.image[0]: expected one of the roles 'input', 'output', 'both', got null."),
        ({"image": ["", "input"]}, ".roles.image[0]: expected one of the roles 'input', 'output', 'both', got \"\"."),
        (
            {"image": ["output"]},
            ".roles.image: expected as many roles as the record lists items of modality 'image', 2, got [\"output\"].",
        ),
        (
            {"images": ["output", "input"]},
            (
                ".roles.images: expected as many roles as the record lists items of modality 'images', 0, "
                'got ["output", "input"]. Did you mean \'image\'?'
            ),
        ),
        (
            {"radio": ["output"]},
            (
                ".roles.radio: expected as many roles as the record lists items of modality 'radio', 0, "
                'got ["output"]. An item that a message names has its role there.'
            ),
        ),
    ],
)
def test_data_jsonl_refuses_roles(tmp_path: Path, roles: Any, message: str) -> None:
    """With file, line and the place in the record, by tokens and by infos."""
    path = write(tmp_path, {"text": "<image><image>", "images": ["a.png", "b.png"], "roles": roles})
    dataset = opened(path)
    for use in (dataset.tokens, dataset.infos):
        with pytest.raises(DataError, match=re.escape(f"{path}:1{message}")):
            use(0)


def roles_of(dataset: Dataset, sample: int) -> list[tuple[str, str]]:
    """Return modality and role of each item."""
    return [(info.modality, info.role) for info in dataset.infos(sample)]


def test_data_jsonl_says_what_the_model_does_with_items(tmp_path: Path) -> None:
    """By modality, in the order of its items; those of which nothing is said have no role, and nothing else changes."""
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png", 5, 6)
    line = {"images": ["a.png", "b.png"], "items": {"sonar": ["s.bin"]}, "text": "<image> then <image> <sonar>"}
    path = write(
        tmp_path,
        line,
        line | {"roles": {"image": ["input", "output"]}},
        line | {"roles": {"sonar": ["both"], "audio": []}},
    )
    dataset = opened(path)
    assert roles_of(dataset, 0) == [("image", ""), ("image", ""), ("sonar", "")]
    assert roles_of(dataset, 1) == [("image", "input"), ("image", "output"), ("sonar", "")]
    assert roles_of(dataset, 2) == [("image", ""), ("image", ""), ("sonar", "both")]
    assert dataset.tokens(0) == dataset.tokens(1) == dataset.tokens(2)
    assert [info.size for info in dataset.infos(1)] == [(3, 4), (6, 5), ()]
    assert dataset.raw(1, 1).size == (5, 6)


def test_data_jsonl_lays_out_an_item_that_is_made(tmp_path: Path) -> None:
    """The placeholder of an output is learnt as a word is."""
    picture(tmp_path / "a.png")
    dataset = opened(write(tmp_path, {"images": ["a.png"], "text": "ab<image>", "roles": {"image": ["output"]}}))
    found = lay_out(dataset, 0, tokenizer=TOKENIZER, rows={}, max_tokens=9, made={"image": MadeItem()})
    (item,) = found.made("image")
    assert (item.asked, item.made_from, found.items_of("image")) == ((2, 3), (0, 2), ())
    assert found.labels.tolist() == [98, 257, 256, -100]


URL = f"data:image/png;base64,{base64.b64encode(b'any').decode()}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": URL},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}, "detail": "low"},
        {"type": "audio", "audio": "b.wav"},
        {"type": "audio_url", "audio_url": "b.wav"},
        {"type": "input_audio", "input_audio": {"data": "YQ==", "format": "wav"}},
        {"type": "sonar", "sonar": "s.bin"},
        {"type": "image"},
    ],
    ids=json.dumps,
)
def test_data_records_have_roles_in_messages(part: dict[str, Any]) -> None:
    """In every form of a part that is an item, whoever says it; without one there is none."""
    parts = [part, part | {"role": "output"}]
    listed = {"images": ["a.png", "b.png"]} if part == {"type": "image"} else {}
    for speaker in ("user", "assistant"):
        record = read_record({**listed, "messages": [{"role": speaker, "content": parts}]}, "here")
        assert [item.role for item in record.items] == ["", "output"]
    assert {item.modality for item in record.items} <= {"image", "audio", "sonar"}
    parts = [part | {"role": "inputs"}]
    expected = (
        "here.messages[0].content[0].role: expected one of the roles 'input', 'output', 'both', got \"inputs\". "
        "Did you mean 'input'?"
    )
    with pytest.raises(DataError, match=re.escape(expected)):
        read_record({**listed, "messages": [{"role": "user", "content": parts}]}, "here")


def test_data_records_have_roles_beside_messages() -> None:
    """Of the items that are listed there, in the order in which messages show them; other modalities may be named."""
    content = ["<image> and <sonar>", {"type": "image"}, {"type": "audio", "audio": "b.wav", "role": "output"}]
    value = {
        "messages": [{"role": "user", "content": content}],
        "images": ["a.png", "b.png"],
        "items": {"sonar": ["s.bin"]},
        "roles": {"image": ["both", "input"], "sonar": ["output"]},
    }
    assert read_record(value, "here").items == (
        RecordItem("image", "a.png", "both"),
        RecordItem("sonar", "s.bin", "output"),
        RecordItem("image", "b.png", "input"),
        RecordItem("audio", "b.wav", "output"),
    )
    expected = "here.roles.audio: expected as many roles as the record lists items of modality 'audio', 0"
    with pytest.raises(DataError, match=re.escape(expected)):
        read_record({**value, "roles": {"audio": ["output"]}}, "here")


def test_data_jsonl_names_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    """A word that the tokenizer does not know is told with file and line."""
    words = word_tokenizer.build(word_tokenizer.WordConfig(words=("the",)), ["image"])
    dataset = open_jsonl(JsonlConfig(path=write(tmp_path, {"text": "the nine"})), words, "train")
    assert dataset is not None
    with pytest.raises(
        DataError, match=HERE + "expected text that the tokenizer can encode, got the word 'nine' is not"
    ):
        dataset.tokens(0)


@pytest.mark.parametrize("name", ["../a.png", "sub/../../a.png", "{outside}/a.png", "link.png", "linked/a.png", ".."])
def test_data_jsonl_refuses_path_out_of_folder(tmp_path: Path, name: str) -> None:
    """Neither dots nor absolute paths nor symbolic links lead out of the file's folder."""
    folder, outside = tmp_path / "data", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    picture(tmp_path / "a.png")
    picture(outside / "a.png")
    (folder / "sub").mkdir()
    (folder / "link.png").symlink_to(outside / "a.png")
    (folder / "linked").symlink_to(outside)
    name = name.format(outside=outside)
    dataset = opened(write(folder, {"images": [name], "text": "<image>"}))
    message = f"train.jsonl:1: expected paths relative to the file and inside its folder {str(folder)!r}, got {name!r}"
    for use in (lambda: dataset.infos(0), lambda: dataset.raw(0, 0)):
        with pytest.raises(DataError, match=re.escape(message)):
            use()


def test_data_jsonl_refuses_absolute_path_inside(tmp_path: Path) -> None:
    """An absolute path is refused even inside the folder: the data could not be moved."""
    path = picture(tmp_path / "a.png")
    dataset = opened(write(tmp_path, {"images": [str(path)], "text": "<image>"}))
    with pytest.raises(DataError, match="expected paths relative to the file"):
        dataset.infos(0)


def test_data_jsonl_follows_links_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links within the folder are fine, so is a folder that is itself reached by a link or a relative path."""
    folder = tmp_path / "real"
    folder.mkdir()
    picture(folder / "a.png")
    (folder / "b.png").symlink_to("a.png")
    write(folder, {"images": ["b.png"], "text": "<image>"})
    (tmp_path / "alias").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    dataset = opened("alias/train.jsonl")
    assert dataset.infos(0)[0].size == (3, 4)
    assert dataset.where(0) == "alias/train.jsonl:1"


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return one chunk of a PNG file."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that promises pixels and holds none."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.png", None, "there is no such file"),
        ("nul\0.png", None, "embedded null byte"),
        ("text.png", b"no image", "it is no image of the formats BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP"),
        ("empty.png", b"", "it is no image of the formats"),
        ("script.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n", "it is no image of the"),
        ("bomb.png", png_header(9000, 9000), "it has 9000 x 9000 pixels, more than 67,108,864 in all"),
        ("huge.png", png_header(100_000, 100_000), "it has more than 67,108,864 pixels in all"),
    ],
)
def test_data_jsonl_refuses_image(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    """An image whose header does not pass is told with file, line, name and reason, before anything is decoded."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    dataset = opened(write(tmp_path, {"images": [name], "text": "<image>"}))
    expected = f"train.jsonl:1: expected an item that can be read, got {name!r}: "
    for use in (lambda: dataset.infos(0), lambda: dataset.raw(0, 0)):
        with pytest.raises(DataError, match=re.escape(expected) + ".*" + re.escape(message)):
            use()


def test_data_jsonl_refuses_folder_as_image(tmp_path: Path) -> None:
    """A folder is no image, nor is the folder of the file itself."""
    dataset = opened(write(tmp_path, {"images": ["."], "text": "<image>"}))
    with pytest.raises(DataError, match=r"got '\.': there is no such file\. Mend it or take it out;"):
        dataset.infos(0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_data_jsonl_finds_damaged_pixels_when_decoding(tmp_path: Path, kind: str) -> None:
    """A file cut short has a size, and is told with file and line when its pixels are asked for."""
    whole = tmp_path / "whole"
    Image.effect_noise((64, 64), 90).convert("RGB").save(whole, format=kind)
    raw = whole.read_bytes()
    (tmp_path / "a.img").write_bytes(raw[: len(raw) * 2 // 3])
    dataset = opened(write(tmp_path, {"images": ["a.img"], "text": "<image>"}))
    if kind != "WEBP":  # its reader looks at the whole file at once
        assert dataset.infos(0)[0].size == (64, 64)
    with pytest.raises(DataError, match=HERE + r"expected an item that can be read, got 'a\.img': "):
        dataset.raw(0, 0)


@pytest.mark.parametrize(
    ("text", "images", "counts"), [("a", 1, "0 in the text for 1"), ("<image> <image>", 1, "2 in")]
)
def test_data_jsonl_refuses_unequal_counts(tmp_path: Path, text: str, images: int, counts: str) -> None:
    """Placeholders that are not as many as images are told with file and line when the sample is laid out."""
    picture(tmp_path / "a.png")
    path = write(tmp_path, {"images": ["a.png"] * images, "text": text})
    expected = f"{path}:1: expected one placeholder <image> for each item of modality 'image', got {counts}"
    with pytest.raises(DataError, match=re.escape(expected)):
        lay_out(opened(path), 0, tokenizer=TOKENIZER, rows={"image": lambda size: 1}, max_tokens=9)


def test_data_jsonl_file_that_vanishes(tmp_path: Path) -> None:
    """A file that is gone after opening is told at the line that was wanted."""
    path = write(tmp_path, {"text": "a"})
    dataset = opened(path)
    Path(path).unlink()
    with pytest.raises(DataError, match=HERE + "expected a file that stays readable, got .*No such file"):
        dataset.tokens(0)


def test_data_jsonl_tries_again_where_the_file_system_fails(tmp_path: Path) -> None:
    """A line is read at the third attempt; without success at the fourth the run ends, by no fault of the line."""
    dataset = opened(write(tmp_path, {"text": "a"}, {"text": "b"}))
    with failing_files(tmp_path, 2) as waits:
        assert TOKENIZER.decode(dataset.tokens(0)[:-1]) == "a"
    assert waits == [0.1, 0.5]
    expected = r"train\.jsonl:2: expected a file system that can be read, got \[Errno 5\] Input/output error"
    with failing_files(tmp_path, 99) as waits, pytest.raises(RunError, match=expected):
        dataset.tokens(1)
    assert waits == [0.1, 0.5, 2.0]


def chat(path: str, **settings: Any) -> Dataset:
    """Open a file of conversations."""
    config = JsonlConfig(path=path, chat=ChatSettings(template="chatml", **settings))
    dataset = open_jsonl(config, TOKENIZER, "train")
    assert dataset is not None
    return dataset


def test_data_jsonl_reads_conversations(tmp_path: Path) -> None:
    """Beside texts; items lie in files and in data URLs, and a line's weight is that of what is learnt of it."""
    picture(tmp_path / "a.png")
    url = f"data:image/png;base64,{base64.b64encode(picture(tmp_path / 'b.png', 5, 6).read_bytes()).decode()}"
    parts = [{"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "B"}]
    path = write(tmp_path, {"messages": messages, "weight": 0.5}, {"text": "none"})
    dataset = chat(path)
    assert TOKENIZER.decode(dataset.tokens(0)) == (
        "<|im_start|>user\n<image><image><|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    )
    assert [info.size for info in dataset.infos(0)] == [(3, 4), (6, 5)]
    assert [dataset.raw(0, index).size for index in range(2)] == [(4, 3), (5, 6)]
    weights = weights_of(dataset, 0)
    assert weights is not None
    assert set(weights) == {0.0, 0.5}
    assert sum(weights) == 0.5 * len("B<|im_end|>")
    assert ends_of(dataset, 0) == (30, len(dataset.tokens(0)))
    assert (weights_of(dataset, 1), ends_of(dataset, 1)) == (None, None)


def test_data_jsonl_cuts_whole_turns(tmp_path: Path) -> None:
    """A turn that does not fit is left out with its items, unless tokens are to be cut."""
    picture(tmp_path / "a.png")
    ask = {"role": "user", "content": [{"type": "text", "text": "<"}, {"type": "image", "image": "a.png"}]}
    path = write(tmp_path, {"messages": [ask, {"role": "assistant", "content": "B"}, ask]})
    rows = {"image": lambda size: size[0] * size[1]}
    whole = lay_out(chat(path), 0, tokenizer=TOKENIZER, rows=rows, max_tokens=1000)
    assert not whole.truncated
    for room, turns, items in ((len(whole.tokens) - 1, 2, 1), (50, 1, 1), (30, 0, 0)):
        found = lay_out(chat(path), 0, tokenizer=TOKENIZER, rows=rows, max_tokens=room)
        text = TOKENIZER.decode(found.tokens.tolist())
        assert found.truncated
        assert (text.count("<|im_start|>"), len(found.items)) == (turns, items)
        assert text == "" or text.endswith("<|im_end|>\n")
        assert found.weights is not None
        assert len(found.weights) == len(found.labels) == len(found.tokens)
    cut = lay_out(chat(path, cut="tokens"), 0, tokenizer=TOKENIZER, rows=rows, max_tokens=30)
    assert len(cut.tokens) == 30


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [], "text": "a"}, "expected one of the keys 'text' and 'messages', got both."),
        ({"text": "a", "tools": []}, "expected the key 'messages' beside 'tools', got none."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "http://a/b.png"}]}]},
            ".messages[0].content[0].url: expected a path inside the folder of the data",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "name": "b"}]},
            ": expected a conversation that can be encoded, got the template 'chatml' does not read 'name'; choose",
        ),
    ],
)
def test_data_jsonl_refuses_conversations(tmp_path: Path, line: Any, message: str) -> None:
    """With file and line, and the keys on the way."""
    path = write(tmp_path, line)
    with pytest.raises(DataError) as caught:
        chat(path).tokens(0)
    assert str(caught.value).startswith(f"{path}:1")
    assert message in str(caught.value)

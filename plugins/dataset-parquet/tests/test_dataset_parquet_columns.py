"""Columns as the field writes them: the samples are those of the same records as lines of jsonl."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from parquet_tables import CHAT, TOKENIZER, facts, opened, opened_folder, png, write, write_stream

from mimo.data import DATASETS, Dataset
from mimo.hooks import ConfigError, DataError, discover

CLIP = b"RIFF, or what a clip may be"
TURNS = [{"role": "user", "content": "<image> what is it"}, {"role": "assistant", "content": "ä seven"}]
LLAVA = [{"from": "human", "value": "<image> what is it"}, {"from": "gpt", "value": "ä seven"}]
PARTS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "seven"}]},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds"}}]


def jsonl(folder: Path, *lines: Mapping[str, Any]) -> Dataset:
    """Open records as lines of jsonl."""
    folder.mkdir(exist_ok=True)
    path = folder / "same.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    spec = discover(DATASETS).find("jsonl", where="data.plugin")
    dataset = spec.open(spec.config(path=str(path), chat=CHAT), TOKENIZER, "train")
    assert dataset is not None
    return dataset


def assert_same(folder: Path, table: pa.Table, *lines: Mapping[str, Any], **settings: Any) -> None:
    """Compare a table in both formats with the lines that say the same."""
    wanted = jsonl(folder, *lines)
    write_stream(folder / "saved" / "a.arrow", table)
    (folder / "saved" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}], "_split": null}')
    columns = settings.get("columns", {})
    for found in (
        opened(write(folder / "a.parquet", table), **settings),
        opened_folder_with(folder, columns, settings),
    ):
        assert len(found) == len(wanted) == len(lines)
        for sample in range(len(lines)):
            assert facts(found, sample) == facts(wanted, sample)


def opened_folder_with(folder: Path, columns: Mapping[str, Any], settings: Mapping[str, Any]) -> Dataset:
    """Open the saved folder with the same settings; its items lie in it too."""
    from mimo_dataset_parquet import ColumnSettings

    for item in [*folder.glob("*.png"), *folder.glob("*.wav")]:
        (folder / "saved" / item.name).write_bytes(item.read_bytes())
    return opened_folder(folder / "saved", **{**settings, "columns": ColumnSettings(**columns)})


def test_parquet_texts_with_pictures_by_path(tmp_path: Path) -> None:
    """Texts, lists of paths, clips, weights; a null is as if there were no column, and other columns are ignored."""
    (tmp_path / "a.png").write_bytes(png(7))
    (tmp_path / "b.png").write_bytes(png(9, 5, 6))
    (tmp_path / "c.wav").write_bytes(CLIP)
    table = pa.table(
        {
            "id": [1, 2, 3],
            "text": ["<image> ä <image>", "none", "<audio> heard"],
            "images": [["a.png", "b.png"], None, []],
            "audio": [None, None, "c.wav"],
            "weight": [0.25, None, 2.0],
        }
    )
    assert_same(
        tmp_path,
        table,
        {"text": "<image> ä <image>", "images": ["a.png", "b.png"], "weight": 0.25},
        {"text": "none"},
        {"text": "<audio> heard", "images": [], "audio": ["c.wav"], "weight": 2},
    )


@pytest.mark.parametrize("column", ["image", "images"])
def test_parquet_pictures_by_bytes(tmp_path: Path, column: str) -> None:
    """An image is bytes, or the struct of bytes and path that `datasets` has; the path counts where bytes are null."""
    (tmp_path / "b.png").write_bytes(png(9, 5, 6))
    (tmp_path / "a.png").write_bytes(png(7))
    lines = [{"text": "<image> a", "images": ["a.png"]}, {"text": "<image> b", "images": ["b.png"]}]
    structs = [{"bytes": png(7), "path": "elsewhere/a.png"}, {"bytes": None, "path": "b.png"}]
    for values in (structs, [png(7), png(9, 5, 6)]):
        pictures = values if column == "image" else [[value] for value in values]
        assert_same(tmp_path, pa.table({"text": ["<image> a", "<image> b"], column: pictures}), *lines)


@pytest.mark.parametrize("name", ["messages", "conversations"])
@pytest.mark.parametrize("turns", [TURNS, LLAVA, PARTS], ids=["roles", "llava", "parts"])
@pytest.mark.parametrize("form", ["structs", "json"])
def test_parquet_conversations(tmp_path: Path, name: str, turns: list[Any], form: str) -> None:
    """Lists of structs or JSON in a text, with LLaVA's names too; keys that are null in a struct are not there."""
    (tmp_path / "a.png").write_bytes(png(7))
    wanted = TURNS if turns is LLAVA else turns
    table = pa.table(
        {
            name: [turns if form == "structs" else json.dumps(turns)],
            "image": [{"bytes": png(7), "path": None}],
            "weight": [0.5],
        }
    )
    assert_same(tmp_path, table, {"messages": wanted, "images": ["a.png"], "weight": 0.5})


def test_parquet_conversations_that_name_their_pictures(tmp_path: Path) -> None:
    """A part of a content may hold bytes or a path, as a struct or alone."""
    (tmp_path / "a.png").write_bytes(png(7))
    url = "data:image/png;base64," + base64.b64encode(png(8)).decode()
    parts = [{"type": "image", "image": {"bytes": png(8), "path": None}}, {"type": "text", "text": "and"}]
    parts += [{"type": "image", "image": {"bytes": None, "path": "a.png"}}]
    said = [{"type": "image", "image": url}, {"type": "text", "text": "and"}, {"type": "image", "image": "a.png"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "two"}]}
    table = pa.table({"messages": [[{"role": "user", "content": parts}, answer]]})
    assert_same(tmp_path, table, {"messages": [{"role": "user", "content": said}, answer]})


def test_parquet_conversations_as_lists_by_key(tmp_path: Path) -> None:
    """Older versions of `datasets` stored a list of structs as a struct of lists."""
    kind = pa.struct([("role", pa.list_(pa.string())), ("content", pa.list_(pa.string()))])
    value = {"role": ["user", "assistant"], "content": ["a", "b"]}
    table = pa.table({"messages": pa.array([value], kind)})
    assert_same(
        tmp_path, table, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )


@pytest.mark.parametrize("form", ["structs", "json"])
@pytest.mark.parametrize("column", ["roles", "parts"])
def test_parquet_roles(tmp_path: Path, form: str, column: str) -> None:
    """A struct of a list for each modality, or JSON in a text; a null is as if nothing were said, whatever holds it."""
    (tmp_path / "a.png").write_bytes(png(7))
    (tmp_path / "c.wav").write_bytes(CLIP)
    values = [{"image": ["output"], "audio": None}, None, {"image": None, "audio": ["both"]}]
    table = pa.table(
        {
            "text": ["a <image>", "<image> b", "<audio> c <image>"],
            "images": [["a.png"]] * 3,
            "audio": [[], None, ["c.wav"]],
            column: values if form == "structs" else ['{"image": ["output"]}', None, '{"audio": ["both"]}'],
        }
    )
    assert_same(
        tmp_path,
        table,
        {"text": "a <image>", "images": ["a.png"], "roles": {"image": ["output"]}},
        {"text": "<image> b", "images": ["a.png"]},
        {"text": "<audio> c <image>", "images": ["a.png"], "audio": ["c.wav"], "roles": {"audio": ["both"]}},
        columns={} if column == "roles" else {"roles": column},
    )


def test_parquet_roles_in_messages(tmp_path: Path) -> None:
    """A part of a content may have one; where it is null, there is none."""
    (tmp_path / "a.png").write_bytes(png(7))
    parts = [{"type": "image", "image": "a.png", "role": role} for role in ("output", None)]
    said = [{"type": "image", "image": "a.png", "role": "output"}, {"type": "image", "image": "a.png"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "two"}]}
    table = pa.table({"messages": [[{"role": "user", "content": parts}, answer]]})
    assert_same(tmp_path, table, {"messages": [{"role": "user", "content": said}, answer]})


@pytest.mark.parametrize(
    "tools", [[TOOLS], [json.dumps(TOOLS)], [None], [[]]], ids=["structs", "json", "null", "empty"]
)
def test_parquet_tools(tmp_path: Path, tools: list[Any]) -> None:
    """Tools are read as messages are; a template without tools refuses them, and none are none."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    table = pa.table({"messages": [turns], "tools": tools})
    if tools[0]:
        with pytest.raises(DataError, match=r"a\.parquet:row 0: .*'tools'"):
            opened(write(tmp_path / "a.parquet", table)).tokens(0)
    else:
        assert_same(tmp_path, table, {"messages": turns})


def test_parquet_columns_of_other_names(tmp_path: Path) -> None:
    """Settings name columns, of items of other modalities too; what is named counts before what usually is."""
    (tmp_path / "a.png").write_bytes(png(7))
    (tmp_path / "s.wav").write_bytes(CLIP)
    table = pa.table(
        {
            "text": ["not this"],
            "caption": ["<image> <sonar> a"],
            "picture.file": ["a.png"],
            "picture": [{"file": "not this"}],
            "echo": [["s.wav"]],
            "share": pa.array([2], pa.int8()),
        }
    )
    columns = {"text": "caption", "images": "picture.file", "items": {"sonar": "echo"}, "weight": "share"}
    line = {"text": "<image> <sonar> a", "images": ["a.png"], "items": {"sonar": ["s.wav"]}, "weight": 2}
    assert_same(tmp_path, table, line, columns=columns)


def test_parquet_captions_take_a_prefix(tmp_path: Path) -> None:
    """A caption has no placeholder, and the setting puts it before each."""
    (tmp_path / "a.png").write_bytes(png(7))
    table = pa.table({"text": ["a cat"], "image": ["a.png"]})
    assert_same(tmp_path, table, {"text": "<image>a cat", "images": ["a.png"]}, prefix="<image>")
    with pytest.raises(
        ConfigError, match=r"data\.prefix: expected none, since the samples are conversations, got '<im"
    ):
        opened(write(tmp_path / "b.parquet", {"messages": [[{"role": "user", "content": "a"}]]}), prefix="<image>")


@pytest.mark.parametrize(
    ("columns", "settings", "said"),
    [
        (
            {"txt": ["a"], "id": [1]},
            {},
            r"columns: expected a column 'text', 'mess.*a\.parquet with columns 'txt', 'id'\. Did you mean 'txt'\?",
        ),
        ({"x1": ["a"]}, {}, r"with columns 'x1'\. Name the column in"),
        (
            {"caption": ["a"]},
            {"text": "captions"},
            r"columns\.text: expected one of the columns 'caption' of .*, got 'captions'\. Did you mean 'caption'\?",
        ),
        (
            {"text": ["a"]},
            {"items": {"sonar": "echo"}},
            r"data\.columns\.items\.sonar: expected one of the columns 'text' of .*, got 'echo'",
        ),
        (
            {"text": ["a"], "messages": [[{"role": "user", "content": "a"}]]},
            {},
            r"text or data\.columns\.messages: expected the name of one of the columns 'text' and 'messages' of",
        ),
        (
            {"text": ["a"], "image": ["a"], "images": [["a"]]},
            {},
            r"data\.columns\.images: expected the name of one of the columns 'images' and 'image' of",
        ),
    ],
)
def test_parquet_refuses_tables_without_samples(
    tmp_path: Path, columns: Mapping[str, Any], settings: Mapping[str, Any], said: str
) -> None:
    """Columns that are missing, misspelled or ambiguous are refused with the names that there are."""
    with pytest.raises(ConfigError, match=said):
        opened(write(tmp_path / "a.parquet", columns), columns=settings)


def test_parquet_refuses_items_of_modalities_that_have_a_column(tmp_path: Path) -> None:
    """Images are named in one way."""
    with pytest.raises(ValueError, match=r"expected the column of modality 'image' in 'images', got it in 'items'"):
        opened(tmp_path, columns={"items": {"image": "a"}})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"text": [5]}, r"expected text in 'text', got the number 5"),
        ({"text": pa.array([None], pa.string())}, r"expected the key 'text' or 'messages', got none"),
        ({"text": [b"a"]}, r"expected text in 'text', got 1 bytes"),
        ({"text": pa.array([1], pa.timestamp("ms"))}, r"got a value of type timestamp\[ms\], which is not read"),
        ({"text": ["a"], "images": [[None]]}, r"expected items in 'images', got null among them"),
        (
            {"text": ["a"], "image": [{"array": [1.5]}]},
            r"expected bytes or a path in 'images', got a struct of 'array'",
        ),
        ({"text": ["a"], "image": [7]}, r"expected paths in 'images', got the number 7"),
        ({"text": ["a"], "weight": [-1.0]}, r"expected a number from 0 to .* in 'weight', got the number -1\.0"),
        ({"text": ["a"], "weight": [float("nan")]}, r"in 'weight', got the number NaN"),
        ({"text": ["a"], "weight": ["x"]}, r"in 'weight', got the text \"x\""),
        ({"messages": ["[{"]}, r"expected JSON in 'messages', since it is a text, got something else"),
        ({"messages": [7]}, r"messages: expected an array, got 7"),
        ({"messages": [{"role": "user"}]}, r"expected a list in 'messages', got a struct of 'role'"),
        ({"messages": [{"role": ["user"], "content": ["a", "b"]}]}, r"as many values of each key .* got 1, 2 of them"),
        ({"messages": [[{"from": 1, "value": "a"}]]}, r"messages\[0\]\.role: expected a role"),
        (
            {"messages": [[{"role": "user", "content": b"ab"}]]},
            r"content: expected a text or a list of parts, got \"<byt",
        ),
        ({"text": ["a"], "roles": [["output"]]}, r"roles: expected an object, got \[\"output\"\]"),
        ({"text": ["a"], "roles": ["output"]}, r"expected JSON in 'roles', since it is a text, got something else"),
        ({"messages": [["a"]]}, r"messages\[0\]: expected an object"),
    ],
)
def test_parquet_refuses_rows_of_wrong_types(tmp_path: Path, columns: Mapping[str, Any], said: str) -> None:
    """Each by its file and row."""
    dataset = opened(write(tmp_path / "a.parquet", columns))
    with pytest.raises(DataError, match=r"a\.parquet:row 0.*" + said):
        facts(dataset, 0)


def test_parquet_keeps_paths_inside_its_folder(tmp_path: Path) -> None:
    """A path in a table may leave the folder as little as one in a line of jsonl."""
    (tmp_path / "a.png").write_bytes(png(7))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "a.png")
    paths = ["../a.png", str(tmp_path / "a.png"), "link.png", "a\0b.png"]
    dataset = opened(write(tmp_path / "in" / "a.parquet", {"text": ["<image> a"] * 4, "image": paths}))
    for sample, said in enumerate([r"which leaves it"] * 3 + [r"expected an item that can be read"]):
        with pytest.raises(DataError, match=rf"a\.parquet:row {sample}: .*{said}"):
            dataset.raw(sample, 0)

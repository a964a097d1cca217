"""Samples as keys and members, for shards: from jsonl and from folders, and every refusal with its place."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mimo.data import read_members
from mimo.hooks import ConfigError, DataError


def picture(path: Path) -> bytes:
    """Write a grey image and return its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 3), 7).save(path)
    return path.read_bytes()


def lines(folder: Path, *records: Any) -> Path:
    """Write a jsonl file."""
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def test_data_members_of_lines_name_items_as_members(tmp_path: Path) -> None:
    """Wherever a line names them: in lists, in items of other modalities, in parts of messages; data URLs stay."""
    (tmp_path / "sub").mkdir()
    for name in ("a.PNG", "sub/b.jpg", "c"):
        (tmp_path / name).write_bytes(b"an item, of which nothing is read")
    url = f"data:image/png;base64,{base64.b64encode(picture(tmp_path / 'x.png')).decode()}"
    parts = [
        {"type": "image_url", "image_url": {"url": "sub/b.jpg", "detail": "low"}},
        {"type": "image", "image": url},
        {"type": "image", "path": "a.PNG", "role": "output"},
        {"type": "text", "text": "ä"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "B"}]
    path = lines(
        tmp_path,
        {"images": ["a.PNG", "sub/b.jpg"], "items": {"sonar": ["c"]}, "text": "<image><image><sonar>", "weight": 2}
        | {"roles": {"image": ["input", "output"]}},
        {"messages": messages, "tools": []},
        {"text": "none"},
    )
    (key, first), (_, second), (last, third) = read_members(path)
    assert (key, last) == ("000000001", "000000003")
    assert first.keys() == {"json", "0.png", "1.jpg", "2.bin"}
    assert json.loads(bytes(first["json"])) == {
        "audio": [],  # so that no member is taken for a clip
        "images": ["0.png", "1.jpg"],
        "items": {"sonar": ["2.bin"]},
        "roles": {"image": ["input", "output"]},
        "text": "<image><image><sonar>",
        "weight": 2,
    }
    assert [first[name] for name in ("0.png", "1.jpg", "2.bin")] == [
        tmp_path.resolve() / name for name in ("a.PNG", "sub/b.jpg", "c")
    ]
    written = json.loads(bytes(second["json"]))
    assert written["tools"] == []
    assert written["messages"][1] == messages[1]
    assert written["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "0.jpg", "detail": "low"}},
        parts[1],
        {"type": "image", "path": "1.png", "role": "output"},
        parts[3],
    ]
    assert third.keys() == {"json"}


def test_data_members_of_a_folder_are_files_of_one_name(tmp_path: Path) -> None:
    """Up to the first dot, in folders inside too; in the order of their names, hidden files left out."""
    for name in ("b/dog.png", "cat.left.PNG", "cat.right.png", ".cache/x.png"):
        picture(tmp_path / name)
    (tmp_path / "cat.txt").write_text("a cat")
    (tmp_path / "b" / "dog.json").write_text('{"text": "a dog"}')
    assert [(key, sorted(members)) for key, members in read_members(tmp_path)] == [
        ("b/dog", ["json", "png"]),
        ("cat", ["left.png", "right.png", "txt"]),
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a", "image": []}, "expected only the keys"),
        ({"images": ["../x.png"], "text": "<image>"}, "expected paths relative to the file"),
        ({"images": ["a\0b"], "text": "<image>"}, "expected items that can be read, got embedded null byte"),
        ({"images": ["none.png"], "text": "<image>"}, "got 'none.png': there is no such file"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "http://a/b.png"}]}]},
            "nothing is fetched",
        ),
    ],
)
def test_data_members_of_lines_are_refused_by_line(tmp_path: Path, record: Any, message: str) -> None:
    """What is no record, and paths that leave the folder."""
    path = lines(tmp_path, {"text": "fine"}, record)
    with pytest.raises(DataError, match=re.escape(f"{path}:2") + ".*" + re.escape(message)):
        list(read_members(path))


def test_data_members_have_suffixes_that_are_read_again(tmp_path: Path) -> None:
    """An item whose suffix means a text, or what is never read, is one all the same to its encoder."""
    for name in ("a.txt", "b.npy", "c.JSON"):
        (tmp_path / name).write_bytes(b"an item")
    path = lines(tmp_path, {"items": {"sonar": ["a.txt", "b.npy", "c.JSON"]}, "text": "<sonar><sonar><sonar>"})
    ((_, members),) = read_members(path)
    assert members.keys() == {"json", "0.bin", "1.bin", "2.bin"}
    assert json.loads(bytes(members["json"]))["items"] == {"sonar": ["0.bin", "1.bin", "2.bin"]}


def test_data_members_of_linked_folders_are_refused(tmp_path: Path) -> None:
    """Nothing is passed over without a word; links in hidden folders are, as all is there."""
    folder = tmp_path / "data"
    (folder / ".hidden").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / ".hidden" / "more").symlink_to(tmp_path)
    assert [key for key, _ in read_members(folder)] == ["a"]
    (folder / "more").symlink_to("../data")
    with pytest.raises(DataError, match=r"data/more: expected a folder itself, got a link to '\.\./data'\. Move the"):
        list(read_members(folder))


def test_data_members_of_folders_are_refused_by_name(tmp_path: Path) -> None:
    """An item without a text, a link that leads out, an empty folder, and what isn't there."""
    folder, empty = tmp_path / "data", tmp_path / "empty"
    empty.mkdir()
    picture(folder / "cat.png")
    with pytest.raises(DataError, match=r"data/cat: expected a text or a record beside each item, .*, got \.png"):
        list(read_members(folder))
    (tmp_path / "out.txt").write_text("a cat")
    (folder / "cat.txt").symlink_to(tmp_path / "out.txt")
    with pytest.raises(DataError, match=r"data/cat: expected paths relative to the folder .*, got 'cat\.txt'"):
        list(read_members(folder))
    (folder / "cat.txt").unlink()
    (folder / "cat.txt").write_text("a cat")
    picture(folder / "cat.PNG")
    with pytest.raises(DataError, match=r"data/cat: expected each extension once, got two files \.png\. Rename one"):
        list(read_members(folder))
    with pytest.raises(ConfigError, match=r"SOURCE: expected a folder with files, got '.*empty'"):
        list(read_members(empty))
    with pytest.raises(ConfigError, match=r"SOURCE: expected an existing jsonl file, or a folder, got '.*nowhere'"):
        list(read_members(tmp_path / "nowhere"))
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="SOURCE: expected a jsonl file with at least one sample"):
        list(read_members(tmp_path / "none.jsonl"))

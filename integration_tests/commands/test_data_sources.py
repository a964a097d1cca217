"""The same samples from any source: built into shards, in a table, in a mixture, indexed; trained on equally."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import here, losses, mimo, write_lines
from PIL import Image

SETTINGS = """
[run]
name = "sources"
steps = 3
global_batch = 4
[data]
plugin = "jsonl"
path = "train.jsonl"
max_tokens = 256
chat = { template = "chatml" }
[modules.vision]
plugin = "vit"
ranks = "0"
config = { width = 16, layers = 1, heads = 2, patch = 8, channels = 3 }
[modules.language]
plugin = "decoder"
ranks = "0"
config = { hidden = 16, layers = 2, heads = 2, intermediate = 16 }
[checkpoint]
interval = 0
"""
SHARDS = ("data.plugin=webdataset", "data.path=shards")
TABLE = ("data.plugin=parquet", "data.path=train.parquet")
MIXTURE = """
[data]
plugin = "mixture"
max_tokens = 256
[data.sources.lines]
plugin = "jsonl"
path = "train.jsonl"
weight = 1
chat = { template = "chatml" }
[data.sources.shards]
plugin = "webdataset"
path = "shards"
weight = 2
chat = { template = "gemma" }
"""


def conversation(number: int) -> dict[str, Any]:
    """Return one about a picture, or about none."""
    parts: list[dict[str, str]] = [{"type": "text", "text": f"What is {number}?"}]
    if number % 3:
        parts.insert(0, {"type": "image", "image": f"pictures/{number}.png"})
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": f"It is {number * number}."}]
    return {"messages": messages}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Conversations as lines of jsonl and rows of parquet, and settings."""
    (tmp_path / "pictures").mkdir()
    for number in range(8):
        noise = Image.effect_noise((16 + 8 * (number % 2), 24), 90.0 + number).convert("RGB")
        noise.save(tmp_path / "pictures" / f"{number}.png")
    records = [conversation(number) for number in range(8)]
    write_lines(tmp_path / "train.jsonl", records)
    rows = [json.dumps(record["messages"]) for record in records]
    pq.write_table(pa.table({"messages": rows}), tmp_path / "train.parquet", row_group_size=3)
    (tmp_path / "sources.toml").write_text(SETTINGS, encoding="utf-8")
    ended = here("data", "build", "train.jsonl", "shards", "--shard-bytes", "4000", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, ""), ended
    return tmp_path


def train(folder: Path, name: str, *words: str) -> list[float]:
    """Train on a source and return the losses."""
    ended = mimo("train", "sources.toml", f"run.directory={name}", *words, cwd=folder)
    assert ended.code == 0, ended
    return losses(folder / name)


def test_the_same_samples_are_trained_on_equally_from_any_source(folder: Path) -> None:
    """In order, as shards change the order: from shards and tables, read from an index or not, on three ranks too."""
    assert len(list((folder / "shards").iterdir())) > 1
    expected = train(folder, "lines", "data.order=1")
    lanes = ("modules.vision.ranks=0-1", "modules.language.ranks=1-2")
    assert train(folder, "table", "data.order=1", *TABLE) == expected
    assert train(folder, "shards-1", "data.order=1", *SHARDS, *lanes) == pytest.approx(expected, rel=1e-6)
    ended = here("data", "index", "sources.toml", *SHARDS, cwd=folder)
    assert ended.code == 0, ended
    assert (folder / "shards.sizes").exists()
    assert train(folder, "shards-2", "data.order=1", *SHARDS) == expected


def test_a_mixture_is_indexed_source_by_source(folder: Path) -> None:
    """Each has an index of its own, and what is trained on doesn't depend on whether it has."""
    text = SETTINGS.replace(SETTINGS[SETTINGS.index("[data]") : SETTINGS.index("[modules.vision]")], MIXTURE)
    (folder / "sources.toml").write_text(text, encoding="utf-8")
    expected = train(folder, "without")
    ended = here("data", "index", "sources.toml", cwd=folder)
    assert ended.code == 0, ended
    for name in ("train.jsonl.lines", "train.jsonl.sizes", "shards.shards", "shards.sizes"):
        assert (folder / name).exists(), name
    assert train(folder, "with") == expected
    shown = here("check", "sources.toml", cwd=folder).printed
    assert "8 samples, 66.7% of those that are read" in shown
    with (folder / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(conversation(1)) + "\n")
    stale = here("check", "sources.toml", cwd=folder)
    assert stale.code == 2
    assert "data.sources.lines.path: expected beside it, offsets of its own lines" in stale.err


def test_a_mixture_of_one_file_read_in_two_ways_has_an_index_for_each(folder: Path) -> None:
    """Or is refused; and a source without a place of its own is left out."""
    text = SETTINGS.replace(SETTINGS[SETTINGS.index("[data]") : SETTINGS.index("[modules.vision]")], MIXTURE)
    text = text.replace('plugin = "webdataset"\npath = "shards"', 'plugin = "jsonl"\npath = "train.jsonl"')
    mock = '[data.sources.noise]\nplugin = "mock"\nheight = 16\nwidth = 16\ntext = 8\nweight = 1\n'
    (folder / "sources.toml").write_text(text.replace("[modules.vision]", f"{mock}[modules.vision]"), encoding="utf-8")
    assert here("data", "index", "sources.toml", cwd=folder).err.startswith(
        "mimo: data.sources.shards.index: expected a folder of its own, as another source reads the same data with "
    )
    words = ("sources.toml", "data.sources.shards.index=other")
    assert here("data", "index", *words, cwd=folder).code == 0
    assert here("check", *words, cwd=folder).code == 0


def test_shards_are_built_once_and_refused_where_others_are(folder: Path) -> None:
    """The same command again changes nothing; of other samples it is refused, as are formats that build nothing."""
    before = {path.name: path.read_bytes() for path in (folder / "shards").iterdir()}
    again = here("data", "build", "train.jsonl", "shards", "--shard-bytes", "4000", cwd=folder)
    assert again.printed.startswith(f"shards: {len(before)} shards of ")
    assert {path.name: path.read_bytes() for path in (folder / "shards").iterdir()} == before
    Image.new("RGB", (24, 24), "red").save(folder / "pictures" / "0.png")  # of which no sample is made
    assert here("data", "build", "train.jsonl", "shards", "--shard-bytes", "4000", cwd=folder).code == 0
    other = json.loads((folder / "train.jsonl").read_text().splitlines()[0].replace("What is 0?", "What is 9?"))
    lines = (folder / "train.jsonl").read_text().splitlines()[1:]
    write_lines(folder / "same-sizes.jsonl", [other, *map(json.loads, lines)])
    assert here("data", "build", "same-sizes.jsonl", "shards", "--shard-bytes", "4000", cwd=folder).refused(
        "shards/train-000000.tar: expected the same samples as before, got other ones."
    )
    write_lines(folder / "others.jsonl", [{"text": "another"}])
    assert here("data", "build", "others.jsonl", "shards", cwd=folder).refused("shards", "expected the same samples")
    assert here("data", "build", "train.jsonl", "out", "--format", "mock", cwd=folder).refused(
        "--format: expected a dataset plugin that writes shards, such as webdataset, got 'mock'"
    )
    assert here("data", "build", "train.jsonl", "out", "--shard-bytes", "0", cwd=folder).refused("--shard-bytes:")

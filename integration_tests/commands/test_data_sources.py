"""The same samples from any source: built into shards, in a table, in a mixture, indexed; trained on equally."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import here, losses, mimo, read_metrics, write_lines
from PIL import Image

from mimo_dataset_webdataset import write_shards

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
SAVED = ("data.plugin=huggingface", "data.path=saved")
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


def write_saved(folder: Path, table: pa.Table) -> None:
    """Write a table in two files, as `save_to_disk` of `datasets` does."""
    folder.mkdir()
    files = [{"filename": f"data-{number:05}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    for file, rows in zip(files, (table[:5], table[5:]), strict=True):
        with pa.ipc.new_stream(folder / file["filename"], table.schema) as writer:
            writer.write_table(rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Conversations as lines of jsonl, as rows of parquet and as `datasets` saves them; settings."""
    (tmp_path / "pictures").mkdir()
    for number in range(8):
        noise = Image.effect_noise((16 + 8 * (number % 2), 24), 90.0 + number).convert("RGB")
        noise.save(tmp_path / "pictures" / f"{number}.png")
    records = [conversation(number) for number in range(8)]
    write_lines(tmp_path / "train.jsonl", records)
    table = pa.table({"messages": [json.dumps(record["messages"]) for record in records]})
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=3)
    write_saved(tmp_path / "saved", table)
    shutil.copytree(tmp_path / "pictures", tmp_path / "saved" / "pictures")
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
    for name, source in {"shards": SHARDS, "train.parquet": TABLE, "saved/train": SAVED}.items():
        ended = here("data", "index", "sources.toml", *source, cwd=folder)
        assert ended.code == 0, ended
        assert (folder / f"{name}.sizes").exists()
        assert train(folder, f"indexed/{name}", "data.order=1", *source) == expected


@pytest.mark.parametrize(
    ("source", "file"), [(TABLE, "train.parquet"), (SAVED, "saved/data-00001-of-00002.arrow")], ids=["parquet", "saved"]
)
def test_an_index_of_a_table_is_stale_when_one_byte_has_changed(
    source: tuple[str, ...], file: str, folder: Path
) -> None:
    """And refused; made again, it holds."""
    words = ("sources.toml", *source)
    assert here("data", "index", *words, cwd=folder).code == 0
    assert "index      " in here("check", *words, cwd=folder).printed
    before = (folder / file).read_bytes()
    (folder / file).write_bytes(before.replace(b"It is 49.", b"It is 48.", 1))
    assert sum(old != new for old, new in zip(before, (folder / file).read_bytes(), strict=True)) == 1
    for command in ("check", "train"):
        stale = here(command, *words, cwd=folder)
        assert stale.code == 3
        assert "got one from before a change of the data. Run `mimo data index` with these settings" in stale.err
    assert here("data", "index", *words, cwd=folder).code == 0
    assert here("check", *words, cwd=folder).code == 0


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


def write_captions(folder: Path, broken: int) -> None:
    """Write 16 captions of pictures as a shard and as a table, one with damaged pixels, and settings that read them."""
    pictures = []
    for number in range(16):
        file = io.BytesIO()
        Image.effect_noise((16, 24), 90.0).convert("RGB").save(file, "PNG")
        pictures.append(file.getvalue()[: -200 if number == broken else None])
    texts = [f"It is {number}." for number in range(16)]
    samples = [
        (f"k{number}", {"txt": text.encode(), "png": picture})
        for number, (text, picture) in enumerate(zip(texts, pictures, strict=True))
    ]
    write_shards(samples, folder / "captions")
    images = [{"bytes": picture, "path": None} for picture in pictures]
    pq.write_table(pa.table({"text": texts, "image": images}), folder / "t.parquet")
    settings = (
        SETTINGS.replace('"jsonl"', '"webdataset"').replace("train.jsonl", "captions").replace("steps = 3", "steps = 8")
    )
    (folder / "captions.toml").write_text(settings, encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "file", "place"),
    [
        ((), "captions.broken", "train-000000.tar:k3"),
        (("data.plugin=parquet", "data.path=t.parquet", "data.prefix=<image>"), "t.parquet.broken", "t.parquet:row 3"),
    ],
    ids=["shards", "table"],
)
def test_an_index_that_decodes_lists_broken_items_by_their_place(
    words: tuple[str, ...], file: str, place: str, tmp_path: Path
) -> None:
    """By shard and key, and by row: printed and in a file."""
    write_captions(tmp_path, broken=3)
    assert here("data", "index", "captions.toml", *words, cwd=tmp_path).code == 0
    ended = here("data", "index", "captions.toml", *words, "--decode", cwd=tmp_path)
    assert ended.code == 3
    assert re.search(rf"^{re.escape(place)} +image 0 +expected an item that can be read, got ", ended.out, re.MULTILINE)
    assert "got 1 of 16 that are broken" in ended.err
    (listed,) = [json.loads(line) for line in (tmp_path / file).read_text(encoding="utf-8").splitlines()]
    assert (listed["sample"], listed["where"], listed["item"]) == (3, place, "image 0")


def test_a_broken_member_of_a_shard_ends_a_run_or_is_left_out(tmp_path: Path) -> None:
    """Which ends at the step that needs it; where some may be broken, it is reported once, and counted each time."""
    write_captions(tmp_path, broken=5)
    ended = mimo("train", "captions.toml", "run.directory=ends", cwd=tmp_path)
    assert ended.code == 3
    assert "train-000000.tar:k5: expected an item that can be read, got 'png': " in ended.err
    steps = len(losses(tmp_path / "ends"))
    ended = mimo("train", "captions.toml", "run.directory=leaves-out", "data.max_broken=0.1", cwd=tmp_path)
    assert ended.code == 0, ended
    assert ended.err.count("train-000000.tar:k5") == 1
    assert f"step {steps + 1} leaves out a sample. train-000000.tar:k5: expected an item" in ended.err
    broken = [step["broken"] for step in read_metrics(tmp_path / "leaves-out")[0]]
    assert 0 < steps == broken.index(1)
    assert (len(broken), sum(broken)) == (8, 2)  # in two epochs


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

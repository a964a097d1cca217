"""Folders of safetensors as others publish them: read without trusting them, written as others read them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mimo.checkpoint import (
    Source,
    Stream,
    WriteError,
    load,
    open_published,
    read_published_json,
    verify,
    write_checkpoint,
    write_safetensors,
)
from mimo.hooks import CheckpointError

TENSORS = {
    "a.weight": torch.arange(35, dtype=torch.float32).view(7, 5),
    "b": torch.randn(3, 2, 4).bfloat16(),
    "c.scale": torch.tensor(2.5, dtype=torch.float64),
    "d.ids": torch.arange(6, dtype=torch.int64),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of each tensor."""
    for module in ("_published", "_source"):
        monkeypatch.setattr(f"mimo.checkpoint.{module}.CHUNK_BYTES", 24)


def streams(tensors: Mapping[str, Tensor]) -> dict[str, Stream]:
    """Each tensor in chunks of two elements."""

    def chunks(tensor: Tensor) -> Callable[[], Iterator[Tensor]]:
        return lambda: iter(tensor.reshape(-1).split(2))

    return {name: Stream(dtype=one.dtype, shape=tuple(one.shape), chunks=chunks(one)) for name, one in tensors.items()}


def published(folder: Path, tensors: Mapping[str, Tensor] = TENSORS, *, shard_bytes: int = 1 << 20) -> Path:
    """Write a folder."""
    return write_safetensors(folder, streams(tensors), texts={"config.json": "{}"}, shard_bytes=shard_bytes)


def refused(folder: Path) -> str:
    """Return why a folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        open_published(folder)
    return str(caught.value)


@pytest.mark.parametrize("shard_bytes", [1 << 20, 64])
def test_a_folder_is_what_the_library_reads(tmp_path: Path, shard_bytes: int) -> None:
    """One file, or shards with an index; each tensor once, in its own dtype."""
    folder = published(tmp_path / "out", shard_bytes=shard_bytes)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes > 64)
    found = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in TENSORS.items())
    if shard_bytes == 64:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file in files for name in load_file(folder / file)}
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in TENSORS.values())
    assert (folder / "config.json").read_text() == "{}"


def test_nothing_is_left_of_a_folder_that_could_not_be_written(tmp_path: Path) -> None:
    """Neither under its name nor under another; one that exists is not touched."""

    def failing() -> Iterator[Tensor]:
        yield torch.zeros(2)
        raise OSError(28, "No space left on device")

    stream = Stream(dtype=torch.float32, shape=(4,), chunks=failing)
    with pytest.raises(WriteError) as refused:
        write_safetensors(tmp_path / "out", {"a": stream}, texts={})
    assert str(refused.value) == (
        f"{tmp_path / 'out'}: expected no failure, got OSError: [Errno 28] No space left on device. "
        "Nothing is left of it. Make room, or look at the disk, and write it again."
    )
    assert list(tmp_path.iterdir()) == []
    published(tmp_path / "out")
    with pytest.raises(CheckpointError, match="expected a new folder, got one that exists"):
        published(tmp_path / "out")


def test_files_beside_come_with_the_folder_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in it before it has its name; an unreadable one is named, and nothing is left of the folder."""
    (tmp_path / "there").mkdir()
    small = tmp_path / "there" / "tokenizer.json"
    small.write_text("{}")
    seen: list[set[str]] = []
    rename = Path.rename

    def look(path: Path, target: Path) -> Path:
        seen.append({file.name for file in path.iterdir()})
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look)
    write_safetensors(tmp_path / "out", streams(TENSORS), texts={"config.json": "{}"}, copied=[small])
    assert seen == [{"model.safetensors", "config.json", "tokenizer.json"}]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    for gone in (tmp_path / "there", tmp_path / "there" / "none.json"):
        with pytest.raises(CheckpointError, match=f"{gone.name}: expected a file that can be read, got "):
            write_safetensors(tmp_path / "again", streams(TENSORS), texts={}, copied=[gone])
    assert {path.name for path in tmp_path.iterdir()} == {"there", "out"}


def test_a_folder_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """Under no name."""

    def stopped() -> Iterator[Tensor]:
        yield torch.zeros(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path / "out", {"a": Stream(dtype=torch.float32, shape=(4,), chunks=stopped)}, texts={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shard_bytes", [1 << 20, 64])
def test_elements_of_a_folder_are_read_in_chunks(tmp_path: Path, shard_bytes: int) -> None:
    """Any range, through links too, as a download cache has them."""
    published(tmp_path / "real", shard_bytes=shard_bytes)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in (tmp_path / "real").iterdir():
        (linked / file.name).symlink_to(file)
    folder = open_published(linked)
    for name, tensor in TENSORS.items():
        flat = tensor.reshape(-1)
        assert (folder.tensors[name].shape, folder.tensors[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        for begin, end in ((0, len(flat)), (len(flat) // 3, len(flat)), (1, 1)):
            chunks = [chunk.clone() for chunk in folder.elements(name, begin, end)]
            assert all(chunk.nbytes <= 24 for chunk in chunks)
            assert torch.equal(torch.cat([flat[:0], *chunks]), flat[begin:end])


def test_a_checkpoint_is_written_from_streams_and_read_as_elements(tmp_path: Path) -> None:
    """It loads and verifies like any other, and a step that exists is refused."""
    about: dict[str, Any] = {"config": {"a": 1}, "topology": {}, "common": {"told": [1, "x"]}}
    step = write_checkpoint(tmp_path, streams(TENSORS), shard_bytes=64, **about)
    assert (step.name, verify(step).tensors) == ("step_00000000", len(TENSORS))
    tree = {name: torch.zeros_like(one) for name, one in TENSORS.items()}
    load(step, {"a": {"weight": tree["a.weight"]}, "b": tree["b"], "c": {"scale": tree["c.scale"]}})
    assert all(torch.equal(tree[name], TENSORS[name]) for name in ("a.weight", "b", "c.scale"))
    with Source(step) as source:
        assert source.manifest.common == {"told": [1, "x"]}
        found = torch.cat([chunk.clone() for chunk in source.elements("a.weight", 3, 29)])
    assert torch.equal(found, TENSORS["a.weight"].reshape(-1)[3:29])
    with pytest.raises(CheckpointError, match="expected a folder without this step, got one that holds it"):
        write_checkpoint(tmp_path, streams(TENSORS), **about)


def test_folders_without_safetensors_are_refused(tmp_path: Path) -> None:
    """Above all pickles, with what to do."""
    assert refused(tmp_path / "none").endswith("none: expected a folder, got nothing there.")
    assert refused(tmp_path).endswith(
        "expected model.safetensors, or shards with model.safetensors.index.json, got neither."
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    text = refused(tmp_path)
    assert "got pytorch_model.bin, a pickle, which can run any program when it is read, and is never opened" in text
    assert "save_pretrained writes safetensors" in text


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    """At once."""
    folder = published(tmp_path / "out", shard_bytes=64)
    files = sorted(folder.glob("*.safetensors"))
    for file in files[1:]:
        file.unlink()
    text = refused(folder)
    assert f"expected the {len(files)} shards that model.safetensors.index.json names" in text
    assert f"{len(files) - 1} of them missing: {', '.join(file.name for file in files[1:])}. Fetch them too." in text


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (
            {"weight_map": {"a": "../model-1.safetensors"}},
            "plain names of .safetensors files in this folder, got '../m",
        ),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "plain names of .safetensors files in this folder"),
        ({"weight_map": {"a": "model.bin"}}, "plain names of .safetensors files in this folder, got 'model.bin'"),
        ({"weight_map": {"a": 3}}, "plain names of .safetensors files"),
        ({"weight_map": {}}, "expected a weight_map from names of tensors to files, got {}"),
        ([], "expected a JSON object, got list"),
        ({"weight_map": {"x": "s.safetensors"}}, "expected an index of all that its shards hold, got none of a in s"),
        (
            {"weight_map": {"a": "s.safetensors", "x": "s.safetensors"}},
            "expected tensors that its shards hold, got 1 that are not there: x",
        ),
    ],
)
def test_an_index_is_not_trusted(tmp_path: Path, index: Any, text: str) -> None:
    """It names plain files of its own folder and what is in them, or is refused."""
    (tmp_path / "s.safetensors").write_bytes(header(a=entry()))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert text in refused(tmp_path)


def header(**entries: Any) -> bytes:
    """Return a file of eight bytes of data with this header."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    """Return the header's entry of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected a length of 2 to 2 bytes, as the file has 0, got 0"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "expected a length of 2 to 2 bytes, as the file has 10"),
        (b"\x02" + bytes(7) + b"[]", "header: expected a JSON object, got list"),
        (b"\x02" + bytes(7) + b"{{", "header: expected JSON"),
        (header(a=entry(shape=[3])), "a: expected a range of 12 bytes, as shape and dtype say, got [0, 8]"),
        (header(a=entry(shape=[1 << 61, 8])), "a: expected a range of"),
        (header(a=entry(shape=[-2])), "a: expected a shape of up to 64 sizes, got [-2]"),
        (header(a=entry(shape=[1] * 65)), "a: expected a shape of up to 64 sizes"),
        (header(a=entry(dtype="F4")), "a: expected a dtype of F64"),
        (
            header(a=entry(span=[8, 16])),
            "a: expected data that begin at byte 0, where those before them end, got at",
        ),
        (header(a=entry(), b=entry()), "b: expected data that begin at byte 8"),
        (header(a=entry(shape=[1], span=[0, 4])), "bytes, as its header says, got"),
        (header(a=[1]), "a: expected dtype, shape and data_offsets, got [1]"),
        (
            (text := b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}')
            and len(text).to_bytes(8, "little") + text + bytes(8),
            "'a' is given twice",
        ),
    ],
)
def test_a_header_is_not_trusted(tmp_path: Path, data: bytes, text: str) -> None:
    """Its numbers go with each other and with the file, or it is refused; nothing large is allocated."""
    (tmp_path / "model.safetensors").write_bytes(data)
    assert text in refused(tmp_path)


def test_a_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    """Since what is missing would be made up otherwise; a pipe is refused too, and not waited for."""
    folder = published(tmp_path / "out")
    opened = open_published(folder)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4)
    with pytest.raises(CheckpointError, match=r"expected at least \d+ bytes, got \d+"):
        list(opened.elements("b", 0, 24))
    assert "bytes, as its header says, got" in refused(folder)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "expected a regular file, got something else" in refused(folder)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ('{"a": 1, "a": 2}', "expected JSON, got 'a' is given twice"),
        ("[" * 100_000, "expected JSON"),
        ("3", "expected a JSON object, got int"),
        (None, "expected a file that can be read, got FileNotFoundError"),
    ],
)
def test_a_config_is_not_trusted(tmp_path: Path, data: str | None, text: str) -> None:
    """It is one JSON object that gives each name once."""
    if data is not None:
        (tmp_path / "config.json").write_text(data)
    with pytest.raises(CheckpointError) as caught:
        read_published_json(tmp_path / "config.json")
    assert text in str(caught.value)

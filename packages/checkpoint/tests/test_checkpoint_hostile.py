"""Files that somebody made to do harm: refused before anything is run, and before anything of their size is held."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from mimo.checkpoint import diff, latest, load, read_manifest, reshard, save, verify
from mimo.hooks import CheckpointError

ABOUT: dict[str, Any] = {"config": {}, "topology": {}}
MANIFEST = "manifest.json"
SHARD = "rank_00000_0000.safetensors"
SPARE_BYTES = 192 << 20  # what a child may take beside what it has, libraries that it loads included


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        """Return what an unpickler would call."""
        return os.mkdir, (str(self.path),)


def in_child(work: Callable[[], None]) -> None:
    """Do ``work`` in a child that can't take much more memory than it has, nor much time."""
    child = os.fork()
    if not child:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + SPARE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            work()
        except BaseException:  # noqa: BLE001  # whatever it is, the child ends here
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refuse(step: Path, name: str, message: str = "") -> None:
    """Look into a step in every way; each must refuse it by the name of the file."""
    acts: tuple[Callable[[], Any], ...] = (
        lambda: load(step, {"x": torch.ones(4)}),
        lambda: verify(step),
        lambda: reshard(step, step.parent / "again"),
        lambda: diff(step, step),
    )

    def work() -> None:
        for act in acts:
            with pytest.raises(CheckpointError, match=message) as caught:
                act()
            assert name in str(caught.value)

    in_child(work)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    return save(tmp_path, 1, {"x": torch.zeros(4)}, **ABOUT)


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """Return a zip archive that unpacks to more than a child may take, with the names that PyTorch gives."""
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x")
        with archive.open("archive/data/0", "w", force_zip64=True) as file:
            for _ in range(2 * SPARE_BYTES >> 20):
                file.write(bytes(1 << 20))
    return found.getvalue()


@pytest.mark.parametrize("name", [MANIFEST, SHARD])
@pytest.mark.parametrize("kind", ["pickle", "torch", "zip", "sparse", "fifo", "device", "link", "folder"])
def test_other_files_are_refused(step: Path, name: str, kind: str, bomb: bytes) -> None:
    """Pickles aren't run, archives not unpacked, holes not read, and what is no file isn't waited for."""
    path, trace = step / name, step.parent / "trace"
    size = path.stat().st_size
    path.unlink()
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Runs(trace)).ljust(size, b"\0"))
    elif kind == "torch":
        torch.save({"x": Runs(trace)}, path)
    elif kind == "zip":
        path.write_bytes(bomb)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.write(b'{"digest":"' + b"0" * 32 + b'","body":')
            file.truncate(2 * SPARE_BYTES)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        (step.parent / "outside").write_bytes(b"x" * size)
        path.symlink_to(step.parent / "outside")
    else:
        path.mkdir()
    refuse(step, name)
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["fifo", "device", "pickle", "paths"])
def test_a_strange_latest_is_not_followed(step: Path, kind: str) -> None:
    """It is not waited for, read to its end, run, or taken for a path."""
    path, trace = step.parent / "latest", step.parent / "trace"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(pickle.dumps(Runs(trace)) if kind == "pickle" else b"../../step_00000001\n")

    def work() -> None:
        assert latest(step.parent) == step

    in_child(work)
    assert not trace.exists()


def give_header(step: Path, header: bytes) -> None:
    """Give a shard another header, and the manifest all that belongs to it."""
    path = step / SHARD
    data = path.read_bytes()[read_manifest(step).shards[SHARD].header_bytes :]
    path.write_bytes(header + data)

    def change(body: Any) -> None:
        body["shards"][SHARD]["bytes"] = len(header) + len(data)
        body["shards"][SHARD]["header"] = {"bytes": len(header), "checksum": xxhash.xxh3_64_hexdigest(header)}
        body["tensors"]["x"]["pieces"][0]["bytes"] = [len(header), len(header) + len(data)]

    rewrite(step, change)


ENTRY = b'"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{" + ENTRY + b"}", ""),
        (b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,12]}}', r"expected \('F32', \(4,\), \d+, \d+\) for x"),
        (b'{"x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}', "for x, got"),
        (b'{"x":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}', "for x, got"),
        (b'{"y":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "for x, got None"),
        (b"{" + ENTRY + b"," + ENTRY + b"}", "'x' is given twice"),
        (b"{" + ENTRY + b',"y":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}', "expected None for y"),
        (b'{"a":' * 50_000, "too many levels of nesting"),
        (b"\x80\x04\x95", "expected safetensors, got UnicodeDecodeError"),
        (b"[]", "expected safetensors, got AttributeError"),
    ],
)
def test_headers_that_lie_are_found(step: Path, text: bytes, message: str) -> None:
    """`verify` compares them with the manifest, which alone is followed on loading."""
    text = text.ljust(-(-len(text) // 8) * 8)
    give_header(step, len(text).to_bytes(8, "little") + text)

    def work() -> None:
        target = torch.ones(4)
        load(step, {"x": target})
        assert not target.any()
        if message:
            with pytest.raises(CheckpointError, match=message):
                verify(step)
        else:
            verify(step)

    in_child(work)


@pytest.mark.parametrize("length", [0, 1 << 20, (1 << 63) - 1, (1 << 64) - 1])
def test_absurd_header_lengths_are_found(step: Path, length: int) -> None:
    """The length field is not believed."""
    text = b"{" + ENTRY + b"} "
    give_header(step, length.to_bytes(8, "little") + text)

    def work() -> None:
        with pytest.raises(CheckpointError, match=f"{SHARD} header: expected safetensors"):
            verify(step)

    in_child(work)


def shift(piece: Any, by: int) -> None:
    """Move a piece in its file."""
    piece["bytes"] = [at + by for at in piece["bytes"]]


def rewrite(step: Path, change: Any) -> None:
    """Change a manifest's body and give it a right digest again."""
    path = step / "manifest.json"
    body = json.loads(path.read_text())["body"]
    text = changed if isinstance(changed := change(body), str) else json.dumps(body)
    found = xxhash.xxh3_128_hexdigest(text.encode())
    path.write_text('{"digest":"' + found + '","body":' + text + "}\n")


def test_a_rewritten_manifest_is_read(tmp_path: Path) -> None:
    """The helper of the next test makes manifests that are right but for what it changes."""
    step = save(tmp_path, 1, {"x": torch.zeros(4)}, **ABOUT)
    rewrite(step, lambda body: None)
    load(step, {"x": (target := torch.ones(4))})
    assert not target.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["shards"].update({"../x": b["shards"].pop(SHARD)}), r"expected a plain file name, got '\.\./x'"),
        (lambda b: b["shards"].update({"/etc/x.safetensors": b["shards"].pop(SHARD)}), "expected a plain file name"),
        (lambda b: b["tensors"]["x"]["pieces"][0].update(shard="../x"), "expected the name of a listed shard"),
        (lambda b: b.update(version=2), "expected 'mimo-checkpoint' version 1, got 'mimo-checkpoint' version 2"),
        (lambda b: b.update(format="other"), "expected 'mimo-checkpoint' version 1, got 'other'"),
        (lambda b: b.pop("shards"), "expected an object with 'shards'"),
        (lambda b: b["shards"][SHARD].update(bytes=1 << 61), "expected one checksum for each 1048576 bytes"),
        (lambda b: b["shards"][SHARD]["header"].update(bytes=1 << 40), "expected a header inside the file"),
        (lambda b: b["shards"][SHARD]["header"].update(bytes=0), "expected a header inside the file"),
        (lambda b: b["tensors"]["x"].update(shape=[1 << 60]), "expected pieces that cover the shape"),
        (lambda b: b["tensors"]["x"].update(shape=[1 << 70]), "expected a whole number"),
        (lambda b: b["tensors"]["x"].update(shape=[1 << 61, 1 << 61]), "expected pieces that cover the shape"),
        (lambda b: b["tensors"]["x"].update(shape=[1] * 100_000), "expected at most 64 dims"),
        (lambda b: b["tensors"]["x"].update(shape=[-4]), "expected a whole number, got -4"),
        (lambda b: b["tensors"]["x"].update(shape=[True]), "expected a whole number, got true"),
        (lambda b: b["tensors"]["x"].update(dtype="OBJECT"), "expected one of F64"),
        (lambda b: b["tensors"]["x"]["pieces"].clear(), "expected pieces that cover the shape"),
        (lambda b: b["tensors"]["x"]["pieces"].append(b["tensors"]["x"]["pieces"][0]), "exactly once"),
        (lambda b: b["tensors"]["x"]["pieces"][0].update(offset=[1]), "exactly once"),
        (lambda b: b["tensors"]["x"]["pieces"][0].update(offset=[0, 0]), "exactly once"),
        (lambda b: shift(b["tensors"]["x"]["pieces"][0], -1), "expected a range inside the data"),
        (lambda b: shift(b["tensors"]["x"]["pieces"][0], 1 << 60), "expected a range inside the data"),
        (lambda b: b["tensors"]["x"]["pieces"][0].update(bytes=[1 << 61, 16]), "expected a range inside the data"),
        (lambda b: b["tensors"]["x"]["pieces"][0].update(bytes=[0, 16]), "expected a range inside the data"),
        (lambda b: b["tensors"]["x"]["pieces"][0].update(shape=[3]), "expected a range of 12 bytes"),
        (lambda b: b.update(block_bytes=1 << 40), "expected between 4 KiB and 64 MiB"),
        (lambda b: b.update(block_bytes=0), "expected between 4 KiB and 64 MiB"),
        (lambda b: b.update(block_bytes=4100), "expected between 4 KiB and 64 MiB, a multiple"),
        (lambda b: b.update(structure="0" * 32), "expected the signature"),
        (lambda b: b["common"].update(x=1), "expected each name once"),
        (lambda b: b["common"].update(y={"$float": []}), "expected JSON"),
        (lambda b: b["common"].update(y={"$float": 10**400}), "expected JSON"),
        (lambda b: b.update(step=2), "expected the manifest of step 1, as its folder is named, got that of step 2"),
        (lambda b: '{"format":"mimo-checkpoint","format":"mimo-checkpoint"}', "'format' is given twice"),
        (lambda b: '{"a":' * 100_000, "too many levels of nesting"),
        (lambda b: '{"a": NaN}', "NaN is not JSON"),
        (lambda b: "[]", "expected an object with 'format'"),
    ],
)
def test_hostile_manifests_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    """A manifest with a right digest is still checked: names stay in the folder, sizes fit the files."""
    step = save(tmp_path, 1, {"x": torch.zeros(4)}, **ABOUT)
    rewrite(step, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(step, {"x": torch.zeros(4)})
    assert "manifest.json" in str(caught.value)


def test_sizes_that_the_files_lack_are_refused_before_allocating(tmp_path: Path) -> None:
    """A consistent manifest of a petabyte over a small file is refused by the file's size."""
    step = save(tmp_path, 1, {"x": torch.zeros(4)}, **ABOUT)

    def grow(body: Any) -> None:
        shard = body["shards"][SHARD]
        count = 1 << 36  # a TiB of data, with few large blocks
        body["block_bytes"] = 1 << 26
        body["tensors"]["x"]["shape"] = body["tensors"]["x"]["pieces"][0]["shape"] = [count]
        begin = shard["header"]["bytes"]
        body["tensors"]["x"]["pieces"][0]["bytes"] = [begin, begin + 4 * count]
        shard["bytes"] = begin + 4 * count
        shard["blocks"] = shard["blocks"] * (4 * count // (1 << 26))
        body["structure"] = xxhash.xxh3_128_hexdigest(
            json.dumps([{"x": ["F32", [count], [[[0], [count]]]]}, [], {}], separators=(",", ":")).encode()
        )

    rewrite(step, grow)
    assert read_manifest(step).tensors["x"].shape == (1 << 36,)
    with pytest.raises(CheckpointError, match=rf"{SHARD}: expected 274877907\d+ bytes, got"):
        verify(step)
    with pytest.raises(CheckpointError, match=r"shape \[68719476736\] in the checkpoint, \[4\] here"):
        load(step, {"x": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=rf"{SHARD}: expected 274877907\d+ bytes, got"):
        load(step, {"x": torch.zeros(1).expand(1 << 36)})

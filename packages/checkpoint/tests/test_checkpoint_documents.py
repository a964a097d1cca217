"""The programs in the documents do what they say."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from mimo.checkpoint import diff, save
from mimo.checkpoint._blocks import BLOCK_BYTES
from mimo.checkpoint._manifest_file import FORMAT, FORMAT_VERSION
from mimo.checkpoint._tensors import DTYPES
from mimo.hooks import Common
from mimo.testing import free_port, start

PACKAGE = Path(__file__).parents[1]
FORMAT_PAGE = PACKAGE.parents[1] / "docs" / "checkpoint-format.md"
PAGE = FORMAT_PAGE.with_name("checkpoints.md")


def find_program(page: Path) -> str:
    """Return the first Python program of a page."""
    match = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def test_ten_lines_read_any_tensor(tmp_path: Path) -> None:
    """The reader of the format page needs only safetensors and gives every tensor whole."""
    tree = {"a": torch.randn(5, 3), "b": torch.tensor(7), "c": torch.ones(4).bfloat16(), "d": torch.empty(0, 2)}
    step = save(tmp_path, 1, tree, config={}, topology={}, shard_bytes=16)
    program = find_program(FORMAT_PAGE)
    assert "mimo" not in program
    assert len([line for line in program.splitlines() if line.startswith(" ")]) <= 10
    data = (step / "manifest.json").read_bytes()
    assert xxhash.xxh3_128_hexdigest(data[52:-2]) == json.loads(data)["digest"]
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102  # our own page
    for name, tensor in tree.items():
        assert torch.equal(names["read_tensor"](step, name), tensor), name


def test_format_page_names_the_constants() -> None:
    """The page gives the version, the block length and every dtype code."""
    text = FORMAT_PAGE.read_text()
    assert f'"version": {FORMAT_VERSION}' in text
    assert FORMAT in text
    assert f"{BLOCK_BYTES}" in text
    assert "without its first 52 and its last 2 bytes" in text
    assert all(f"`{code}`" in text for code in DTYPES)


def dump(data: bytes) -> str:
    """Return bytes as the page shows them: place, hexadecimal, text."""
    rows = [(at, data[at : at + 16]) for at in range(0, len(data), 16)]
    return "".join(
        f"{at:04x}  {row.hex(' '):47}  {''.join(chr(byte) if 32 <= byte < 127 else '.' for byte in row)}".rstrip()
        + "\n"
        for at, row in rows
    )


def test_the_dump_is_what_is_written(tmp_path: Path) -> None:
    """The page's checkpoint, byte by byte, and what it says of these bytes."""
    tree = {"w": torch.tensor([[1.0], [-2.0]]).bfloat16(), "b": torch.tensor([0.5]), "step": Common(7)}
    step = save(tmp_path, 7, tree, config={}, topology={})
    text = FORMAT_PAGE.read_text()
    data = (step / "rank_00000_0000.safetensors").read_bytes()
    assert f"```hexdump\n{dump(data)}```" in text
    manifest = (step / "manifest.json").read_text()
    (shown,) = re.findall(r"```manifest\n(.*?)```", text, re.DOTALL)
    assert shown.replace("\n", "") == manifest.rstrip("\n")
    assert max(map(len, shown.splitlines())) == 120
    assert int.from_bytes(data[:8], "little") == 184
    assert data[149:192] == b" " * 43
    assert struct.unpack("<f", data[192:196]) == (0.5,)
    assert data[196:200].hex() == "803f00c0"
    assert xxhash.xxh3_64_hexdigest(data[192:]) in manifest


def run_program(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a program of a page, and compare what it prints with its comments."""
    exec(program, {})  # noqa: S102  # our own page
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", program)


def test_readme_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's program runs as it stands and prints what its comments say."""
    monkeypatch.chdir(tmp_path)
    run_program(find_program(PACKAGE / "README.md"), capsys)


AT_ONCE = """
import os, sys
sys.stdout.flush()
os._exit(0)  # torch may abort a process that ends right after gloo's last collective, as the README says
"""


def torchrun(folder: Path, ranks: int) -> str:
    """Run the README's training script by torchrun, and return what it prints."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
    done = subprocess.run(  # noqa: S603
        [*words, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "train.py"],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_forked(folder: Path, ranks: int) -> str:
    """Run the script without torchrun, in processes that begin with torch imported; return what the first prints."""
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        started = [
            stack.enter_context(start("train.py", cwd=folder, environ={**group, "RANK": str(rank)}))
            for rank in range(ranks)
        ]
        printed, *silent = [one.wait().printed for one in started]
    assert not any(silent)
    return printed


def test_readme_script_resumes_in_fresh_processes(tmp_path: Path) -> None:
    """A script without our trainer resumes as if it had not stopped, to the bit, and then with more ranks."""
    (script,) = re.findall(r"```python\n([^`]*fully_shard.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    twice, once = tmp_path / "twice", tmp_path / "once"
    for folder, steps in ((twice, 10), (once, 20)):
        folder.mkdir()
        assert "STEPS = Path" in script
        folder.joinpath("train.py").write_text(script.replace(", 10\n", f", {steps}\n") + AT_ONCE)
    assert torchrun(twice, 2).startswith("step 10: loss ")
    assert run_forked(twice, 2) == run_forked(once, 2)
    assert not diff(*(folder / "checkpoints" / "step_00000020" for folder in (twice, once))).tensors
    assert run_forked(twice, 3).startswith("step 30: loss ")


def test_the_page_on_checkpoints_loads_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its program about loading runs and prints what its comments say."""
    monkeypatch.chdir(tmp_path)
    (program,) = (one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "rename=" in one)
    run_program(program, capsys)

"""`mimo checkpoint` in this process: what it prints of checkpoints, and with what code it ends."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.checkpoint import diff, save
from mimo.hooks import Common, Owned
from mimo.trainer.commands.main import run

ABOUT: dict[str, Any] = {
    "config": {"run": {"steps": 9, "name": "x"}, "modules": {"language": {"tp": 2}}, "data": {}},
    "topology": {"language": {"ranks": [0, 1], "pp": 1, "dp": 1, "cp": 1, "tp": 2}},
}


def saved(directory: Path, **more: Any) -> Path:
    """Save what a run could have saved, in the checkpoints of a run directory."""
    tree: dict[str, Any] = {
        "language": {"embedding.weight": torch.ones(4, 2), "norm.weight": torch.ones(2)},
        "optimizer": {"language": {"norm.weight": {"exp_avg": torch.ones(2), "lr": Owned(0.1, "language")}}},
        "plugin": {"counts": torch.ones(3)},
        "progress": {"step": Common(7), "best": Common(math.nan)},
        **more,
    }
    return save(directory / "checkpoints", 7, tree, **ABOUT)


def test_a_checkpoint_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Modules with their layout and optimizer state, tensors, values and settings; a run directory stands for it."""
    saved(tmp_path)
    assert run(["checkpoint", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step 7, 4 tensors of 15 elements in 1 shards" in out
    for line in (
        r"language +2 +10 +0\.0 MiB +0\.0 MiB +0-1 +1 +1 +1 +2",
        r"- +1 +3 +0\.0 MiB +- +- +- +- +- +-",
        r"language\.embedding\.weight +F32 +4 x 2 +1",
        r"progress\.best +all +nan",
        r"optimizer\.language\.norm\.weight\.lr +language +0\.1",
        r"run\.steps +9",
        r"modules\.language\.tp +2",
        r"data +\{\}",
    ):
        assert re.search(rf"^{line} *$", out, re.MULTILINE), (line, out)


def test_a_checkpoint_is_inspected_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest without checksums, for programs."""
    saved(tmp_path)
    assert run(["checkpoint", "inspect", str(tmp_path), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["tensors"]["language.norm.weight"]["shape"] == [2]
    assert body["common"]["progress.best"] == {"$float": "nan"}
    assert list(body["shards"].values()) == [next((tmp_path / "checkpoints").glob("*/*.safetensors")).stat().st_size]


def test_a_checkpoint_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage ends with code 3."""
    folder = saved(tmp_path)
    assert run(["checkpoint", "verify", str(folder)]) == 0
    assert "4 tensors in 1 shards, 1 blocks" in capsys.readouterr().out
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert run(["checkpoint", "verify", str(folder)]) == 3
    assert "mimo: " in capsys.readouterr().err


def test_two_checkpoints_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends with 0 where nothing differs, with 1 and what it is where anything does, with 3 where one is damaged."""
    first, same = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert run(["checkpoint", "diff", str(tmp_path / "a"), str(same)]) == 0
    assert capsys.readouterr().out == f"{first} and {same}: the same names, elements and values\n"
    saved(
        tmp_path / "c",
        plugin={"counts": torch.tensor([1.0, 3.0, 1.0]), "more": torch.ones(1)},
        progress={"step": Common(8)},
        language={"embedding.weight": torch.ones(4, 2), "norm.weight": torch.ones(2, 1)},
    )
    assert run(["checkpoint", "diff", str(first), str(tmp_path / "c")]) == 1
    out = capsys.readouterr().out
    for line in (
        r"progress\.best",
        r"plugin\.more",
        r"language\.norm\.weight +F32 \[2\] +F32 \[2, 1\]",
        r"plugin\.counts +1 +3 +2 +0\.667",
        r"progress\.step +7 +8",
    ):
        assert re.search(rf"^{line} *$", out, re.MULTILINE), (line, out)
    next(same.glob("*.safetensors")).unlink()
    assert run(["checkpoint", "diff", str(first), str(same)]) == 3
    assert run(["checkpoint", "diff", "--help"]) == 0
    assert "ends with 0 if nothing does, 1 if anything" in " ".join(capsys.readouterr().out.split())


def test_folders_are_printed_as_they_are_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in a path are no markup."""
    first, other = saved(tmp_path / "a[/b]"), saved(tmp_path / "[red]", plugin={"counts": torch.zeros(3)})
    assert run(["checkpoint", "inspect", str(first)]) == 0
    assert run(["checkpoint", "diff", str(first), str(first)]) == 0
    assert run(["checkpoint", "diff", str(first), str(other)]) == 1
    out = capsys.readouterr().out
    for line in (f"{first}: step 7", f"{first} and {first}: the same", f"{first} and {other} differ"):
        assert line in out


def test_what_a_terminal_would_obey_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of tensors are whoever's who wrote the checkpoint."""
    hostile = "a\x1b[31m"
    first = saved(tmp_path / "a", plugin={hostile: torch.ones(1)})
    other = saved(tmp_path / "b", plugin={hostile: torch.zeros(1), f"{hostile}b": torch.ones(1)})
    assert run(["checkpoint", "inspect", str(first)]) == 0
    assert run(["checkpoint", "diff", str(first), str(first)]) == 0
    assert run(["checkpoint", "diff", str(first), str(other)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("plugin.a\\x1b[31m") == 3


def test_a_checkpoint_is_resharded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into another folder, in as many parts as asked for; a second time is refused."""
    first = saved(tmp_path / "a")
    words = ["checkpoint", "reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--parts", "2"]
    assert run([*words, "--shard-bytes", "64"]) == 0
    step = tmp_path / "b" / "step_00000007"
    assert capsys.readouterr().out == f"{step}\n"
    assert not diff(first, step)
    assert len(list(step.glob("*.safetensors"))) == 2
    assert run(words) == 3
    assert "expected a folder without this step, got one that holds it" in capsys.readouterr().err
    words[3] = str(tmp_path / "c")
    assert run([*words, "--drop", "optimizer.*", "--drop", "plugin.*"]) == 0
    assert set(diff(first, tmp_path / "c" / "step_00000007").only_first) == {
        *("optimizer.language.norm.weight.exp_avg", "optimizer.language.norm.weight.lr", "plugin.counts")
    }

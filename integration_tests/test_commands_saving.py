"""Saving in whole runs: a disk that fills up, checkpoints beside training, and settings that contradict each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import DIGITS, here, mimo, succeed

from mimo.checkpoint import read_manifest, verify

WORDS = (*DIGITS, "checkpoint.keep=0")


ONE = ("modules.vision.ranks=0", "modules.language.ranks=0", "modules.language.tp=1")


@pytest.mark.parametrize("more", [("checkpoint.asynchronous=true",), ("checkpoint.asynchronous=false", *ONE)])
def test_a_run_goes_on_when_its_disk_is_full(small_disk: Path, more: tuple[str, ...]) -> None:
    """One checkpoint of 2 MB fits. The next is told and trained past; the last one is the result, so the code is 3."""
    run = small_disk / "run"
    ended = mimo(*WORDS, *more, "run.steps=6", "checkpoint.interval=2", f"run.directory={run}")
    assert ended.code == 3
    assert "step_00000006: expected" in ended.err
    assert "bytes free on its disk, got" in ended.err
    assert "Older checkpoints are whole. Make room, or look at the disk." in ended.err
    assert (run / "error.txt").read_text() in ended.err
    told = [line for line in ended.out.splitlines() if "not saved" in line]
    assert len(told) == 1
    assert re.match(rf"checkpoint not saved, going on after step [{'4' if ONE[0] in more else '56'}]: ", told[0])
    assert f"{run / 'checkpoints' / 'step_00000004'}: expected" in told[0]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line and "evaluation" not in line] == [1, 2, 3, 4, 5, 6]
    assert [line["reason"] for line in lines if line.get("save_failed")] == [told[0].partition(": ")[2]]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_00000002"]
    verify(run / "checkpoints" / "step_00000002")


def test_each_checkpoint_of_a_run_is_its_steps(tmp_path: Path) -> None:
    """Saved beside training or before going on, with one plan or a new one each time, files are equal to the bit."""
    found = []
    for index, more in enumerate(
        (
            ("checkpoint.asynchronous=true",),
            ("checkpoint.asynchronous=false", "checkpoint.assume_constant_structure=false"),
        )
    ):
        run = tmp_path / str(index)
        succeed(*WORDS, *more, "run.steps=4", "checkpoint.interval=1", f"run.directory={run}")
        steps = sorted((run / "checkpoints").glob("step_*"))
        assert [read_manifest(step).step for step in steps] == [1, 2, 3, 4]
        found.append([{path.name: path.read_bytes() for path in step.glob("*.safetensors")} for step in steps])
    assert found[0] == found[1]
    assert len({tuple(step.values()) for step in found[0]}) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("checkpoint.keep_every=5", "checkpoint.keep=0"),
            "checkpoint.keep_every: expected 0 where keep is 0, which keeps all, got 5.",
        ),
        (
            ("checkpoint.when_busy=skip", "checkpoint.asynchronous=false"),
            'checkpoint.when_busy: expected "wait" where asynchronous is false, since nothing is written beside',
        ),
        (("checkpoint.when_busy=never",), "checkpoint.when_busy: expected"),
    ],
)
def test_settings_that_mean_nothing_are_refused(words: tuple[str, ...], text: str) -> None:
    """Nothing is accepted and ignored."""
    assert here("check", "examples/digits.toml", *words).refused(text)

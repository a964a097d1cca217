"""A taught run from its commands: weights of the teacher's run, metrics, what evaluates, writes and is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import DIGITS, here, mimo, read_metrics, succeed
from house import ROOT

from mimo.checkpoint import load, read_manifest
from mimo.trainer import evaluate

EXAMPLE = "examples/digits-distil.toml"
SMALL = (
    "optimizer.lr_warmup_steps=0",
    "run.global_batch=8",
    "run.micro_batch=8",
    "run.evaluation_interval=0",
    "data.held_out=0.01",
    "run.steps=2",
)
ONE_PROCESS = ("modules.vision.ranks=0", "modules.language.ranks=0", "modules.language.tp=1")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a teacher, of two steps."""
    directory = tmp_path_factory.mktemp("teacher") / "run"
    assert mimo(*DIGITS, *SMALL, *ONE_PROCESS, f"run.directory={directory}").code == 0
    return directory


@pytest.fixture(scope="module")
def student(teacher: Path) -> Path:
    """The run directory of its student, on two processes, each module on one or both."""
    directory = teacher.parent / "student"
    layout = ("modules.vision.ranks=0", "modules.eye.ranks=1", "modules.teacher.ranks=1", "modules.language.ranks=0-1")
    words = ("train", EXAMPLE, *SMALL, *layout, f"load.finetune={teacher}", f"run.directory={directory}")
    ended = mimo(*words)
    assert (ended.code, ended.err) == (0, "")
    assert "new: weights of language (12 entries), weights of vision (23 entries)" in ended.out, ended.out
    return directory


def test_metrics_and_evaluation_show_the_divergence(student: Path) -> None:
    """In each line, and again from the checkpoint, on one process."""
    steps, (evaluation,) = read_metrics(student)
    assert all(step["losses"]["teacher.divergence"] > 0 for step in steps)
    found = evaluate(student)
    assert found.losses == pytest.approx(evaluation["losses"])
    assert found.loss == pytest.approx(evaluation["loss"])


def test_the_teacher_keeps_its_weights_and_the_student_has_its_own(teacher: Path, student: Path) -> None:
    """What the student's run holds of the teacher is what the teacher's run holds, to the bit."""
    held = [_read(student, "teacher"), _read(student, "eye"), _read(teacher, "language"), _read(teacher, "vision")]
    assert [one.keys() for one in held[:2]] == [one.keys() for one in held[2:]]
    for own, there in zip(held[:2], held[2:], strict=True):
        assert all(torch.equal(own[name], there[name]) for name in own)
    first = "layers.0.attention.query.weight"
    assert not torch.equal(_read(student, "language")[first], held[2][first])


def _read(run: Path, module: str) -> dict[str, torch.Tensor]:
    """Return the weights of a module of the newest checkpoint of a run, by path."""
    (step,) = (run / "checkpoints").glob("step_*")
    entries = read_manifest(step).tensors
    tree = {
        name.removeprefix(f"{module}."): torch.zeros(entry.shape)
        for name, entry in entries.items()
        if name.startswith(f"{module}.")
    }
    load(step, {module: tree})
    return tree


def test_a_taught_model_writes_without_its_teacher(student: Path, tmp_path: Path) -> None:
    """By itself, on one process."""
    from PIL import Image

    Image.new("L", (8, 8), 7).save(tmp_path / "digit.png")
    assert succeed("generate", student, "--image", tmp_path / "digit.png", "--max-tokens", "4").strip()


def test_a_teacher_may_come_from_a_published_folder(student: Path, tmp_path: Path) -> None:
    """Its module of a checkpoint is exported as such, read again as a teacher by the settings of a run, and teaches."""
    folder, out = tmp_path / "published", tmp_path / "weights"
    words = ("checkpoint", "export-hf", student, folder, "--module", "teacher")
    assert "teacher as LlamaForCausalLM" in here(*words).printed
    here("checkpoint", "import-hf", f"teacher={folder}", "--out", out, "--config", ROOT / EXAMPLE)
    assert "teacher.head.weight" in here("checkpoint", "inspect", out).printed
    run = tmp_path / "run"
    grids = ("modules.vision.ranks=0", "modules.eye.ranks=0", "modules.teacher.ranks=0", *ONE_PROCESS[1:])
    new = 'load.rename={language="",vision="",eye=""}'
    succeed("train", EXAMPLE, *SMALL, *grids, f"load.finetune={out}", new, f"run.directory={run}")
    assert _read(run, "teacher").keys() == _read(student, "teacher").keys()
    assert all(one.equal(_read(student, "teacher")[name]) for name, one in _read(run, "teacher").items())
    steps, _ = read_metrics(run)
    assert [step["losses"]["teacher.divergence"] > 0 for step in steps] == [True, True]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--seed=3", "--seed: expected a --temperature above 0 beside it, got 0"),
        ("--made=made", "--made: expected a model that makes items, got one that writes text alone. Leave it out."),
    ],
)
def test_what_only_a_model_that_draws_uses_is_refused(student: Path, word: str, text: str) -> None:
    """Of one that writes the likeliest text alone nothing is drawn, nor saved."""
    ended = mimo("generate", student, "--text", "the digit", word)
    assert ended.code == 2
    assert text in ended.err

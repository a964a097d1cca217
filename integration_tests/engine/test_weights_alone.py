"""Checkpoints that hold no optimizer states (`checkpoint.optimizer = false`): what they hold, and what resumes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TEXT, here, mimo, read_metrics, succeed, write_lines
from resuming import Resumption, begin, resume_and_save, resume_run, same_bits
from tables import Table
from test_load_settings import BOTH, all_zero, load, moments_of, run_of, weights_of
from test_oracle import on

from mimo.checkpoint import read_manifest, verify
from mimo.testing import Pool
from mimo.trainer.runtime import Saving

ALONE = {"checkpoint": {"optimizer": False}}
NEW = "new: optimizer states (moments, step counts, loss scale), as checkpoint.optimizer = false saved none"
STEP = Path("checkpoints") / "step_00000003"
RATES = {"optimizer": {"lr_schedule": "linear", "lr_warmup_steps": 2}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> tuple[Path, Path, Resumption]:
    """A run that has saved its third step with optimizer states, the same run without, and what it held."""
    whole, alone = (tmp_path_factory.mktemp(name) for name in ("whole", "alone"))
    (before,) = pool.run(1, resume_and_save, run_of(BOTH, whole, **RATES), 1, 3)
    pool.run(1, resume_and_save, run_of(BOTH, alone, **RATES, **ALONE), 1, 3)
    return whole, alone, before


def test_weights_alone_are_a_whole_checkpoint(saved: tuple[Path, Path, Resumption]) -> None:
    """All but the states of optimizers is the same, and every byte can be verified."""
    whole, alone, _ = saved
    with_states, without = (read_manifest(folder / STEP) for folder in (whole, alone))
    assert without.names == {name for name in with_states.names if not name.startswith("optimizer.")}
    assert with_states.names > without.names
    sizes = [sum(file.stat().st_size for file in (folder / STEP).iterdir()) for folder in (whole, alone)]
    assert sizes[1] < 0.45 * sizes[0]
    verify(alone / STEP)


def test_a_resumed_run_is_one_that_leaves_the_states(
    saved: tuple[Path, Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """Equal to the bit, with the same samples and learning rates; the summary names the new optimizer."""
    whole, alone, before = saved
    (left,) = pool.run(1, resume_run, run_of(BOTH, tmp_path, **RATES, **load(whole, optimizer=False)), 4, 6)
    (found,) = pool.run(1, resume_and_save, run_of(BOTH, tmp_path, **RATES, **load(alone)), 4, 6)
    assert (found.losses, found.rates) == (left.losses, left.rates)
    assert same_bits(found.ended, left.ended)
    assert same_bits(weights_of(found.began, "vision", "language"), weights_of(before.ended, "vision", "language"))
    assert all_zero(moments_of(found.began, "vision") | moments_of(found.began, "language"))
    assert found.summary == f"step 3 loaded from {alone / STEP}; {NEW}"
    (further,) = pool.run(1, resume_run, run_of(BOTH, tmp_path, **RATES, **load(tmp_path)), 7, 7)  # saves states again
    assert same_bits(further.began, found.ended)
    assert further.summary.endswith("step_00000006")


def test_another_layout_and_optimizer_resume_weights_alone(
    saved: tuple[Path, Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """There are no states that another optimizer could have no use for."""
    _, alone, before = saved
    wide = {"vision": on(0, 1), "language": on(0, 1, tp=2)}
    found = pool.run(2, resume_run, run_of(wide, tmp_path, optimizer={"plugin": "muon"}, **load(alone)), 4, 4)
    assert all(f"; {NEW}; optimizer of vision.plugin muon (was adamw)" in one.summary for one in found)
    name = "language.norm.weight"
    assert torch.equal(found[1].began[name], before.ended[name])


def test_finetuning_takes_weights_alone_from_weights_alone(
    saved: tuple[Path, Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """It begins as from any checkpoint, and the summary names nothing else."""
    whole, alone, _ = saved
    runs = [
        pool.run(1, resume_run, run_of(BOTH, tmp_path, load={"finetune": str(one)}), 1, 2)[0] for one in (whole, alone)
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[1].summary == f"weights of step 3 loaded from {alone / STEP}"


def test_adapters_are_saved_alone_without_states(tmp_path: Path, pool: Pool) -> None:
    """What is not trained is left out too: a few factors resume beside the weights of the other checkpoint."""
    pool.run(1, resume_and_save, run_of(BOTH, tmp_path / "base"), 1, 3)
    modules = {**BOTH, "language": {**on(0, 0), "lora": {"rank": 2, "targets": ["*.query", "*.value"]}}}
    modules["vision"] = {**on(0, 0), "frozen": True}
    sections: dict[str, Any] = {"checkpoint": {"optimizer": False, "frozen": False}}
    settings = run_of(modules, tmp_path / "run", load={"finetune": str(tmp_path / "base")}, **sections)
    (before,) = pool.run(1, resume_and_save, settings, 1, 3)
    held = read_manifest(tmp_path / "run" / STEP)
    weights = [name for name in held.tensors if name.startswith(("vision.", "language."))]
    assert {name.rpartition(".")[2] for name in weights} == {"down", "up"}
    resumed = run_of(modules, tmp_path / "run", **load(tmp_path / "run"))
    (found,) = pool.run(1, resume_run, resumed, 4, 4)
    assert same_bits(weights_of(found.began, "language"), weights_of(before.ended, "language"))
    assert NEW in found.summary


def save_for_a_restart(rank: int, settings: Table) -> None:
    """Save a step as the rerun machine does before it ends the run to have it started elsewhere."""
    trainer, _, state = begin(rank, settings)
    trainer.train(1)
    saving = Saving(trainer, state, [], lambda _step, _error: None)
    saving.save(1, now=True)
    saving.save(2, now=True, resumes_exactly=True)
    saving.close()


def summary_of(rank: int, settings: Table) -> str:
    """Return the summary of what a run begins with."""
    return begin(rank, settings)[1]


def test_what_must_be_repeated_to_the_bit_is_saved_with_its_states(tmp_path: Path, pool: Pool) -> None:
    """A loss scale changes what a step comes to: whoever compares a repeated step needs it."""
    settings = run_of({"language": on(0, 0)}, tmp_path, **ALONE, data={"modalities": []})
    pool.run(1, save_for_a_restart, settings)
    states = [
        any(name.startswith("optimizer.") for name in read_manifest(tmp_path / "checkpoints" / step).names)
        for step in ("step_00000001", "step_00000002")
    ]
    assert states == [False, True]
    resumed = run_of({"language": on(0, 0)}, tmp_path, **load(tmp_path), data={"modalities": []})
    assert pool.run(1, summary_of, resumed) == [f"step 2 loaded from {tmp_path / 'checkpoints' / 'step_00000002'}"]


@pytest.mark.soak
def test_commands_with_weights_alone(tmp_path: Path) -> None:
    """Every step is saved so, the newest are kept, and all that reads checkpoints reads them."""
    write_lines(tmp_path / "train.jsonl", [{"text": f"some text, number {index}"} for index in range(8)])
    (tmp_path / "a.toml").write_text(TEXT)
    words = ("a.toml", "checkpoint.optimizer=false", "checkpoint.keep=2")
    succeed("train", *words, cwd=tmp_path)
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert steps == ["step_00000003", "step_00000004"]
    assert (
        "optimizer" not in here("checkpoint", "inspect", "run", "--json", cwd=tmp_path).printed.partition('"config"')[0]
    )
    assert here("checkpoint", "verify", "run", cwd=tmp_path).code == 0
    assert here("checkpoint", "export-hf", "run", "out", cwd=tmp_path).code == 0
    ended = mimo("train", *words, "checkpoint.load=latest", "run.steps=5", cwd=tmp_path)
    assert (ended.code, NEW in ended.out) == (0, True)
    assert [line["step"] for line in read_metrics(tmp_path / "run")[0]] == [1, 2, 3, 4, 5]

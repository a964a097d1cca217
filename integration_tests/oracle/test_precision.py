"""Runs in bf16 and fp16: losses near one process in fp32, one loss scale for all ranks, checkpoints that stay fp32."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from cases import Modules, in_turn
from jobs import CPU, find, make_job
from oracle import Piece
from resuming import assemble, begin
from tables import STEPS, Table, alone, table, world_of
from test_oracle import SP, on
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mimo.checkpoint import read_manifest
from mimo.hooks import Kind, StepInfo
from mimo.model import ENCODERS, EncoderSpec
from mimo.testing import Pool
from mimo.trainer import Trainer, generate, prompt_of, read_settings, resolve
from mimo.trainer.runtime import RunState, save_step, step_folder

SHARDS = ("optimizer", "gradients", "full")
NEAR = 1e-2
LAYOUTS: dict[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "lanes 2 to 1": {"vision": on(0, 1), "language": on(2, 2)},
    "lanes 2 to 3": {"vision": on(0, 1), "language": on(2, 4)},
    "colocated, vision dp4, language tp2 dp2": {"vision": on(0, 3), "language": on(0, 3, tp=2)},
    "tp2 sp pp2 dp2": {"vision": on(0, 1, tp=2, **SP), "language": on(0, 7, tp=2, pp=2, **SP)},
    "cp2 dp2, vision pp2": {"vision": on(0, 1, pp=2), "language": on(2, 5, cp=2)},
}
EXPERTS: dict[str, Any] = {
    "experts": 4,
    "experts_per_token": 2,
    "dense_layers": 1,
    "shared_intermediate": 11,
    "balance_loss": 0.05,
    "z_loss": 0.01,
}


@attrs.frozen(kw_only=True)
class Ran:
    """What a rank saw of a few steps, and its weights and moments after them by flat name."""

    steps: list[StepInfo]
    held: dict[str, Piece]
    evaluated: float


def in_precision(settings: Table, precision: str, *, shard: str = "optimizer", **run: Any) -> Table:
    """Return settings whose layers compute in ``precision``, over pieces of the weights."""
    found = copy.deepcopy(settings)
    found["run"] |= {"precision": precision, **run}
    found["optimizer"] |= {"plugin": "distributed", "shard": shard}
    return found


def held(trainer: Trainer) -> dict[str, Piece]:
    """Return a copy of what this rank holds of all weights and moments."""
    states = {f"optimizer.{module}": tree for module, tree in trainer.optimizer.state().items()}
    trees: dict[str, Mapping[str, Any]] = {**trainer.model_state(), **states}
    values = {f"{tree}.{name}": value for tree, values in trees.items() for name, value in values.items()}
    return {name: Piece.of(value) for name, value in values.items() if isinstance(value, Tensor)}


def train(trainer: Trainer, first: int, last: int) -> Ran:
    """Train as `mimo train` does, and evaluate."""
    steps = [trainer.train(step) for step in range(first, last + 1)]
    evaluation = trainer.evaluate(last)
    assert evaluation is not None
    return Ran(steps=steps, held=held(trainer), evaluated=evaluation.loss)


def run_steps(rank: int, settings: Table, last: int = STEPS) -> Ran:
    """Train the first steps."""
    return train(Trainer(make_job(settings), rank=rank, device=CPU), 1, last)


def run_and_save(rank: int, settings: Table) -> Ran:
    """Train the first steps and save the last of them."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    ran = train(trainer, 1, STEPS)
    save_step(trainer, RunState(), [], STEPS)
    return ran


def check_near(found: list[Ran], truth: Ran) -> None:
    """Refuse losses that are not near one process in fp32, or not the same on all ranks."""
    for ran in found:
        for step, expected, first in zip(ran.steps, truth.steps, found[0].steps, strict=True):
            assert math.isclose(step.loss, expected.loss, rel_tol=NEAR), (step.step, step.loss, expected.loss)
            assert math.isclose(step.grad_norm, expected.grad_norm, rel_tol=0.1), (step.grad_norm, expected.grad_norm)
            assert (step.loss, step.grad_norm, step.skipped) == (first.loss, first.grad_norm, False)
        assert math.isclose(ran.evaluated, truth.evaluated, rel_tol=NEAR)
        assert all(piece.values.dtype == np.float32 for piece in ran.held.values())


@pytest.mark.parametrize(("layout", "shard"), in_turn(LAYOUTS, SHARDS))
def test_bf16_losses_of_any_layout_are_near_one_process(layout: str, shard: str, pool: Pool) -> None:
    """Three steps of training and an evaluation, against fp32; weights and moments stay fp32."""
    settings = table(LAYOUTS[layout], microbatches=2)
    (truth,) = pool.recall(1, run_steps, alone(settings))
    found = pool.run(world_of(settings), run_steps, in_precision(settings, "bf16", shard=shard))
    check_near(found, truth)
    assert all(step.loss_scale is None for ran in found for step in ran.steps)


@pytest.mark.soak
@pytest.mark.parametrize("lanes", [1, 2])
def test_bf16_losses_of_lanes_that_hold_copies(lanes: int, pool: Pool) -> None:
    """Whole fp32 weights on each lane, or on each pair of lanes, beside what layers compute with."""
    settings = table({"vision": on(0, 3), "language": on(2, 5, tp=2)}, microbatches=2)
    (truth,) = pool.recall(1, run_steps, alone(settings))
    copied = in_precision(settings, "bf16", shard="gradients" if lanes > 1 else "optimizer")
    copied["optimizer"] |= {"shard_lanes": lanes}
    check_near(pool.run(6, run_steps, copied), truth)


def test_two_runs_are_equal_to_the_bit(pool: Pool) -> None:
    """Where that is asked for, nothing here is refused, and losses, weights and moments are the same bits twice."""
    modules = {"vision": on(0, 1), "language": on(0, 3, tp=2, ep=2, **SP)}
    settings = table(modules, microbatches=2, language=EXPERTS)
    runs = [pool.run(4, run_steps, in_precision(settings, "bf16", deterministic=True)) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert [step.loss for step in one.steps] == [step.loss for step in other.steps]
        assert all(np.array_equal(piece.values, other.held[name].values) for name, piece in one.held.items())


@pytest.mark.soak
@pytest.mark.parametrize(("recompute", "shard"), in_turn(["none", "selective", "full"], SHARDS))
def test_bf16_losses_where_backward_is_split_and_repeated(recompute: str, shard: str, pool: Pool) -> None:
    """Weight gradients that come later, and what is computed again, read what was gathered."""
    modules = {"vision": on(0, 1, recompute=recompute), "language": on(0, 3, pp=2, recompute=recompute, loss_rows=4)}
    settings = {**table(modules, microbatches=4), "schedule": {"plugin": "zero-bubble", "form": "h1"}}
    (truth,) = pool.recall(1, run_steps, alone(settings))
    check_near(pool.run(4, run_steps, in_precision(settings, "bf16", shard=shard)), truth)


@pytest.mark.soak
@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_bf16_losses_of_experts(shard: str, pool: Pool) -> None:
    """Rows go to their experts in bf16, chosen in fp32."""
    modules = {"vision": on(0, 1), "language": on(0, 3, tp=2, ep=2, **SP)}
    settings = table(modules, microbatches=2, language=EXPERTS)
    (truth,) = pool.recall(1, run_steps, alone(settings))
    check_near(pool.run(4, run_steps, in_precision(settings, "bf16", shard=shard)), truth)


@pytest.mark.soak
@pytest.mark.parametrize("shard", ["full", pytest.param("optimizer", marks=pytest.mark.soak)])
def test_bf16_losses_of_what_lora_adds(shard: str, pool: Pool) -> None:
    """Beside linears and experts, over tensor ranks and those of an expert; it is fp32 as all weights are."""
    modules = {"vision": on(0, 1), "language": on(0, 3, tp=2, etp=2, **SP)}
    settings = table(modules, microbatches=2, language=EXPERTS)
    settings["optimizer"]["lr"] = 0.01
    for module in settings["modules"].values():
        module["lora"] = {"rank": 2, "alpha": 8.0, "targets": ["*"]}
    (truth,) = pool.recall(1, run_steps, alone(settings))
    assert truth.steps[-1].loss < 0.99 * truth.steps[0].loss
    check_near(pool.run(4, run_steps, in_precision(settings, "bf16", shard=shard)), truth)


@pytest.mark.soak
def test_bf16_rows_that_are_made_ahead(pool: Pool) -> None:
    """A frozen encoder's rows of the next step wait in bf16, those of two microbatches at once."""
    vision = on(0, 1, frozen=True, prefetch=True, batch_factor=2)
    settings = table({"vision": vision, "language": on(2, 3)}, microbatches=4)
    (truth,) = pool.recall(1, run_steps, alone(settings))
    check_near(pool.run(4, run_steps, in_precision(settings, "bf16")), truth)


class Strange(nn.Module):
    """A stranger's encoder of PyTorch's own layers: a row for each picture, of the mean of what its pixels become."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 12, 1)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, hidden)

    def forward(self, items: list[dict[str, Tensor]]) -> Tensor:
        """Return [items, hidden]."""
        means = [self.first(item["pixels"][0]).mean((1, 2)) for item in items]
        rows = torch.stack(means) if means else self.last.weight.new_zeros(0, 12)
        found: Tensor = self.last(nn.functional.gelu(self.norm(rows)))
        return found


def run_strange(rank: int, settings: Table) -> list[float]:
    """Train with the stranger's encoder; return the losses."""

    def find_strange(kind: Kind[Any], name: str, where: str) -> Any:
        found = find(kind, name, where)
        if kind is not ENCODERS:
            return found
        assert isinstance(found, EncoderSpec)
        build = lambda _config, hidden: Strange(hidden)  # noqa: E731  # of this one case
        plain = attrs.evolve(found, build=build, rows=lambda *_: 1, grid=None, parts={}, stages=None, tensor=None)
        return attrs.evolve(plain, context=None, recompute={}, flops=None)

    trainer = Trainer(resolve(read_settings(settings), find=find_strange), rank=rank, device=CPU)
    return [trainer.train(step).loss for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_bf16_reaches_an_encoder_that_knows_nothing_of_it(shard: str, pool: Pool) -> None:
    """Its weights and pictures come in bf16; layers of PyTorch do the rest."""
    settings = table({"vision": on(0, 1), "language": on(1, 2)}, microbatches=2)
    (truth,) = pool.recall(1, run_strange, alone(settings))
    for found in pool.run(3, run_strange, in_precision(settings, "bf16", shard=shard)):
        assert found == pytest.approx(truth, rel=NEAR)


def run_prompt(_rank: int, settings: Table) -> str:
    """Write on from a prompt."""
    job = make_job(settings)
    return generate(Trainer(job, rank=0, device=CPU), prompt_of(job, "w1 w2"), max_tokens=2)


def test_one_process_writes_in_bf16(pool: Pool) -> None:
    """What a run in bf16 has saved is read and used like any other."""
    (text,) = pool.run(1, run_prompt, in_precision(table(LAYOUTS["alone"]), "bf16"))
    assert len(text.split()) <= 2


@pytest.mark.each("loss_rows")
@pytest.mark.parametrize("loss_rows", [0, 4])
def test_fp16_losses_are_near_one_process_and_the_scale_is_told(loss_rows: int, pool: Pool) -> None:
    """With a scale that fits, no step is skipped; it doubles on every rank after as many steps as the settings say."""
    settings = table({"vision": on(0, 1), "language": on(1, 3, pp=3, loss_rows=loss_rows)}, microbatches=3)
    (truth,) = pool.recall(1, run_steps, alone(settings))
    found = pool.run(4, run_steps, in_precision(settings, "fp16", loss_scale=64.0, loss_scale_steps=2))
    check_near(found, truth)
    assert [[step.loss_scale for step in ran.steps] for ran in found] == [[64.0, 64.0, 128.0]] * 4


def run_until_taken(rank: int, settings: Table) -> list[StepInfo]:
    """Train until a step is taken, and one step more."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    steps = [trainer.train(1)]
    while steps[-1].skipped:
        steps.append(trainer.train(len(steps) + 1))
    return [*steps, trainer.train(len(steps) + 1)]


def test_fp16_finds_its_scale(pool: Pool) -> None:
    """One that is too large is halved by every step that overflows, all of which are skipped, until one is finite."""
    settings = table({"vision": on(0, 1), "language": on(1, 2, tp=2, loss_rows=4)})
    found = pool.run(3, run_until_taken, in_precision(settings, "fp16", loss_scale=2.0**24, steps=24))
    steps = found[0]
    first = len(steps) - 2
    assert 3 <= first < 20
    assert [step.loss_scale for step in steps[: first + 1]] == [2.0 ** (24 - number) for number in range(first + 1)]
    reported = [(step.loss_scale, step.skipped, step.loss) for step in steps]
    assert [[(step.loss_scale, step.skipped, step.loss) for step in other] for other in found] == [reported] * 3


def run_broken(rank: int, settings: Table, broken: int) -> tuple[list[StepInfo], bool, bool]:
    """Train a step, one with a gradient that is not finite on one rank of the encoder, and another; compare weights."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    steps = [trainer.train(1)]
    before = held(trainer)
    stats = trainer.accumulate(2)
    if rank == broken:
        parameter = next(
            value for value in trainer.optimizer.modules["vision"].part.parameters.values() if value.grad is not None
        )
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        assert local is not None
        local.view(-1)[:1] = math.nan
    stepped = trainer.update(2, stats)
    after = held(trainer)
    same = before.keys() == after.keys() and all(
        np.array_equal(piece.values, after[name].values) for name, piece in before.items()
    )
    steps.append(trainer.train(3))
    assert stepped.loss_scale is not None
    return steps, stepped.skipped, same


@pytest.mark.parametrize("broken", [0, 1])
def test_fp16_one_rank_that_is_not_finite_skips_all(broken: int, pool: Pool) -> None:
    """A gradient that only one rank of one module holds is enough; the scale halves, and nothing else changes."""
    settings = table({"vision": on(0, 1), "language": on(2, 3, tp=2)}, microbatches=2)
    for steps, skipped, same in pool.run(4, run_broken, in_precision(settings, "fp16", loss_scale=64.0), broken):
        assert skipped
        assert same
        assert [(step.loss_scale, step.skipped) for step in steps] == [(64.0, False), (32.0, False)]


FP16: dict[str, Any] = {"loss_scale": 64.0, "loss_scale_steps": 2}
TIED: Modules = {"vision": on(0, 1), "language": on(1, 2)}


def tied(modules: Modules, directory: Path) -> Table:
    """Return settings of a run of six steps."""
    found = table(modules, microbatches=2, language={"tied": True})
    found["run"] |= {"directory": str(directory), "steps": 2 * STEPS}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """Runs that have saved their third step by precision, and what they held then at full shape."""

    @functools.cache
    def of(precision: str) -> tuple[Path, dict[str, Tensor]]:
        directory = tmp_path_factory.mktemp(precision)
        scale = FP16 if precision == "fp16" else {}
        found = pool.run(3, run_and_save, in_precision(tied(TIED, directory), precision, **scale))
        return directory, assemble([([], ran.held) for ran in found])

    return of


def run_loaded(rank: int, settings: Table, load: str) -> tuple[dict[str, Piece], float, Ran]:
    """Load a run directory and go on; return what is held at first, what the loss is multiplied by, and the rest."""
    trainer, _, _ = begin(rank, settings, load)
    return held(trainer), trainer.optimizer.loss_scale, train(trainer, STEPS + 1, 2 * STEPS)


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp16"), ("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp32")])
def test_a_checkpoint_is_fp32_and_goes_on_in_another_precision(
    before: str, after: str, saved: Callable[[str], tuple[Path, dict[str, Tensor]]], pool: Pool, tmp_path: Path
) -> None:
    """Weights and moments are the saved ones to the bit, in another layout; the scale is too, from fp16 to fp16."""
    directory, written = saved(before)
    manifest = read_manifest(step_folder(directory))
    assert {entry.dtype for entry in manifest.tensors.values()} == {"F32"}
    assert {"optimizer.loss_scale.scale", "optimizer.loss_scale.good_steps"} <= manifest.names or before != "fp16"
    assert manifest.tensors.keys() == written.keys()

    other = tied({"vision": on(0, 0), "language": on(1, 2, pp=2)}, tmp_path)
    if after != "fp32":  # else by the plain AdamW, whose names and meanings are the same
        other = in_precision(other, after, shard="full", loss_scale=32.0 if after == "fp16" else 0.0)
    scales = {"fp32": 1.0, "bf16": 1.0, "fp16": 128.0 if before == "fp16" else 32.0}
    found = pool.run(3, run_loaded, other, str(directory))
    for loaded, loss_scale, _ in found:
        assert loss_scale == scales[after]
        assert all(
            np.array_equal(piece.values, written[name].flatten()[piece.places]) for name, piece in loaded.items()
        )
    (straight,) = pool.recall(1, run_steps, alone(tied(TIED, Path())), 2 * STEPS)
    check_near([ran for *_, ran in found], attrs.evolve(straight, steps=straight.steps[STEPS:]))

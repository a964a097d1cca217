"""Muon in the oracle's layouts: each matrix moves as torch's own Muon moves it in one process.

Fed the same gradients they agree closely. With gradients of their own they cannot: the iteration runs in bf16, where
numbers that differ by rounding alone may be two that are 0.4 percent apart, and it raises small singular values most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from cases import Modules, in_turn
from jobs import CPU, make_job
from oracle import Piece, worst
from resuming import assemble, check_going_on, run_steps, same_bits
from tables import RATE, STEPS, Table, alone, table, world_of
from test_oracle import CLEAR_SEEDS, SP, on
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mimo.testing import Pool
from mimo.trainer import Trainer

SAME_GRADIENTS = 1e-5
"""Of an update, relative to its norm, in the first step."""
OWN_GRADIENTS, OF_ONE_MATRIX = 2e-2, 2e-1
"""The same in the second step, of all matrices together and of each. What another microbatch size alone does to torch's
Muon in one process was measured: up to 0.07 in one of 37 matrices, and no less in wider models."""
COMPARED = 2
"""Steps of which the updates are compared; of the third the loss tells enough."""
INPUTS_AND_OUTPUTS = ("vision.patch.weight", "language.embedding.weight", "language.head.weight")
"""Matrices that AdamW steps."""
SHARDS = ("optimizer", "gradients", "full")
LAYOUTS: dict[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "colocated lanes": {"vision": on(0, 3), "language": on(0, 3)},
    "lanes 3 to 2": {"vision": on(0, 2), "language": on(3, 4)},
    "vision tp3, language tp2": {"vision": on(0, 5, tp=3), "language": on(2, 5, tp=2)},
    "pipelines in both": {"vision": on(0, 1, pp=2), "language": on(2, 5, pp=2)},
    "language tp3 sp, keys on several ranks": {"vision": on(0, 1), "language": on(2, 7, tp=3, **SP)},
    "language cp2 pp2 tp2 sp, colocated": {"vision": on(0, 7), "language": on(0, 7, cp=2, pp=2, tp=2, **SP)},
}
EXPERTS: dict[str, Modules] = {
    "experts on one rank": {"vision": on(0, 0), "language": on(1, 1)},
    "experts over lanes": {"vision": on(0, 1), "language": on(0, 3, ep=2)},
    "experts over tensor ranks, cut too": {"vision": on(0, 0), "language": on(0, 7, tp=2, ep=2, etp=2, **SP)},
}
TIED: dict[str, Modules] = {
    "tied stages of two lanes": {"vision": on(0, 0), "language": on(1, 4, pp=2)},
    "tied stages, cut": {"vision": on(0, 0), "language": on(1, 4, pp=2, tp=2)},
}


@attrs.frozen(kw_only=True)
class Outcome:
    """What some steps came to on a rank: the loss of each, and by how much the first two moved what it holds."""

    losses: list[float]
    updates: list[dict[str, Piece]]


@attrs.frozen(kw_only=True)
class Truth:
    """The same of one process at full shape, and the gradients of the first step."""

    losses: list[float]
    updates: list[dict[str, Tensor]]
    gradients: dict[str, Tensor]


def whole(value: Tensor) -> Tensor:
    """Return a copy of a parameter or gradient at full shape."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def trained(trainer: Trainer) -> dict[str, nn.Parameter]:
    """Return what the optimizer steps on this rank, by full name."""
    modules = trainer.optimizer.modules.values()
    return {name: value for module in modules for name, value in module.part.parameters.items()}


def run_layout(rank: int, settings: Table, gradients: Mapping[str, Tensor]) -> Outcome:
    """Train on this rank as `mimo train` does, but for gradients that are given for the first step."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    losses, updates = [], []
    for step in range(1, STEPS + 1):
        before = {name: Piece.of(value) for name, value in trained(trainer).items()} if step <= COMPARED else {}
        stats = trainer.accumulate(step)
        if step == 1:
            for name, value in trained(trainer).items():
                give(value, gradients[name])
        losses.append(trainer.update(step, stats).loss)
        if step <= COMPARED:
            after = {name: Piece.of(value) for name, value in trained(trainer).items()}
            updates.append(
                {name: attrs.evolve(piece, values=piece.values - before[name].values) for name, piece in after.items()}
            )
    return Outcome(losses=losses, updates=updates)


def give(parameter: Tensor, gradient: Tensor) -> None:
    """Put this rank's piece of a gradient where its own one is."""
    own = parameter.grad
    assert isinstance(own, DTensor)
    place = own.device_mesh.get_coordinate()
    assert place is not None
    for axis, (placement, at) in enumerate(zip(own.placements, place, strict=True)):
        if isinstance(placement, Shard) and len(gradient):
            pieces = gradient.chunk(own.device_mesh.size(axis), placement.dim)
            gradient = pieces[at] if at < len(pieces) else gradient.narrow(placement.dim, 0, 0)
    own.to_local().copy_(gradient)


def run_torch(_rank: int, settings: Table) -> Truth:
    """Train one process with all the samples at once, and step what it had in the beginning by torch's optimizers."""
    trainer = Trainer(make_job(settings), rank=0, device=CPU)
    followers = {name: Follower.of(name, whole(value), settings) for name, value in trained(trainer).items()}
    losses, updates, gradients = [], [], []
    for step in range(1, STEPS + 1):
        stats = trainer.accumulate(step)
        gradients.append(
            {name: whole(value.grad) for name, value in trained(trainer).items() if value.grad is not None}
        )
        stepped = trainer.update(step, stats)
        losses.append(stepped.loss)
        scale = 1 / stepped.agreed.label_weight
        updates.append(
            {
                name: follower.step(gradients[-1][name] * scale)
                if stepped.agreed.rows[name.partition(".")[0]]
                else torch.zeros_like(gradients[-1][name])
                for name, follower in followers.items()
            }
        )
    return Truth(losses=losses, updates=updates[:COMPARED], gradients=gradients[0])


@attrs.frozen
class Follower:
    """A parameter that torch's Muon or AdamW steps, each expert of a stack as a matrix of its own."""

    pieces: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, name: str, value: Tensor, settings: Table) -> Follower:
        """Return one that begins with ``value``."""
        pieces = [nn.Parameter(piece.clone()) for piece in matrices(name, value)]
        decay, eps = settings["optimizer"]["weight_decay"], settings["optimizer"]["eps"]
        if is_for_muon(name, value):
            return cls(pieces, torch.optim.Muon(pieces, lr=RATE, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
        return cls(pieces, torch.optim.AdamW(pieces, lr=RATE, weight_decay=decay, betas=(0.9, 0.95), eps=eps))

    def step(self, gradient: Tensor) -> Tensor:
        """Return the update that a gradient makes."""
        before = [piece.detach().clone() for piece in self.pieces]
        for piece, one in zip(self.pieces, gradient.view(len(self.pieces), *before[0].shape), strict=True):
            piece.grad = one.clone()
        self.optimizer.step()
        moved = [piece.detach() - old for piece, old in zip(self.pieces, before, strict=True)]
        return torch.stack(moved).view_as(gradient)


def is_for_muon(name: str, value: Tensor) -> bool:
    """Tell which parameters Muon steps."""
    return value.ndim > 1 and name not in INPUTS_AND_OUTPUTS


def matrices(name: str, value: Tensor) -> Sequence[Tensor]:
    """Return the matrices of a stack of experts, or a parameter alone."""
    return value.unbind(0) if ".experts." in name else (value,)


def differences(truth: Truth, found: Sequence[Outcome]) -> Iterator[str]:
    """Yield every way in which a layout differs from the truth, on any rank."""
    for rank, outcome in enumerate(found):
        for step, (loss, expected) in enumerate(zip(outcome.losses, truth.losses, strict=True), 1):
            if abs(loss - expected) > (1e-6 if step == 1 else 1e-4) * expected:
                yield f"rank {rank}: loss {loss!r} of step {step}, expected {expected!r}"
    first, second = (
        {name: errors_of([one.updates[step] for one in found], name, value) for name, value in updates.items()}
        for step, updates in enumerate(truth.updates)
    )
    yield from (f"{line} in step 1" for line in _differences(first, truth.updates[0], allowed=SAME_GRADIENTS))
    yield from (f"{line} in step 2" for line in _differences(second, truth.updates[1], allowed=OF_ONE_MATRIX))
    of_muon = [name for name, value in second.items() if is_for_muon(name, value)]
    error, norm = (math.hypot(*(float(of[name].norm()) for name in of_muon)) for of in (second, truth.updates[1]))
    if error > OWN_GRADIENTS * norm:
        yield f"updates of all matrices off by {error / norm:.3g} of their norm in step 2"


def errors_of(updates: Sequence[Mapping[str, Piece]], name: str, expected: Tensor) -> Tensor:
    """Return how far off the worst copy of each element of an update is."""
    errors = worst([pieces[name] for pieces in updates if name in pieces], expected)
    assert (errors >= 0).all(), f"no rank has all of {name}"
    return torch.from_numpy(errors).view_as(expected)


def _differences(found: Mapping[str, Tensor], truth: Mapping[str, Tensor], *, allowed: float) -> Iterator[str]:
    """Yield where an update is off by more than allowed of a matrix, or by what the first law allows of others."""
    for name, errors in found.items():
        for piece, right in zip(matrices(name, errors), matrices(name, truth[name]), strict=True):
            error, norm = float(piece.norm()), float(right.norm())
            of_muon = is_for_muon(name, errors)
            bound = allowed * norm if of_muon else 1e-5 * max(norm, 3 * RATE * right.numel() ** 0.5)
            if error > bound:
                yield f"update of {name} off by {error:.3g}, allowed {bound:.3g}, norm {norm:.3g}"


def settings_of(modules: Modules, shard: str, **more: Any) -> Table:
    """Return settings in which Muon steps all modules, without clipping: a norm is no input of the same gradients."""
    found = table(modules, microbatches=2, **more)
    found["optimizer"] |= {"plugin": "muon", "shard": shard, "clip": 0.0}
    return found


def check(settings: Table, pool: Pool) -> str:
    """Return the differences from torch in one process, a line each."""
    (truth,) = pool.recall(1, run_torch, alone(settings))
    return "\n".join(differences(truth, pool.run(world_of(settings), run_layout, settings, truth.gradients)))


@pytest.mark.parametrize(("layout", "shard"), in_turn(LAYOUTS, SHARDS))
def test_muon_moves_matrices_as_torch_does(layout: str, shard: str, pool: Pool) -> None:
    """Wherever the pieces of a matrix lie, its update is that of torch's Muon on the whole; all else is AdamW's."""
    assert check(settings_of(LAYOUTS[layout], shard), pool) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("pictures", "shard"), in_turn(["first", "none"], SHARDS))
def test_muon_takes_ranks_without_pictures_along(pictures: str, shard: str, pool: Pool) -> None:
    """A step in which lanes have no picture, or none has, is an ordinary one."""
    modules = LAYOUTS["vision tp3, language tp2"]
    assert check(settings_of(modules, shard, pictures=pictures), pool) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "shard"), in_turn(EXPERTS, SHARDS))
def test_muon_takes_each_expert_for_a_matrix(layout: str, shard: str, pool: Pool) -> None:
    """Experts move as torch's Muon moves each one's matrices, and the router as any other matrix."""
    language, seed = CLEAR_SEEDS["softmax"]
    assert check(settings_of(EXPERTS[layout], shard, language=language, seed=seed), pool) == ""


@pytest.mark.soak
def test_muon_moves_what_lora_adds(pool: Pool) -> None:
    """Beside linears and experts that are cut; matrices of which one side is the rank."""
    language, seed = CLEAR_SEEDS["softmax"]
    modules = EXPERTS["experts over tensor ranks, cut too"]
    settings = settings_of(modules, "full", language=language, seed=seed)
    for module in settings["modules"].values():
        module["lora"] = {"rank": 2, "targets": ["layers.*"]}
    assert check(settings, pool) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "shard"), in_turn(TIED, SHARDS))
def test_muon_leaves_tied_embeddings_alike(layout: str, shard: str, pool: Pool) -> None:
    """Both stages that hold the embeddings step them as AdamW does."""
    assert check(settings_of(TIED[layout], shard, language={"tied": True}), pool) == ""


@pytest.mark.soak
def test_muon_goes_on_from_a_checkpoint_in_any_layout(tmp_path: Path, pool: Pool) -> None:
    """The same layout goes on to the bit; another one takes over weights, momentum and moments to the bit."""
    language, seed = CLEAR_SEEDS["softmax"]
    first, second = (
        settings_of(EXPERTS[layout], shard, language=language, seed=seed)
        for layout, shard in (("experts over lanes", "full"), ("experts over tensor ranks, cut too", "optimizer"))
    )
    for settings in (first, second):
        settings["run"] |= {"steps": 6, "directory": str(tmp_path)}
    check_going_on(pool, first, first, exactly=True)
    saved = pool.run(world_of(first), run_steps, first, 4, 3, str(tmp_path))
    loaded = pool.run(world_of(second), run_steps, second, 4, 3, str(tmp_path))
    assert same_bits(assemble(loaded), assemble(saved))
    assert "optimizer.language.layers.1.mlp.experts.up.weight.momentum_buffer" in assemble(saved)

"""Runs that stop and resume, as functions for `pool.Pool.run`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from jobs import CPU, find, make_job
from oracle import Piece, compare
from tables import RATE, world_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from mimo.hooks import Generators, Stateful, StateTree
from mimo.testing import Pool
from mimo.trainer import Trainer, read_settings, resolve
from mimo.trainer.runtime import RunState, check_source, find_source, resume, save_step, share_source

Found = tuple[list[tuple[float, float, float]], dict[str, Piece]]


def begin(
    rank: int, settings: dict[str, Any], load: str = "", parts: Sequence[Stateful] = ()
) -> tuple[Trainer, str, RunState]:
    """Make a rank's trainer as `mimo train` does, and load what settings name, or a run directory if one is given.

    Returns:
        The trainer, the summary of what was loaded, and what the checkpoints of the run hold of it.
    """
    job = make_job({**settings, "checkpoint": {"load": load}} if load else settings)
    trainer = Trainer(job, rank=rank, device=CPU)
    source = share_source(find_source(job.settings))
    if source is None:
        return trainer, "", RunState()
    check_source(job, source)
    resumed = resume(trainer, parts, source)
    return trainer, resumed.summary, resumed.state


def run_and_save(rank: int, settings: dict[str, Any]) -> Found:
    """Train three steps and save the third; see `run_steps`."""
    return run_steps(rank, settings, 1, 3, "", save=3)


def run_whole(rank: int, settings: dict[str, Any]) -> Found:
    """Train all steps of a run and save the third; see `run_steps`."""
    return run_steps(rank, settings, 1, settings["run"]["steps"], "", save=3)


def run_and_evaluate(rank: int, settings: dict[str, Any]) -> Found:
    """Train six steps with an evaluation after each; see `run_steps`."""
    return run_steps(rank, settings, 1, 6, "", evaluate=True)


def evaluation_loss(rank: int, settings: dict[str, Any]) -> float:
    """Evaluate what nobody has trained, as `mimo evaluate` does, and return the loss."""
    trainer = Trainer(resolve(read_settings(settings), purpose="evaluate", find=find), rank=rank, device=CPU)
    found = trainer.evaluate(0)
    assert found is not None
    return found.loss


def run_steps(
    rank: int,
    settings: dict[str, Any],
    first: int,
    last: int,
    load: str,
    *,
    save: int = 0,
    evaluate: bool = False,
) -> Found:
    """Train steps ``first`` to ``last``, after loading a run directory if one is named; save step ``save`` of them.

    With ``evaluate`` there is an evaluation after each step.

    Returns:
        Loss, gradient norm and learning rate of each step, and what this rank holds of each weight and moment.
    """
    trainer, _, run_state = begin(rank, settings, load)
    infos = []
    for step in range(first, last + 1):
        infos.append(trainer.train(step))
        if evaluate:
            assert trainer.evaluate(step) is not None
        if step == save:
            save_step(trainer, run_state, [], step)
    moments: dict[str, Any] = {f"optimizer.{name}": tree for name, tree in trainer.optimizer.state().items()}
    state: dict[str, Any] = {
        f"{module}.{name}": value
        for module, tree in {**trainer.model_state(), **moments}.items()
        for name, value in tree.items()
    }
    held = {name: Piece.of(value) for name, value in state.items()}
    return [(info.loss, info.grad_norm, info.lr) for info in infos], held


def check_trajectory(resumed: list[Found], straight: list[Found], *, exactly: bool) -> None:
    """Refuse a resumed run that is not the run that never stopped, to the bit or within the first law, rank by rank.

    Args:
        resumed: what each rank of the resumed run found, from its first step on.
        straight: the same from step 1 on.
        exactly: whether to the bit.
    """
    for (steps, state), (all_steps, expected) in zip(resumed, straight, strict=True):
        if exactly:
            assert steps == all_steps[-len(steps) :]
            assert same_bits(_values(state), _values(expected))
        else:
            for found, true in zip(steps, all_steps[-len(steps) :], strict=True):
                assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found, true, strict=True))
    for name, value in ({} if exactly else assemble(straight)).items():
        pieces = {rank: state[name] for rank, (_, state) in enumerate(resumed) if name in state}
        least = 0 if name.startswith("optimizer.") else 3 * RATE * math.sqrt(value.numel())
        bound = 1e-5 * max(float(value.norm()), least) + 1e-9
        assert list(compare(name, pieces, value, bound)) == []


def check_going_on(pool: Pool, first: dict[str, Any], second: dict[str, Any], *, exactly: bool) -> list[Found]:
    """Refuse a run that resumes after the third step of another one and differs from one that never stopped.

    Args:
        pool: runs both.
        first: settings of what saves, in a directory; where ``second`` is the same, it is also what never stops.
        second: settings of what resumes.
        exactly: whether to the bit.

    Returns:
        What never stopped.
    """
    directory, steps = first["run"]["directory"], second["run"]["steps"]
    if first == second:
        straight = pool.run(world_of(second), run_whole, first)
    else:
        pool.run(world_of(first), run_and_save, first)
        straight = pool.run(world_of(second), run_steps, second, 1, steps, "")
    resumed = pool.run(world_of(second), run_steps, second, 4, steps, directory)
    check_trajectory(resumed, straight, exactly=exactly)
    return straight


def assemble(found: Iterable[Found]) -> dict[str, Tensor]:
    """Return what ranks hold together, at full shape by flat name."""
    wholes: dict[str, Tensor] = {}
    for name, piece in (one for _, state in found for one in state.items()):
        values = torch.from_numpy(piece.values)
        whole = wholes.setdefault(name, torch.zeros(piece.shape, dtype=values.dtype))
        whole.view(-1)[torch.from_numpy(piece.places).long()] = values
    return wholes


def _values(state: Mapping[str, Piece]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(piece.values) for name, piece in state.items()}


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


class Draws:
    """A plugin's part that draws numbers from a generator of its own, seeded by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._generator = torch.Generator().manual_seed(sum(name.encode()))

    def draw(self) -> float:
        """Return the next number."""
        return float(torch.rand((), generator=self._generator))

    def state(self) -> StateTree:
        """Return where the generator is."""
        return {"generator": self._generator.get_state()}

    def load(self, tree: StateTree) -> None:
        """Put the generator there."""
        state = tree["generator"]
        assert isinstance(state, Tensor)
        self._generator.set_state(state)


@attrs.frozen(kw_only=True)
class Resumption:
    """What one rank saw of a run that resumed.

    Args:
        summary: of what was loaded.
        began: what it held before the first step, weights and moments by flat name.
        ended: what it held after the last.
        losses: of each step.
        rates: learning rate of each step.
        drawn: the next number of a part that is a plugin's state, and of one that is its generators.
    """

    summary: str
    began: dict[str, Tensor]
    ended: dict[str, Tensor]
    losses: list[float]
    rates: list[float]
    drawn: tuple[float, float]


def resume_run(rank: int, settings: dict[str, Any], first: int, last: int, *, save: bool = False) -> Resumption:
    """Load what settings name, and train steps ``first`` to ``last``; save the last if asked."""
    state, generators = Draws("state"), Draws("generators")
    parts = (state, Generators(generators))
    trainer, summary, run_state = begin(rank, settings, parts=parts)
    began = everything(trainer)
    infos = [trainer.train(step) for step in range(first, last + 1)]
    drawn = (state.draw(), generators.draw())
    if save:
        save_step(trainer, run_state, parts, last)
    return Resumption(
        summary=summary,
        began=began,
        ended=everything(trainer),
        losses=[info.loss for info in infos],
        rates=[info.lr for info in infos],
        drawn=drawn,
    )


def train_from(rank: int, settings: dict[str, Any], weights: Mapping[str, Tensor], steps: Sequence[int]) -> list[float]:
    """Put weights into the trainer of a new run on one rank by hand, train some steps, and return their losses."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    with torch.no_grad():
        for name, parameter in (pair for held in trainer.optimizer.weights().values() for pair in held.items()):
            _local(parameter).copy_(weights[name])
    return [trainer.train(step).loss for step in steps]


def resume_and_save(rank: int, settings: dict[str, Any], first: int, last: int) -> Resumption:
    """Do as `resume_run`, and save the last step."""
    return resume_run(rank, settings, first, last, save=True)


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of what this rank holds of weights and moments, by the names that a checkpoint has for them."""
    states = {f"optimizer.{module}": tree for module, tree in trainer.optimizer.state().items()}
    trees: dict[str, Any] = {**trainer.model_state(), **states}
    return {
        f"{first}.{name}": _local(value).detach().clone()
        for first, tree in trees.items()
        for name, value in tree.items()
        if isinstance(value, Tensor)
    }


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value

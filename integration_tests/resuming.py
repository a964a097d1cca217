"""Runs that stop and go on, as functions for `pool.Pool.run`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jobs import CPU, find, make_job
from oracle import Piece, compare
from tables import RATE
from torch import Tensor

from mimo.trainer._config import make_settings
from mimo.trainer._engine import Engine
from mimo.trainer._resolve import resolve
from mimo.trainer._resuming import resume, step_folder
from mimo.trainer._saving import save_step

Found = tuple[list[tuple[float, float, float]], dict[str, Piece]]


def run_and_save(rank: int, settings: dict[str, Any]) -> Found:
    """Train three steps and save the third; see `run_steps`."""
    return run_steps(rank, settings, 1, 3, "", save=True)


def run_and_evaluate(rank: int, settings: dict[str, Any]) -> Found:
    """Train six steps with an evaluation after each; see `run_steps`."""
    return run_steps(rank, settings, 1, 6, "", evaluate=True)


def evaluation_loss(rank: int, settings: dict[str, Any]) -> float:
    """Evaluate what nobody has trained, as `mimo evaluate` does, and return the loss."""
    engine = Engine(resolve(make_settings(settings), purpose="evaluate", find=find), rank=rank, device=CPU)
    found = engine.evaluate(0)
    assert found is not None
    return found.loss


def run_steps(
    rank: int,
    settings: dict[str, Any],
    first: int,
    last: int,
    load: str,
    *,
    save: bool = False,
    evaluate: bool = False,
) -> Found:
    """Train steps ``first`` to ``last``, after loading a run directory if one is named; save the last if asked.

    With ``evaluate`` there is an evaluation after each step.

    Returns:
        Loss, gradient norm and learning rate of each step, and what this rank holds of each weight and moment.
    """
    engine = Engine(make_job(settings), rank=rank, device=CPU)
    if load:
        resume(engine, [], step_folder(Path(load)))
    infos = []
    for step in range(first, last + 1):
        infos.append(engine.train(step))
        if evaluate:
            assert engine.evaluate(step) is not None
    if save:
        save_step(engine, [], last)
    moments: dict[str, Any] = {f"optimizer.{name}": tree for name, tree in engine.optimizer.state().items()}
    state: dict[str, Any] = {
        f"{module}.{name}": value
        for module, tree in {**engine.model_state(), **moments}.items()
        for name, value in tree.items()
    }
    held = {name: Piece.of(value) for name, value in state.items()}
    return [(info.loss, info.grad_norm, info.lr) for info in infos], held


def check_trajectory(went_on: list[Found], straight: list[Found], *, exactly: bool) -> None:
    """Refuse a resumed run that is not the run that never stopped, to the bit or within the first law, rank by rank.

    Args:
        went_on: what each rank of the resumed run found, from the step on with which it went on.
        straight: the same from step 1 on.
        exactly: whether to the bit.
    """
    for (steps, state), (all_steps, expected) in zip(went_on, straight, strict=True):
        if exactly:
            assert steps == all_steps[-len(steps) :]
            assert same_bits(_values(state), _values(expected))
        else:
            for found, true in zip(steps, all_steps[-len(steps) :], strict=True):
                assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found, true, strict=True))
    for name, value in ({} if exactly else assemble(straight)).items():
        pieces = {rank: state[name] for rank, (_, state) in enumerate(went_on) if name in state}
        least = 0 if name.startswith("optimizer.") else 3 * RATE * math.sqrt(value.numel())
        bound = 1e-5 * max(float(value.norm()), least) + 1e-9
        assert list(compare(name, pieces, value, bound)) == []


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
    """Tell whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

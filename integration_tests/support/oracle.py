"""The oracle: every layout must agree with the truth, a plain one-process PyTorch loop.

Tolerances are those of the first law: the first loss to 1e-6 relative, what teachers and generators add to it to 1e-5,
every gradient to ``1e-5 max(|g|, 1e-3 |g_global|)``, weights after three steps to ``1e-5 max(|w|, 3 lr sqrt(n))``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from jobs import CPU, make_job
from safetensors import safe_open
from safetensors.numpy import save_file
from tables import RATE, STEPS, Table, alone, world_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from truth import Truth, read_truth, run_plain, write_truth

from mimo.optimizer.runtime import ReducedStats
from mimo.testing import Pool, made_once
from mimo.trainer import Job, Trainer

GAP = 1e-5
"""Least distance between the last expert that a row chose and the first that it did not, for a case with experts to be
one: nearer ones may be chosen by rounding, which moves scores by 1e-6 within these steps, in any layout."""
SEEDS = 20
"""How many are tried for one that is clear."""
ROUNDING = 5
"""Layouts differ from the truth by about as much as it changes where each weight begins as the next number, at most by
3.8 times as much in random ones; so many times may be rounding."""
ROUNDED_SEEDS = 3
"""So many are run where rounding is large."""


@attrs.frozen(kw_only=True)
class Piece:
    """What one rank holds of a tensor of ``shape``: values, and where in the flattened tensor each of them stands.

    It comes as arrays, which are pickled much faster than tensors.
    """

    shape: tuple[int, ...]
    values: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]

    @classmethod
    def of(cls, value: Tensor) -> Piece:
        """Return what this rank holds, copied and without asking others."""
        places = torch.arange(value.numel(), dtype=torch.int32).view(value.shape)
        held = value
        if isinstance(held, DTensor):
            where = held.device_mesh.get_coordinate()
            assert where is not None
            for axis, (placement, at) in enumerate(zip(held.placements, where, strict=True)):
                assert not placement.is_partial()
                if isinstance(placement, Shard | _StridedShard):
                    places = placement._split_tensor(places, held.device_mesh.size(axis), with_padding=False)[0][at]
            held = held.to_local()  # first: how a DTensor of each shape is detached takes long to work out
        held = held.detach()
        held = held.float() if held.dtype == torch.bfloat16 else held  # which numpy lacks
        return cls(shape=tuple(value.shape), values=held.cpu().numpy().flatten(), places=places.numpy().flatten())


MOMENTS = 5e-3
"""How far weights may differ where moments of AdamW are in bf16, as a share of how far they could move: each rounding
changes an average by at most a 128th of itself, and a step moves a number by the rate at most."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What a few steps came to on one rank; gradients of the first of them, weights after the last, by full name.

    ``terms`` are what teachers and generators add to the loss, means by name.
    """

    losses: list[float]
    terms: dict[str, list[float]]
    norms: list[float]
    gradients: dict[str, Piece]
    weights: dict[str, Piece]


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write what one rank came to into a safetensors file, which is there whole or not at all."""
    tensors, shapes = {}, {}
    for kind in ("gradients", "weights"):
        for name, piece in getattr(outcome, kind).items():
            shapes[f"{kind}/{name}"] = piece.shape
            tensors[f"{kind}/{name}/values"], tensors[f"{kind}/{name}/places"] = piece.values, piece.places
    notes = {"losses": outcome.losses, "terms": outcome.terms, "norms": outcome.norms, "shapes": shapes}
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"notes": json.dumps(notes)})
    part.replace(path)


def read_outcome(path: Path) -> Outcome:
    """Return what `write_outcome` wrote."""
    with safe_open(path, framework="numpy") as file:
        notes = json.loads(file.metadata()["notes"])
        pieces: dict[str, dict[str, Piece]] = {"gradients": {}, "weights": {}}
        for key, shape in notes["shapes"].items():
            kind, name = key.split("/", 1)
            values, places = file.get_tensor(f"{key}/values"), file.get_tensor(f"{key}/places")
            pieces[kind][name] = Piece(shape=tuple(shape), values=values, places=places)
    return Outcome(losses=notes["losses"], terms=notes["terms"], norms=notes["norms"], **pieces)


def run_layout(
    rank: int, settings: Table, *, device: torch.device = CPU, objects: ProcessGroup | None = None
) -> Outcome:
    """Train on this rank as `mimo train` does."""
    trainer = Trainer(make_job(settings), rank=rank, device=device, objects=objects)
    losses, norms, gradients = [], [], {}
    terms: dict[str, list[float]] = {}
    for step in range(1, STEPS + 1):
        stats = trainer.accumulate(step)
        if step == 1:
            summed = {
                name: Piece.of(value.grad)
                for module in trainer.optimizer.modules.values()
                for name, value in module.part.parameters.items()
                if value.grad is not None
            }
        stepped = trainer.update(step, stats)
        if step == 1:
            weight = stepped.agreed.divisor
            gradients = {name: attrs.evolve(piece, values=piece.values / weight) for name, piece in summed.items()}
        for name, mean in term_means(trainer.job, stepped.agreed).items():
            terms.setdefault(name, []).append(mean)
        losses.append(stepped.loss)
        norms.append(stepped.norm)
    held = {name: value for weights in trainer.optimizer.weights().values() for name, value in weights.items()}
    weights = {name: Piece.of(value) for name, value in held.items()}
    return Outcome(losses=losses, terms=terms, norms=norms, gradients=gradients, weights=weights)


def term_means(job: Job, agreed: ReducedStats) -> dict[str, float]:
    """Return what teachers and generators add to the loss of a step, each over its own count, unweighted."""
    sums = {name: float(value) for name, value in agreed.extra_sums.items() if value.numel() == 1}
    taught = [f"{module.name}.{kind}" for module in job.teachers for kind in ("divergence", "hidden")]
    return {
        **{f"{it.name}.loss": sums[f"{it.name}.loss"] / (sums[f"{it.name}.targets"] or 1) for it in job.generators},
        **{name: sums[name] / agreed.divisor for name in taught if name in sums},
    }


def differences(
    truth: Truth, found: Sequence[Outcome], *, nudged: Truth | None = None, moments: str = "fp32"
) -> Iterator[str]:
    """Yield every way in which a layout differs from the truth by more than the law allows, on any rank.

    Each gradient and weight may also differ by `ROUNDING` times what ``nudged`` changes, see `truth.run_plain`; weights
    may by `MOMENTS` more where moments are in bf16.
    """
    of_gradients, of_weights = ({}, {}) if nudged is None else (nudged.gradients, nudged.weights)
    for rank, outcome in enumerate(found):
        if not math.isclose(outcome.losses[0], truth.losses[0], rel_tol=1e-6):
            yield f"rank {rank}: first loss {outcome.losses[0]!r}, expected {truth.losses[0]!r}"
        if not math.isclose(outcome.norms[0], truth.norms[0], rel_tol=1e-5):
            yield f"rank {rank}: first norm {outcome.norms[0]!r}, expected {truth.norms[0]!r}"
        yield from (f"rank {rank}: {line}" for line in _term_differences(truth.terms, outcome.terms))
    total = math.sqrt(sum(float(value.double().square().sum()) for value in truth.gradients.values()))
    untrained = {name: torch.zeros_like(value) for name, value in truth.weights.items()}
    for name, expected in {**untrained, **truth.gradients}.items():
        pieces = {rank: outcome.gradients[name] for rank, outcome in enumerate(found) if name in outcome.gradients}
        if pieces or name in truth.gradients:
            bound = 1e-5 * max(float(expected.norm()), 1e-3 * total)
            bound = _rounded(bound, expected, of_gradients.get(name))
            yield from compare(f"gradient of {name}", pieces, expected, bound)
    for name, expected in truth.weights.items():
        pieces = {rank: outcome.weights[name] for rank, outcome in enumerate(found) if name in outcome.weights}
        bound = 1e-5 * max(float(expected.norm()), 3 * RATE * math.sqrt(expected.numel()))
        bound = _rounded(bound, expected, of_weights.get(name))
        bound += MOMENTS * RATE * STEPS * math.sqrt(expected.numel()) if moments == "bf16" else 0
        yield from compare(f"weight {name} after {STEPS} steps", pieces, expected, bound)
    unknown = {name for outcome in found for name in (*outcome.gradients, *outcome.weights)} - truth.weights.keys()
    if unknown:
        yield f"only the layout has {sorted(unknown)}"


def _term_differences(truth: Mapping[str, list[float]], found: Mapping[str, list[float]]) -> Iterator[str]:
    """Yield which terms are missing, or differ in the first step."""
    if found.keys() != truth.keys():
        yield f"terms {sorted(found)}, expected {sorted(truth)}"
        return
    for name, expected in truth.items():
        if not math.isclose(found[name][0], expected[0], rel_tol=1e-5):  # a divergence is a small difference of logs
            yield f"first {name} {found[name][0]!r}, expected {expected[0]!r}"


def _rounded(bound: float, expected: Tensor, nudged: Tensor | None) -> float:
    """Return what may differ where rounding changes so much."""
    return bound if nudged is None else max(bound, ROUNDING * float((nudged.double() - expected.double()).norm()))


def compare(what: str, pieces: Mapping[int, Piece], expected: Tensor, bound: float) -> Iterator[str]:
    """Yield how the worst copy of each element, of those that ranks hold, differs from what is expected."""
    for rank, piece in pieces.items():
        if piece.shape != expected.shape:
            yield f"rank {rank}: {what}: shape {piece.shape}, expected {tuple(expected.shape)}"
            return
    errors = worst(pieces.values(), expected)
    if (errors < 0).any():
        yield f"{what}: no rank holds {(errors < 0).sum()} of its {errors.size} elements"
    elif (off := float(np.linalg.norm(errors))) > bound:
        yield f"{what}: off by {off:.3g}, allowed {bound:.3g}"


def worst(pieces: Iterable[Piece], expected: Tensor) -> np.ndarray[Any, Any]:
    """Return how far off the worst copy of each element is, flattened; -1 where nobody holds one."""
    true = expected.double().numpy().flatten()
    errors = np.full(true.shape, -1.0)
    for piece in pieces:
        error = np.abs(piece.values - true[piece.places])
        errors[piece.places] = np.fmax(errors[piece.places], np.where(np.isnan(error), np.inf, error))
    return errors


class Oracle:
    """Compares layouts with the truth in the processes of a pool.

    Args:
        pool: of processes.
        folder: of truths, where each model's is computed once for all who compare with it.
        plain: trains by a plain loop, as `truth.run_plain` does.
        layout: trains a layout.
    """

    def __init__(
        self,
        pool: Pool,
        folder: Path,
        *,
        plain: Callable[..., Truth] = run_plain,
        layout: Callable[[int, Table], Outcome] = run_layout,
    ) -> None:
        self._pool, self._folder = pool, folder
        self._plain, self._layout = plain, layout

    def truth(self, settings: Table) -> Truth:
        """Return what one plain process comes to."""
        plain = alone(settings)
        path = self._folder / f"{hashlib.sha256(repr(plain).encode()).hexdigest()}.safetensors"
        return read_truth(made_once(path, lambda part: write_truth(self._pool.run(1, self._plain, plain)[0], part)))

    def clear(self, settings: Table) -> Table:
        """Return settings with the next seed that leaves no choice of experts to rounding."""
        first = settings["run"]["seed"]
        for seed in range(first, first + SEEDS):
            settings = _with_seed(settings, seed)
            if self.truth(settings).gap >= GAP:
                return settings
        msg = f"seeds {first} to {first + SEEDS - 1}: in each a row chooses its experts by less than {GAP:.2g}"
        raise AssertionError(msg)

    def check(self, settings: Table) -> str:
        """Return the `differences` of a layout from the truth, a line each, with the next seed that is clear."""
        return self.assess(settings)[1]

    def assess(self, settings: Table) -> tuple[Table, str]:
        """Return settings with a seed that is clear, and the `differences` of their layout from the truth, a line each.

        Where rounding alone may be why numbers differ, each by no more than it explains, the next seed is run: sums are
        rounded in other ways on another processor. The last one must not differ at all.
        """
        lines: list[str] = []
        moments = settings["optimizer"].get("moments", "fp32")
        for number in range(ROUNDED_SEEDS):
            settings = self.clear(_with_seed(settings, settings["run"]["seed"] + min(number, 1)))
            truth, found = self.truth(settings), self.run(settings)
            lines = list(differences(truth, found, moments=moments))
            if not lines:
                break
            (nudged,) = self._pool.run(1, partial(self._plain, nudged=True), alone(settings))
            if any(differences(truth, found, nudged=nudged, moments=moments)):
                break
            seed = settings["run"]["seed"]
            print(f"     seed {seed}: rounding may be why {len(lines)} differ, as {lines[0]}", flush=True)
        return settings, "\n".join(lines)

    def run(self, settings: Table) -> list[Outcome]:
        """Return what each rank of a layout comes to."""
        return self._pool.run(world_of(settings), self._layout, settings)


def _with_seed(settings: Table, seed: int) -> Table:
    return {**settings, "run": {**settings["run"], "seed": seed}}

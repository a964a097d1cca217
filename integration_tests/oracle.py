"""The oracle: a plain one-process PyTorch loop is the truth, and every layout must agree with it.

As a program it draws layouts that nobody chose: ``python integration_tests/oracle.py --random 20 --seed 1``.
Tolerances are those of the first law: the first loss to 1e-6 relative, every gradient to
``1e-5 max(|g|, 1e-3 |g_global|)``, weights after three steps to ``1e-5 max(|w|, 3 lr sqrt(n))``.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import synthetic
import torch
from ranks import fork_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mimo.data import DATASETS, StepSampler
from mimo.hooks import Kind
from mimo.trainer._config import make_settings
from mimo.trainer._engine import Engine
from mimo.trainer._plugins import find_installed
from mimo.trainer._programs import language_batch
from mimo.trainer._resolve import resolve
from mimo.trainer._resolved import Job
from mimo.trainer._step_data import StepData

STEPS = 3
SAMPLES = 24
RATE = 1e-3
EPS = 1e-4
"""AdamW divides each gradient by its own size. An element whose true gradient is near zero, as a key bias's is, would
step by nothing but its rounding noise; this keeps such steps small, so that weights can be compared."""
CPU = torch.device("cpu")
Table = dict[str, Any]


def table(
    modules: Mapping[str, Mapping[str, Any]],
    *,
    microbatches: int = 1,
    pictures: str = "mixed",
    language: Mapping[str, Any] | None = None,
    seed: int = 5,
) -> Table:
    """Return the settings of a small model: 24 samples a step, uneven vocabulary and widths.

    Args:
        modules: keys of ``[modules.<name>]`` by name, beside plugin and config.
        microbatches: of a step.
        pictures: see `synthetic.SyntheticConfig`.
        language: keys of the decoder's config that differ.
        seed: of the run.
    """
    encoders = [name for name in modules if name != "language"]
    lanes = _lanes(modules["language"])
    vit = {"patch": 2, "channels": 1, "width": 24, "layers": 3, "heads": 6, "intermediate": 37}
    decoder = {"hidden": 24, "layers": 3, "heads": 6, "kv_heads": 2, "intermediate": 37, **(language or {})}
    return {
        "run": {
            "name": "oracle",
            "steps": STEPS,
            "seed": seed,
            "global_batch": SAMPLES,
            "micro_batch": SAMPLES // (lanes * microbatches),
        },
        "data": {"plugin": "synthetic", "pictures": pictures, "modalities": [_modality(name) for name in encoders]},
        "tokenizer": {"plugin": "word", "words": list(synthetic.WORDS)},
        "modules": {
            name: {"plugin": "decoder", "config": decoder, **keys}
            if name == "language"
            else {"plugin": "vit", "modality": _modality(name), "config": vit, **keys}
            for name, keys in modules.items()
        },
        "optimizer": {"lr": RATE, "weight_decay": 0.1, "clip": 1.0, "eps": EPS},
    }


def _modality(encoder: str) -> str:
    return "image" if encoder == "vision" else encoder


def _lanes(keys: Mapping[str, Any]) -> int:
    ranks = len(keys["ranks"]) if isinstance(keys["ranks"], list) else 0
    return int(keys.get("dp", 0)) or ranks // (keys.get("pp", 1) * keys.get("tp", 1))


def alone(settings: Table) -> Table:
    """Return the same model and data on one rank, in one microbatch."""
    found = copy.deepcopy(settings)
    found["run"]["micro_batch"] = SAMPLES
    for keys in found["modules"].values():
        for axis in ("pp", "dp", "tp", "sequence_parallel"):
            keys.pop(axis, None)
        keys["ranks"] = [0]
    return found


def find(kind: Kind[Any], name: str, where: str) -> Any:
    """Find installed plugins, and the synthetic dataset."""
    if kind is DATASETS and name == "synthetic":
        return synthetic.mimo_register_datasets()[0]
    return find_installed(kind, name, where)


def make_job(settings: Table) -> Job:
    """Resolve settings."""
    return resolve(make_settings(settings), find=find)


@attrs.frozen(kw_only=True)
class Outcome:
    """What a run of a few steps came to, as one rank saw it; tensors at full shape by full name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def _full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def run_plain(_rank: int, settings: Table) -> Outcome:
    """Train by a plain loop: whole batch at once, no plan, no boundary, none of our optimizers."""
    job = make_job(alone(settings))
    engine = Engine(job, rank=0, device=CPU)  # builds the modules; nothing else of it is used
    parts = engine.model.parts
    weights = {name: value for part in parts.values() for name, value in part.parameters.items()}
    trained = {name: value for name, value in weights.items() if value.requires_grad}
    choice = job.language.optimizer
    optimizer = torch.optim.AdamW(
        trained.values(), lr=RATE, betas=choice.config.betas, eps=choice.config.eps, weight_decay=0.1, foreach=False
    )
    assert job.train is not None
    sampler = StepSampler(len(job.train), SAMPLES, job.settings.run.seed)
    losses, norms, gradients = [], [], {}
    for step in range(1, STEPS + 1):
        (batch,) = StepData.cut(job, job.train, sampler.samples(step), microbatches=1).microbatches
        rows = {}
        for module in job.encoders:
            items = batch.items(module, 0)
            prepared = batch.prepare(module, 0)
            if prepared:
                rows[module.name] = parts[module.name].encode(prepared, [item.info.size for item in items])
        packed = language_batch(batch.packed(0), job, CPU)
        language = parts["language"].language
        labels = packed.labels
        loss = language.losses(language(packed, rows, None), labels).sum() / int((labels >= 0).sum())
        optimizer.zero_grad()
        if loss.requires_grad:  # not where only an encoder trains and has nothing to read
            loss.backward()
        norms.append(float(_full(nn.utils.clip_grad_norm_(trained.values(), math.inf))))
        if step == 1:
            gradients = {name: _full(value.grad) for name, value in trained.items() if value.grad is not None}
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return Outcome(
        losses=losses, norms=norms, gradients=gradients, weights={name: _full(value) for name, value in weights.items()}
    )


def run_layout(rank: int, settings: Table) -> Outcome:
    """Train on this rank as `mimo train` does."""
    job = make_job(settings)
    engine = Engine(job, rank=rank, device=CPU)
    losses, norms, gradients = [], [], {}
    for step in range(1, STEPS + 1):
        tally = engine.accumulate(step)
        summed = {
            name: _full(value.grad)
            for module in engine.optimizer.modules.values()
            for name, value in module.part.parameters.items()
            if value.grad is not None
        }
        stepped = engine.optimizer.step(step, tally)
        if step == 1:
            gradients = {name: value / stepped.agreed.label_tokens for name, value in summed.items()}
        losses.append(stepped.loss)
        norms.append(stepped.norm)
    weights = {name: _full(value) for name, value in engine.model.parameters_by_name.items()}
    return Outcome(losses=losses, norms=norms, gradients=gradients, weights=weights)


def differences(truth: Outcome, found: Sequence[Outcome]) -> list[str]:
    """Return every way in which a layout differs from the truth by more than the law allows, on any rank."""
    wrong = []
    total = math.sqrt(sum(float(value.double().square().sum()) for value in truth.gradients.values()))
    names: set[str] = set()
    for rank, outcome in enumerate(found):
        if not math.isclose(outcome.losses[0], truth.losses[0], rel_tol=1e-6):
            wrong.append(f"rank {rank}: first loss {outcome.losses[0]!r}, expected {truth.losses[0]!r}")
        if not math.isclose(outcome.norms[0], truth.norms[0], rel_tol=1e-5):
            wrong.append(f"rank {rank}: first norm {outcome.norms[0]!r}, expected {truth.norms[0]!r}")
        names |= outcome.weights.keys()
        for name, value in outcome.gradients.items():
            expected = truth.gradients.get(name, torch.zeros_like(value))
            bound = 1e-5 * max(float(expected.norm()), 1e-3 * total)
            wrong += _compare(f"rank {rank}: gradient of {name}", value, expected, bound)
        for name, value in outcome.weights.items():
            expected = truth.weights[name]
            bound = 1e-5 * max(float(expected.norm()), 3 * RATE * math.sqrt(expected.numel()))
            wrong += _compare(f"rank {rank}: weight {name} after {STEPS} steps", value, expected, bound)
    if names != truth.weights.keys():
        wrong.append(f"parameters {sorted(names ^ truth.weights.keys())} are only in one of the two")
    missing = truth.gradients.keys() - {name for outcome in found for name in outcome.gradients}
    if missing:
        wrong.append(f"no rank has a gradient of {sorted(missing)}")
    return wrong


def _compare(what: str, found: Tensor, expected: Tensor, bound: float) -> list[str]:
    if found.shape != expected.shape:
        return [f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"]
    error = float((found.double() - expected.double()).norm())
    return [] if error <= bound else [f"{what}: off by {error:.3g}, allowed {bound:.3g}"]


def world_of(settings: Table) -> int:
    """Return the processes that settings need."""
    return 1 + max(int(rank) for keys in settings["modules"].values() for rank in keys["ranks"])


class Oracle:
    """Compares layouts with the truth; each model's truth is computed once."""

    def __init__(self) -> None:
        self._truths: dict[str, Outcome] = {}

    def check(self, settings: Table) -> list[str]:
        """Return the `differences` of a layout from the truth."""
        key = repr(alone(settings))
        if key not in self._truths:
            (self._truths[key],) = fork_ranks(1, run_plain, settings)
        return differences(self._truths[key], fork_ranks(world_of(settings), run_layout, settings))


def draw(rng: random.Random, *, world: int = 8) -> Table:
    """Draw a layout: one or two encoders and a language model on any ranks of the world."""
    modules: dict[str, dict[str, Any]] = {}
    for name in ("vision", "glyph")[: rng.choice((1, 1, 2))]:
        modules[name] = _draw_grid(rng, world, lanes=range(1, 9))
    keys = _draw_grid(rng, world, lanes=(1, 2, 3))
    if keys["tp"] > 1:
        keys["sequence_parallel"] = rng.random() < 0.5
    modules["language"] = keys
    if rng.random() < 0.2:
        modules["vision"]["frozen"] = rng.choice((["encoder"], True))
    if rng.random() < 0.1:
        keys["frozen"] = True
        modules["vision"].pop("frozen", None)
    return table(
        modules,
        microbatches=rng.choice([count for count in (1, 2, 4) if SAMPLES % (_lanes(keys) * count) == 0]),
        pictures=rng.choice(("mixed", "mixed", "mixed", "first", "digits", "none")),
        language={"tied": rng.random() < 0.3, "kv_heads": rng.choice((1, 2, 3, 6))},
        seed=rng.randrange(1000),
    )


def _draw_grid(rng: random.Random, world: int, *, lanes: Sequence[int] | range) -> dict[str, Any]:
    while True:
        pp, dp, tp = rng.choice((1, 1, 2, 3)), rng.choice(lanes), rng.choice((1, 1, 2, 3, 6))
        if pp * dp * tp <= world:
            ranks = sorted(rng.sample(range(world), pp * dp * tp))
            return {"ranks": ranks, "pp": pp, "dp": dp, "tp": tp}


def describe(settings: Table) -> str:
    """Return a layout in a line."""
    keys = ("ranks", "pp", "dp", "tp", "sequence_parallel", "frozen")
    parts = [
        name + "(" + ", ".join(f"{key} {module[key]}" for key in keys if module.get(key, 1) != 1) + ")"
        for name, module in settings["modules"].items()
    ]
    decoder = settings["modules"]["language"]["config"]
    parts.append(f"micro_batch {settings['run']['micro_batch']}, pictures {settings['data']['pictures']}")
    return " ".join(parts) + f", tied {decoder.get('tied', False)}, kv_heads {decoder['kv_heads']}"


def main() -> int:
    """Check random layouts; return 1 if one differs."""
    parser = argparse.ArgumentParser(description="Compare layouts that nobody chose with one plain process.")
    parser.add_argument("--random", type=int, default=20, metavar="N", help="how many layouts")
    parser.add_argument("--seed", type=int, default=0, help="layout k depends on seed and k alone")
    options = parser.parse_args()
    failed = 0
    oracle = Oracle()
    for index in range(options.random):
        settings = draw(random.Random(f"{options.seed} {index}"))
        wrong = oracle.check(settings)
        print(f"{'FAIL' if wrong else 'ok  '} {index}: {describe(settings)}", flush=True)
        for line in wrong[:10]:
            print(f"     {line}")
        failed += bool(wrong)
    print(f"{options.random - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

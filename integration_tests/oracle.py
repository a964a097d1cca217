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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import attrs
import synthetic
import torch
from plain_rules import PlainRules
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mimo.data import DATASETS, StepSampler
from mimo.hooks import Kind
from mimo.model import ENCODERS, LanguageModelSpec
from mimo.model.runtime import Choices, Router, local
from mimo.schedule import SCHEDULES as SCHEDULES_KIND
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
CLIP = 1.0
EPS = 1e-4
"""AdamW divides each gradient by its own size. An element whose true gradient is near zero, as a key bias's is, would
step by nothing but its rounding noise; this keeps such steps small, so that weights can be compared."""
GAP = 1e-4
"""Least distance between the last expert that a row chose and the first that it did not, for a case with experts to be
one: nearer ones are chosen by rounding, in any layout."""
AXES_KEYS = (
    "pp",
    "dp",
    "cp",
    "tp",
    "ep",
    "etp",
    "sequence_parallel",
    "chunks",
    "batch_factor",
    "recompute",
    "prefetch",
)
"""Keys of a module that say how it is split and passed through, and nothing of what it computes."""
SHARD_KEYS = ("shard", "shard_lanes")
"""Keys of an optimizer that say how what it steps is spread over lanes, likewise."""
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {"plugin": "1f1b"},
    "gpipe": {"plugin": "gpipe"},
    "interleaved": {"plugin": "interleaved"},
    "zb-h1": {"plugin": "zero-bubble", "form": "h1"},
    "zb-h2": {"plugin": "zero-bubble", "form": "h2"},
    "zb-v": {"plugin": "zero-bubble", "form": "v"},
    "ahead": {"plugin": "ahead"},
}
"""Tables ``[schedule]``."""
CHUNKED = frozenset({"interleaved", "zb-v"})
"""Schedules that need two chunks or more of a pipelined module."""
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
        "optimizer": {"lr": RATE, "weight_decay": 0.1, "clip": CLIP, "eps": EPS},
    }


def scheduled(settings: Table, schedule: str) -> Table:
    """Return settings with one of `SCHEDULES`, and what it needs: chunks, layers for them, microbatches enough.

    Where nothing is pipelined, a schedule that needs chunks is not for these settings.

    Raises:
        LookupError: the samples of a step don't make as many microbatches as it needs.
    """
    found = copy.deepcopy(settings)
    found["schedule"] = dict(SCHEDULES[schedule])
    language = found["modules"]["language"]
    stages, lanes = language.get("pp", 1), _lanes(language)
    if schedule in CHUNKED:
        assert stages > 1, "needs a pipeline"
        language["chunks"] = 2
    layers = stages * language.get("chunks", 1)
    found["modules"]["language"]["config"] = {**language["config"], "layers": layers * -(-3 // layers)}
    least = max(map(_least_of_h2, found["modules"].values())) if schedule == "zb-h2" else stages
    fitting = [count for count in (1, 2, 3, 4, 6, 8, 12, 24) if SAMPLES % (lanes * count) == 0]
    wanted = max(SAMPLES // (lanes * settings["run"]["micro_batch"]), least)
    multiple = stages if schedule == "interleaved" else 1
    enough = [count for count in fitting if count >= wanted and count % multiple == 0]
    if not enough:
        raise LookupError(schedule)
    count = enough[0]
    found["run"]["micro_batch"] = SAMPLES // (lanes * count)
    return found


def _least_of_h2(keys: Mapping[str, Any]) -> int:
    """Return the fewest microbatches that make 2 x pp - 1 passes."""
    return int((2 * keys.get("pp", 1) - 2) * keys.get("batch_factor", 1) + 1)


def _modality(encoder: str) -> str:
    return "image" if encoder == "vision" else encoder


def _lanes(keys: Mapping[str, Any]) -> int:
    ranks = len(keys["ranks"]) if isinstance(keys["ranks"], list) else 0
    return int(keys.get("dp", 0)) or ranks // (keys.get("pp", 1) * keys.get("cp", 1) * keys.get("tp", 1))


def alone(settings: Table) -> Table:
    """Return the same model and data on one rank, in one microbatch."""
    found = copy.deepcopy(settings)
    found["run"]["micro_batch"] = SAMPLES
    found.pop("schedule", None)
    for keys in found["modules"].values():
        for axis in AXES_KEYS:
            keys.pop(axis, None)
        keys["ranks"] = [0]
    for keys in (found, *found["modules"].values()):
        if "optimizer" in keys:
            keys["optimizer"] = _replicated(keys["optimizer"])
    return found


def _replicated(optimizer: Mapping[str, Any]) -> Table:
    """Return an optimizer's keys with nothing spread over lanes."""
    kept = {key: value for key, value in optimizer.items() if key not in SHARD_KEYS}
    if kept.get("plugin") == "distributed":
        kept["plugin"] = "adamw"
    return kept


def find(kind: Kind[Any], name: str, where: str) -> Any:
    """Find installed plugins and some of ours.

    Those are the synthetic dataset, ``1f1b-v``, which lays the chunks of ``1f1b`` in a V, and ``shy-vit``, which runs
    no layer and gives rows without a graph where it has no picture, as a stranger's encoder may.
    """
    if kind is DATASETS and name == "synthetic":
        return synthetic.mimo_register_datasets()[0]
    if kind is SCHEDULES_KIND and name == "1f1b-v":
        return attrs.evolve(find_installed(kind, "1f1b", where), name=name, placement=lambda _config: "v")
    if kind is ENCODERS and name == "shy-vit":
        spec = find_installed(kind, "vit", where)
        return attrs.evolve(
            spec, name=name, build=partial(_shy, spec.build), tensor=None, stages=None, context=None, recompute={}
        )
    return find_installed(kind, name, where)


def _shy(build: Callable[[Any, int], nn.Module], config: Any, hidden: int) -> nn.Module:
    module = build(config, hidden)
    run = type(module).forward

    def forward(self: nn.Module, items: Sequence[Any]) -> Tensor:
        return cast("Tensor", run(self, items)) if items else torch.zeros(0, hidden)

    module.__class__ = type("Shy", (type(module),), {"forward": forward})
    return module


def make_job(settings: Table) -> Job:
    """Resolve settings."""
    return resolve(make_settings(settings), find=find)


@attrs.frozen(kw_only=True)
class Outcome:
    """What a run of a few steps came to, as one rank saw it; tensors at full shape by full name.

    ``gap`` is the least by which any row's choice of experts was clear, of the truth alone.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    gap: float = math.inf


def _full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def run_plain(_rank: int, settings: Table) -> Outcome:
    """Train by a plain loop: whole batch at once, no plan, no boundary, none of our optimizers."""
    job = make_job(alone(settings))
    engine = Engine(job, rank=0, device=CPU)  # builds the modules; nothing else of it is used
    parts = {part.name: part for part in engine.model.parts.values()}
    weights = {name: value for part in parts.values() for name, value in part.parameters.items()}
    trained = {name: value for name, value in weights.items() if value.requires_grad}
    rules = PlainRules(settings, trained)
    optimizer = rules.make_adamw()
    assert job.train is not None
    sampler = StepSampler(len(job.train), SAMPLES, job.settings.run.seed)
    losses, norms, gradients = [], [], {}
    gaps = _watch_gaps(parts["language"].module)
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
        count = int((labels >= 0).sum())
        loss = language.losses(language(packed, rows, None), labels).sum() / count
        whole = loss + sum(packed.ledger.losses.values()) / count
        optimizer.zero_grad()
        if whole.requires_grad:  # not where only an encoder trains and has nothing to read
            whole.backward()
        norms.append(_norm(trained.values()))
        if step == 1:
            gradients = {name: _full(value.grad) for name, value in trained.items() if value.grad is not None}
        rules.clip()
        rules.set_rates(optimizer, step)
        optimizer.step()
        assert isinstance(job.language.spec, LanguageModelSpec)
        if job.language.spec.experts is not None:
            job.language.spec.experts.after_step(parts["language"].module, packed.ledger.counts)
        losses.append(float(loss.detach()))
    return Outcome(
        losses=losses,
        norms=norms,
        gradients=gradients,
        weights={name: _full(value) for name, value in weights.items()},
        gap=min(gaps, default=math.inf),
    )


def _norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the norm of all gradients together; torch's own refuses DTensors of different meshes."""
    gradients = [_full(value.grad).double() for value in parameters if value.grad is not None]
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


def _watch_gaps(module: nn.Module) -> list[float]:
    """Return a list that takes, at each forward of each router, by how much the closest choice of a row was clear."""
    gaps: list[float] = []

    def watch(router: Router, _inputs: Any, choices: Choices) -> None:
        ranked = choices.scores.detach() + (0.0 if router.bias is None else local(router.bias))
        best = ranked.topk(router.chosen + 1, dim=1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))

    for part in module.modules():
        if isinstance(part, Router) and part.chosen < len(part.weight):
            part.register_forward_hook(watch)
    return gaps


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
        stepped = engine.update(step, tally)
        if step == 1:
            gradients = {name: value / stepped.agreed.label_tokens for name, value in summed.items()}
        losses.append(stepped.loss)
        norms.append(stepped.norm)
    held = {name: value for weights in engine.optimizer.weights().values() for name, value in weights.items()}
    weights = {name: _full(value) for name, value in held.items()}
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
    """Compares layouts with the truth in the processes of a pool; each model's truth is computed once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._truths: dict[str, Outcome] = {}

    def truth(self, settings: Table) -> Outcome:
        """Return what one plain process comes to."""
        key = repr(alone(settings))
        if key not in self._truths:
            (self._truths[key],) = self._pool.run(1, run_plain, settings)
        return self._truths[key]

    def clear(self, settings: Table) -> Table:
        """Return settings with the next seed that leaves no choice of experts to rounding."""
        while self.truth(settings).gap < GAP:
            settings = {**settings, "run": {**settings["run"], "seed": settings["run"]["seed"] + 1}}
        return settings

    def check(self, settings: Table) -> list[str]:
        """Return the `differences` of a layout from the truth."""
        truth = self.truth(settings)
        if truth.gap < GAP:
            return [f"seed {settings['run']['seed']}: a row chose its experts by {truth.gap:.2g} only"]
        return differences(truth, self._pool.run(world_of(settings), run_layout, settings))


def draw(rng: random.Random, *, world: int = 8) -> Table:
    """Draw a layout: one or two encoders and a language model on any ranks of the world."""
    modules: dict[str, dict[str, Any]] = {}
    for name in ("vision", "glyph")[: rng.choice((1, 1, 2))]:
        modules[name] = _draw_grid(rng, world, lanes=range(1, 9))
    keys = _draw_grid(rng, world, lanes=(1, 2, 3))
    modules["language"] = keys
    experts = _draw_experts(rng, keys) if rng.random() < 0.3 else {}
    if rng.random() < 0.2:
        modules["vision"]["frozen"] = rng.choice((["encoder"], True))
    if rng.random() < 0.1:
        keys["frozen"] = True
        modules["vision"].pop("frozen", None)
    for encoder in modules.keys() - {"language"}:
        modules[encoder]["batch_factor"] = rng.choice((1, 1, 2, 3))
    for module in modules.values():
        if module.get("frozen") is not True:
            module["recompute"] = rng.choice(("none", "none", "selective", "full"))
    settings = table(
        modules,
        microbatches=rng.choice([count for count in (1, 2, 4) if SAMPLES % (_lanes(keys) * count) == 0]),
        pictures=rng.choice(("mixed", "mixed", "mixed", "first", "digits", "none")),
        language={"tied": rng.random() < 0.3, "kv_heads": rng.choice((1, 2, 3, 6)), **experts},
        seed=rng.randrange(1000),
    )
    schedules = [name for name in SCHEDULES if name not in CHUNKED or keys["pp"] > 1]
    rng.shuffle(schedules)
    for schedule in schedules:
        with suppress(LookupError):
            return _draw_spread(rng, scheduled(settings, schedule))
    raise AssertionError(settings)


def _draw_spread(rng: random.Random, settings: Table) -> Table:
    """Draw what is spread over data lanes, and over how many of them."""
    shard = rng.choice(("", "", "", "optimizer", "gradients", "full"))
    if not shard:
        return settings
    for keys in settings["modules"].values():
        lanes = _lanes(keys) * keys.get("cp", 1)
        among = rng.choice([0, 0, *(count for count in range(1, lanes) if lanes % count == 0)])
        keys["optimizer"] = {"shard_lanes": among}
    return {**settings, "optimizer": {**settings["optimizer"], "plugin": "distributed", "shard": shard}}


def _draw_experts(rng: random.Random, keys: dict[str, Any]) -> dict[str, Any]:
    """Draw a mixture of experts, and where it lies on the ranks of the language model's grid."""
    stage = keys["dp"] * keys["cp"] * keys["tp"]
    keys["ep"] = rng.choice([size for size in (1, 2, 4) if stage % size == 0])
    keys["etp"] = rng.choice([size for size in (1, 2, 3) if stage % (keys["ep"] * size) == 0])
    chosen = rng.choice((1, 2))
    return {
        "experts": 4,
        "experts_per_token": chosen,
        "router_normalize": chosen > 1,
        "dense_layers": rng.choice((1, 2)),
        "shared_intermediate": rng.choice((0, 11)),
        "router_score": rng.choice(("softmax", "sigmoid")),
        "expert_bias_rate": rng.choice((0.0, 0.01)),
        "balance_loss": 0.05,
        "z_loss": 0.01,
    }


def _draw_grid(rng: random.Random, world: int, *, lanes: Sequence[int] | range) -> dict[str, Any]:
    while True:
        pp, dp, cp, tp = (
            rng.choice((1, 1, 2, 3)),
            rng.choice(lanes),
            rng.choice((1, 1, 2, 3)),
            rng.choice((1, 1, 2, 3, 6)),
        )
        if pp * dp * cp * tp <= world:
            ranks = sorted(rng.sample(range(world), pp * dp * cp * tp))
            keys = {"ranks": ranks, "pp": pp, "dp": dp, "cp": cp, "tp": tp}
            return keys | ({"sequence_parallel": rng.random() < 0.5} if tp > 1 else {})


def describe(settings: Table) -> str:
    """Return a layout in a line."""
    keys = ("ranks", *AXES_KEYS, "frozen", "optimizer")
    parts = [
        name + "(" + ", ".join(f"{key} {module[key]}" for key in keys if module.get(key, 1) != 1) + ")"
        for name, module in settings["modules"].items()
    ]
    decoder = settings["modules"]["language"]["config"]
    parts.append(f"{' '.join(settings['schedule'].values())}, micro_batch {settings['run']['micro_batch']}")
    parts.append(f"pictures {settings['data']['pictures']}")
    return (
        " ".join(parts)
        + f", tied {decoder.get('tied', False)}, kv_heads {decoder['kv_heads']}"
        + (f", experts {decoder['experts']}" if "experts" in decoder else "")
        + (f", spread {settings['optimizer']['shard']}" if "shard" in settings["optimizer"] else "")
    )


def main() -> int:
    """Check random layouts; return 1 if one differs."""
    parser = argparse.ArgumentParser(description="Compare layouts that nobody chose with one plain process.")
    parser.add_argument("--random", type=int, default=20, metavar="N", help="how many layouts")
    parser.add_argument("--seed", type=int, default=0, help="layout k depends on seed and k alone")
    options = parser.parse_args()
    failed = 0
    with Pool() as pool:
        oracle = Oracle(pool)
        for index in range(options.random):
            settings = oracle.clear(draw(random.Random(f"{options.seed} {index}")))
            wrong = oracle.check(settings)
            print(f"{'FAIL' if wrong else 'ok  '} {index}: {describe(settings)}", flush=True)
            for line in wrong[:10]:
                print(f"     {line}")
            failed += bool(wrong)
    print(f"{options.random - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

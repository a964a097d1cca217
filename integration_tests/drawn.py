"""Layouts that nobody chose, beside the truth: ``python integration_tests/drawn.py --random 20 --seed 1``."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jobs import prepare
from oracle import Oracle
from pool import Pool
from tables import AXES_KEYS, CHUNKED, EVEN_EPS, SAMPLES, SCHEDULES, Table, lanes_of, scheduled, table
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_mixed import ENCODERS


def draw(rng: random.Random, *, world: int = 8) -> Table:
    """Draw a layout: one to three encoders and a language model on any ranks of the world."""
    modules = _draw_encoders(rng, world)
    keys = _draw_grid(rng, world, lanes=(1, 2, 3))
    modules["language"] = keys
    language: Table = {"tied": rng.random() < 0.3, "kv_heads": rng.choice((1, 2, 3, 6))}
    if rng.random() < 0.4:
        _place_experts(rng, keys)
        language = {**HYBRID, **language, "pattern": "".join(rng.sample("ME*-", 4)) + rng.choice(("", "M", "EM"))}
        keys |= {"plugin": "hybrid", "config": language}
    elif rng.random() < 0.3:
        language |= _draw_experts(rng, keys)
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
        microbatches=rng.choice([count for count in (1, 2, 4) if SAMPLES % (lanes_of(keys) * count) == 0]),
        pictures=rng.choice(("mixed", "mixed", "many", "many", "first", "digits", "none")),
        language=language,
        seed=rng.randrange(1000),
        eps=EVEN_EPS,
    )
    schedules = [name for name in SCHEDULES if name not in CHUNKED or keys["pp"] > 1]
    rng.shuffle(schedules)
    for schedule in schedules:
        with suppress(LookupError):
            return _draw_spread(rng, _lengthened(scheduled(settings, schedule)))
    raise AssertionError(settings)


def _draw_encoders(rng: random.Random, world: int) -> dict[str, dict[str, Any]]:
    """Draw one or two plain ones, or one to three of unlike families."""
    if rng.random() < 0.4:
        plain = ("vision", "glyph")[: rng.choice((1, 1, 2))]
        return {name: _draw_grid(rng, world, lanes=range(1, 9)) for name in plain}
    names = ["vision", *rng.sample(("audio", "radio"), rng.choice((0, 1, 2)))]
    return {name: {**_draw_grid(rng, world, lanes=range(1, 9)), **rng.choice(ENCODERS[name])} for name in names}


def _lengthened(settings: Table) -> Table:
    """Return settings in which a hybrid has as many layers as its schedule needs, or more."""
    config = settings["modules"]["language"]["config"]
    if "pattern" in config:
        layers = config.pop("layers")
        config["pattern"] = (config["pattern"] * layers)[: max(layers, len(config["pattern"]))]
    return settings


def _draw_spread(rng: random.Random, settings: Table) -> Table:
    """Draw what is spread over data lanes, and over how many of them."""
    shard = rng.choice(("", "", "", "optimizer", "gradients", "full"))
    if not shard:
        return settings
    for keys in settings["modules"].values():
        lanes = lanes_of(keys) * keys.get("cp", 1)
        among = rng.choice([0, 0, *(count for count in range(1, lanes) if lanes % count == 0)])
        keys["optimizer"] = {"shard_lanes": among} | ({"shard": "optimizer"} if among == 1 else {})
    return {**settings, "optimizer": {**settings["optimizer"], "plugin": "distributed", "shard": shard}}


def _draw_experts(rng: random.Random, keys: dict[str, Any]) -> dict[str, Any]:
    """Draw a mixture of experts, and where it lies."""
    _place_experts(rng, keys)
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


def _place_experts(rng: random.Random, keys: dict[str, Any]) -> None:
    """Draw where experts lie on the ranks of the language model's grid."""
    stage = keys["dp"] * keys["cp"] * keys["tp"]
    keys["ep"] = rng.choice([size for size in (1, 2, 4) if stage % size == 0])
    keys["etp"] = rng.choice([size for size in (1, 2, 3) if stage % (keys["ep"] * size) == 0])


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
        module["plugin"] + "(" + ", ".join(f"{key} {module[key]}" for key in keys if module.get(key, 1) != 1) + ")"
        for name, module in settings["modules"].items()
    ]
    decoder = settings["modules"]["language"]["config"]
    parts.append(f"{' '.join(settings['schedule'].values())}, micro_batch {settings['run']['micro_batch']}")
    parts.append(f"pictures {settings['data']['pictures']}")
    return (
        " ".join(parts)
        + f", tied {decoder.get('tied', False)}, kv_heads {decoder['kv_heads']}"
        + (f", experts {decoder['experts']}" if "experts" in decoder else "")
        + (f", pattern {decoder['pattern']}" if "pattern" in decoder else "")
        + (f", spread {settings['optimizer']['shard']}" if "shard" in settings["optimizer"] else "")
    )


def main() -> int:
    """Check random layouts; return 1 if one differs."""
    parser = argparse.ArgumentParser(description="Compare layouts that nobody chose with one plain process.")
    parser.add_argument("--random", type=int, default=20, metavar="N", help="how many layouts")
    parser.add_argument("--seed", type=int, default=0, help="layout k depends on seed and k alone")
    options = parser.parse_args()
    failed = 0
    with Pool(prepare) as pool, TemporaryDirectory() as folder:
        oracle = Oracle(pool, Path(folder))
        for index in range(options.random):
            settings = oracle.clear(draw(random.Random(f"{options.seed} {index}")))
            wrong = oracle.check(settings)
            print(f"{'FAIL' if wrong else 'ok  '} {index}: {describe(settings)}", flush=True)
            for line in wrong.splitlines()[:10]:
                print(f"     {line}")
            failed += bool(wrong)
    print(f"{options.random - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

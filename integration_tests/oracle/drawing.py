"""Settings that nobody chose: any modules in any layout, trained in any way, each from a generator of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jobs import make_job
from tables import CHUNKED, EVEN_EPS, SAMPLES, SCHEDULES, TEACHER, Table, by_tokens, lanes_of, scheduled, table
from test_oracle import FAMILIES as DECODERS
from test_oracle_audio import CONFIGS as WHISPER
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_mixed import ENCODERS as MIXED
from test_oracle_radio import CONFIGS as RADIO
from test_oracle_vision import FAMILIES as VISION

from mimo.model import Stage
from mimo.model.runtime import linears, stage_without_storage
from mimo.trainer import Job
from mimo.trainer.runtime import JobModule

ENCODERS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "vision": ({}, {}, *MIXED["vision"], *VISION.values()),
    "glyph": ({},),
    "audio": tuple({"plugin": "whisper", "config": config} for config in WHISPER.values()),
    "radio": tuple({"plugin": "radio", "config": config} for config in RADIO.values()),
}
"""Keys of each module, one kind of encoder each; none for a plain ``vit``."""
TEACHERS = ("teacher", "tutor")
GENERATORS: Mapping[str, str] = {"drawer": "vision", "scribe": "glyph"}
"""And which encoder reads what they make, if the model has it."""
NOUNS: Mapping[str, str] = {"drawer": "image", "scribe": "glyph"}
"""What they make."""
SKETCHES: Sequence[Mapping[str, Any]] = ({}, {"reads": "own"}, {"reads": "own", "rows": 3}, {"rows": 2})
FLOW: Mapping[str, Any] = {
    "height": 4,
    "width": 6,
    "channels": 1,
    "patch": 2,
    "hidden": 24,
    "layers": 2,
    "heads": 6,
    "intermediate": 37,
    "drop_condition": 0.3,
}
ROLES: Sequence[Sequence[str]] = (("output",), ("input", "output"), ("both",), ("input", "output", "both"))
CLIPS: Sequence[Mapping[str, Any]] = (
    {},
    {},
    {"clip": 0.05},
    {"clip": 0.0},
    {"clip": 0.05, "clip_by": "module"},
    {"clip_groups": {"deep": 0.02}, "patterns": {"*norm*": {"weight_decay": 0.0}, "*layers.*": {"clip_group": "deep"}}},
    {"lr_schedule": "cosine", "lr_warmup_steps": 1},
)
"""Keys of ``[optimizer]``."""
HYBRID_STEPS = {"plugin": "cpu-offload", "fraction": 0.5, "bucket_bytes": 2048, "staging_bytes": 0}


def draw(rng: random.Random, *, world: int = 8) -> Table:
    """Draw settings: one to three encoders, up to two teachers and generators, and a language model on any ranks.

    Some are refused by design, as where all is frozen, or where a norm that clips belongs to nothing.
    """
    language = _draw_grid(rng, range(world), lanes=(1, 2, 3))
    names = rng.sample(list(ENCODERS), rng.choice((1, 1, 2, 3)))
    modules = {name: _draw_encoder(rng, name, language["ranks"], world) for name in names}
    teachers = TEACHERS[: rng.choice((0, 0, 0, 1, 1, 2))]
    sees = "vision" in names and rng.random() < 0.6
    for name in teachers:
        modules[name] = _draw_teacher(rng, language["ranks"], world)
        if sees:
            modules[f"eye_of_{name}"] = _draw_eye(rng, modules["vision"], name, language["ranks"], world)
            modules[name]["prefetch"] = modules[f"eye_of_{name}"]["prefetch"]
    config = _draw_language(rng, language)
    made = rng.sample(list(GENERATORS), rng.choice((0, 0, 0, 1, 1, 2)))
    modules |= {name: _draw_generator(rng, language["ranks"], world) for name in made}
    for name in made:
        reader = GENERATORS[name]
        if reader in names and rng.random() < 0.4:
            modules[f"lens_of_{name}"] = _draw_lens(rng, name, language["ranks"], world)
        elif reader in names and rng.random() < 0.4:
            modules[reader]["feeds"] = ["language", name]
    settings = table(
        {**modules, "language": language},
        roles=_draw_roles(rng, modules, made),
        microbatches=rng.choice([count for count in (1, 2, 4) if SAMPLES % (lanes_of(language) * count) == 0]),
        pictures=rng.choice(("mixed", "mixed", "many", "many", "first", "digits", "none")),
        language=config,
        seed=rng.randrange(1000),
        eps=EVEN_EPS,
    )
    settings["data"]["max_tokens"] = rng.choice((1024, 1024, 1024, 24))
    settings = _draw_schedule(rng, settings)
    _draw_training(rng, settings)
    settings = _draw_optimizer(rng, settings)
    settings["data"]["weights"] = rng.choice(("none", "none", "mixed", "first"))
    settings["data"]["balance"] = rng.choice(("cost", "cost", "count"))
    if rng.random() < 0.3:
        micro, times = rng.choice((40, 60, 90)), rng.choice((1, 2, 4))
        longer = rng.choice(("cut", "cut", "drop"))
        settings = by_tokens(settings, batch_tokens=times * micro + 40, micro_tokens=micro, longer=longer)
    settings["modules"]["language"]["loss_rows"] = rng.choice((0, 0, 3, 7))
    settings["modules"]["language"]["round_rows"] = rng.choice((1, 1, 1, 5, 64))
    if any(map(_teaches, (settings["modules"].get(name, {}) for name in TEACHERS))):
        settings["modules"]["language"]["loss_weight"] = rng.choice((0.0, 0.5, 1.0))
    if settings["optimizer"].get("plugin", "adamw") != HYBRID_STEPS["plugin"]:
        settings["optimizer"]["moments"] = rng.choice(("fp32", "fp32", "fp32", "bf16"))
    if rng.random() < 0.1:  # it takes each rank seconds
        settings["run"] |= {"compile": True, "compile_backend": "aot_eager"}
    return settings


def _draw_teacher(rng: random.Random, language: Sequence[int], world: int) -> dict[str, Any]:
    """Draw a teacher on any ranks, on some of the language model's, or on others."""
    others = [rank for rank in range(world) if rank not in language]
    grid = _draw_grid(rng, rng.choice((range(world), language, others or language)), lanes=range(1, 9))
    of_ids = {
        "distil": {"top_k": rng.choice((1, 2, 5)), "temperature": rng.choice((0.7, 1.0, 3.0))},
        "loss_weight": rng.choice((0.0, 0.3, 1.0, 2.0)),
        "loss_rows": rng.choice((0, 0, 4)),
    }
    found = {
        **grid,
        **of_ids,
        "config": {**TEACHER, "layers": max(2, grid["pp"]), "kv_heads": 6},
        "round_rows": rng.choice((1, 1, 7)),
        "prefetch": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        hidden = {"hidden": rng.choice(("mse", "cosine")), "hidden_weight": rng.choice((0.0, 0.3, 1.0, 2.0))}
        found["config"] = {**found["config"], "hidden": _HIDDEN}
        if rng.random() < 0.5:
            found = {key: value for key, value in found.items() if key not in of_ids} | {"distil": {"top_k": 0}}
        found["distil"] = {**found["distil"], **hidden}
    return found


def _teaches(teacher: Mapping[str, Any]) -> bool:
    """Tell whether keys of a module are those of a teacher that anything is learned from."""
    distil = teacher.get("distil", {"top_k": 0})
    return bool((distil["top_k"] and teacher["loss_weight"]) or distil.get("hidden_weight"))


def _draw_generator(rng: random.Random, language: Sequence[int], world: int) -> dict[str, Any]:
    """Draw a generator on any ranks, on some of the language model's, or on others."""
    others = [rank for rank in range(world) if rank not in language]
    ranks = rng.choice((range(world), language, others or language))
    grid = _draw_grid(rng, ranks, lanes=range(1, 9))
    config: Mapping[str, Any] = rng.choice(SKETCHES)
    plugin = rng.choice(("sketch", "flow", "flow"))
    if plugin == "sketch":  # which has lanes alone
        grid = {"ranks": grid["ranks"], "pp": 1, "dp": len(grid["ranks"]), "cp": 1, "tp": 1}
    else:
        reads, queries = rng.choice(("before", "own")), rng.choice((1, 2))
        config = {**FLOW, "reads": reads, "queries": queries, "layers": max(2, grid["pp"])}
    return {
        **grid,
        "plugin": plugin,
        "fed_by": "language",
        "config": config,
        "loss_weight": rng.choice((0.0, 0.3, 1.0, 2.0)),
        "batch_factor": rng.choice((1, 1, 2, 3)),
    }


def _draw_roles(
    rng: random.Random, modules: Mapping[str, Mapping[str, Any]], made: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    """Draw by modality what roles items have that generators make; teachers see none of what their students do."""
    return {NOUNS[name]: rng.choice(ROLES) for name in made if GENERATORS[name] in modules}


def _draw_eye(
    rng: random.Random, vision: Mapping[str, Any], teacher: str, language: Sequence[int], world: int
) -> dict[str, Any]:
    """Draw where a teacher's encoder of pictures lies, of the kind of the student's, whose rows it must make."""
    keys = {key: value for key, value in vision.items() if key in {"plugin", "config"}}
    drawn = {key: value for key, value in _draw_encoder(rng, "vision", language, world).items() if key not in keys}
    drawn = {key: value for key, value in drawn.items() if key not in {"plugin", "config"}}
    return {**drawn, **keys, "feeds": teacher, "modality": "image", "prefetch": rng.random() < 0.5}


def _draw_lens(rng: random.Random, generator: str, language: Sequence[int], world: int) -> dict[str, Any]:
    """Draw where a generator's own encoder lies, of a kind of its own."""
    drawn = _draw_encoder(rng, GENERATORS[generator], language, world)
    return {**drawn, "feeds": generator, "modality": NOUNS[generator]}


def _draw_encoder(rng: random.Random, name: str, language: Sequence[int], world: int) -> dict[str, Any]:
    """Draw a kind, and a grid: on any ranks, on some of the language model's, or on others."""
    others = [rank for rank in range(world) if rank not in language]
    ranks = rng.choice((range(world), range(world), language, others or language))
    keys = {**_draw_grid(rng, ranks, lanes=range(1, 9)), **rng.choice(ENCODERS[name])}
    drops = {"dropout": 0.1, "activation_dropout": 0.2} if name == "audio" else {"drop_path": 0.2}
    if "config" in keys and rng.random() < 0.5:
        keys["config"] = {**keys["config"], **drops}
    return {**keys, "batch_factor": rng.choice((1, 1, 2, 3))}


def _draw_grid(rng: random.Random, ranks: Sequence[int], *, lanes: Sequence[int]) -> dict[str, Any]:
    while True:
        pp, dp, cp, tp = (
            rng.choice((1, 1, 2, 3)),
            rng.choice(lanes),
            rng.choice((1, 1, 2, 3)),
            rng.choice((1, 1, 2, 3, 6)),
        )
        if pp * dp * cp * tp <= len(ranks):
            found = {"ranks": sorted(rng.sample(ranks, pp * dp * cp * tp)), "pp": pp, "dp": dp, "cp": cp, "tp": tp}
            return found | ({"sequence_parallel": rng.random() < 0.5} if tp > 1 else {})


def _draw_language(rng: random.Random, keys: dict[str, Any]) -> Table:
    """Draw a decoder or a hybrid, with experts or without; return its config and complete its keys."""
    config: Table = {"tied": rng.random() < 0.3, "kv_heads": rng.choice((1, 2, 3, 6))}
    if rng.random() < 0.4:
        config |= {"next_tokens": rng.choice((1, 2)), "next_tokens_loss": 0.3}
    if rng.random() < 0.4:
        _place_experts(rng, keys)
        pattern = "".join(rng.sample("ME*-", 4)) + rng.choice(("", "M", "EM"))
        config = {**HYBRID, **config, "pattern": pattern, "z_loss": rng.choice((0.0, 0.01))}
        if config.get("next_tokens"):
            config["next_tokens_pattern"] = rng.choice(("", "".join(rng.choices("ME*-", k=rng.choice((1, 2))))))
        keys |= {"plugin": "hybrid", "config": config}
        return config
    if rng.random() < 0.3:
        config |= _draw_experts(rng, keys)
    elif rng.random() < 0.5:
        config |= rng.choice(list(DECODERS.values()))
    return config | {"hidden_dropout": rng.choice((0.0, 0.0, 0.1)), "embedding_dropout": rng.choice((0.0, 0.0, 0.1))}


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
    keys["etp"] = rng.choice([size for size in (1, 1, 2, 3) if stage % (keys["ep"] * size) == 0])


def _draw_schedule(rng: random.Random, settings: Table) -> Table:
    """Draw a schedule, and give encoders two chunks where it may be drawn."""
    language = settings["modules"]["language"]
    schedules = [name for name in SCHEDULES if name not in CHUNKED or language["pp"] > 1]
    for schedule in rng.sample(schedules, len(schedules)):
        with suppress(LookupError):
            found = _lengthened(scheduled(settings, schedule))
            for name, keys in found["modules"].items():
                if name != "language" and keys["pp"] > 1 and not schedule.startswith("zb-h") and rng.random() < 0.3:
                    layers = 2 * keys["pp"]
                    keys |= {"chunks": 2, "config": {**keys["config"], "layers": layers * -(-3 // layers)}}
            return found
    raise AssertionError(settings)


def _lengthened(settings: Table) -> Table:
    """Return settings in which a hybrid has layers for all stages, equally many where they are chunks."""
    language = settings["modules"]["language"]
    config = language["config"]
    if "pattern" in config:
        layers, pattern = config.pop("layers"), config["pattern"]
        count = layers * -(-len(pattern) // layers) if "chunks" in language else max(layers, len(pattern))
        config["pattern"] = (pattern * count)[:count]
    return settings


def _draw_training(rng: random.Random, settings: Table) -> None:
    """Draw what of each module is trained, and what of it is computed again or a step ahead."""
    job = make_job({**settings, "schedule": SCHEDULES["gpipe"]})  # which takes what others refuse
    for module in job.modules:
        keys = settings["modules"][module.name]
        if module.is_of_teacher:
            continue
        frozen = _draw_frozen(rng, module)
        if rng.random() < 0.35:
            keys["lora"] = _draw_lora(rng, module)
            if module.spec.name == "sketch":  # which says of no row what it is
                keys["lora"]["dropout"] = 0.0
            frozen = rng.choice(({}, {}, {"frozen": False}, frozen))
        elif rng.random() < 0.6:
            frozen = {}
        keys |= frozen
        encodes_frozen = module.name != "language" and frozen.get("frozen") is True and "lora" not in keys
        if module.is_generator:
            keys["recompute"] = rng.choice(("none", *module.spec.recompute))
        elif encodes_frozen:
            keys["prefetch"] = rng.random() < 0.5
        else:
            keys["recompute"] = rng.choice(("none", "none", "selective", "full"))
    if job.generators and rng.random() < 0.2:
        _freeze_language(job, settings)


def _freeze_language(job: Job, settings: Table) -> None:
    """Have the language model work a step ahead, with all that feeds it, so that generators alone are trained."""
    for module in (one for one in job.modules if one.feeds_language or one.is_of_teacher):
        keys = settings["modules"][module.name]
        for key in ("frozen", "lora", "recompute"):
            keys.pop(key, None)
        keys |= {"prefetch": True} if module.is_of_teacher else {"prefetch": True, "frozen": True}


def _draw_frozen(rng: random.Random, module: JobModule) -> dict[str, Any]:
    """Draw all, parts, or patterns of the names of parameters."""
    if rng.random() < 0.2:
        return {"frozen": True}
    whole = stage_without_storage(module.spec, module.config, Stage(), _HIDDEN)
    paths = [path for path, _ in whole.named_parameters()]
    heads = {path.partition(".")[0] for path in paths}
    parts = [part for part, prefixes in module.spec.parts.items() if heads.intersection(prefixes)]
    entries = [*parts, *(_draw_pattern(rng, path) for path in rng.sample(paths, 4))]
    return {"frozen": rng.sample(entries, rng.choice((1, 2, 3)))}


_HIDDEN = 24
"""Width of the rows of all language models here, see `tables.table`."""


def _draw_lora(rng: random.Random, module: JobModule) -> dict[str, Any]:
    """Draw its size, and a few linears or all."""
    whole = stage_without_storage(module.spec, module.config, Stage(), _HIDDEN)
    paths = [path for path, linear in linears(whole) if linear.get_parameter("weight").requires_grad]
    some = [_draw_pattern(rng, path) for path in rng.sample(paths, min(len(paths), rng.choice((1, 2, 4))))]
    return {
        "rank": rng.choice((1, 2, 3, 5)),
        "alpha": rng.choice((0.0, 1.0, 3.0)),
        "targets": rng.choice((["*"], some, some)),
        "dropout": rng.choice((0.0, 0.0, 0.1)),
    }


def _draw_pattern(rng: random.Random, path: str) -> str:
    """Draw which words of a path are left open: numbers, what it begins with, or what it ends with."""
    words = ["*" if word.isdigit() and rng.random() < 0.5 else word for word in path.split(".")]
    at = rng.randint(0, len(words) - 1)
    return rng.choice((".".join(words), ".".join([*words[: at + 1], "*"][: len(words)]), "*" + ".".join(words[at:])))


def _draw_optimizer(rng: random.Random, settings: Table) -> Table:
    """Draw by what norms gradients are clipped, who steps, and what is spread over how many data lanes."""
    optimizer = {**settings["optimizer"], **rng.choice(CLIPS)}
    shard = rng.choice(("", "", "", "optimizer", "gradients", "full"))
    plugin: Mapping[str, Any] = rng.choice(({"plugin": "distributed"} if shard else {}, HYBRID_STEPS))
    if not shard:
        return {**settings, "optimizer": {**optimizer, **plugin}}
    for keys in settings["modules"].values():
        lanes = lanes_of(keys) * keys["cp"]
        among = rng.choice([0, 0, *(count for count in range(1, lanes) if lanes % count == 0)])
        keys["optimizer"] = {"shard_lanes": among} | ({"shard": "optimizer"} if among == 1 else {})
    return {**settings, "optimizer": {**optimizer, **plugin, "shard": shard}}

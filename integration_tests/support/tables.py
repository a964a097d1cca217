"""The settings of small models: what they compute, and how they are split."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import synthetic

STEPS = 3
SAMPLES = 24
RATE = 1e-3
CLIP = 1.0
EPS = 1e-4
"""AdamW divides each gradient by its own size. An element whose true gradient is near zero, as a key bias's is, would
step by nothing but its rounding noise; this keeps such steps small, so that weights can be compared."""
EVEN_EPS = 1e-2
"""About the size of the gradients' elements, for models whose gradients are less sure, as with Mamba layers. By the
first law a gradient may be off by d = 1e-5 of its length, which moves AdamW's step by up to lr d / eps, and a weight
by 1e-5 of 3 lr for each element: far below these elements, weights may differ though all gradients are right."""
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
    "loss_rows",
    "round_rows",
    "prefetch",
)
"""Keys of a module that say how it is split and passed through, and nothing of what it computes."""
SHARD_KEYS = ("shard", "shard_lanes", "overlap_grad_reduce", "overlap_param_gather")
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
TEACHER: Mapping[str, Any] = {"hidden": 36, "layers": 2, "heads": 6, "kv_heads": 2, "intermediate": 41}
"""Config of modules with a table ``distil``."""
Table = dict[str, Any]


def table(
    modules: Mapping[str, Mapping[str, Any]],
    *,
    microbatches: int = 1,
    pictures: str = "mixed",
    weights: str = "none",
    language: Mapping[str, Any] | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
    seed: int = 5,
    eps: float = EPS,
) -> Table:
    """Return the settings of a small model: 24 samples a step, uneven vocabulary and widths.

    Args:
        modules: keys of ``[modules.<name>]`` by name, beside plugin and config; those with ``distil`` are teachers, and
            those with ``fed_by`` generators.
        microbatches: of a step.
        pictures: see `synthetic.SyntheticConfig`.
        weights: likewise.
        language: keys of the decoder's config that differ.
        roles: see `synthetic.SyntheticConfig`.
        seed: of the run.
        eps: of AdamW.
    """
    given = [name for name, keys in modules.items() if name != "language" and "distil" not in keys]
    encoders = [name for name in given if "fed_by" not in modules[name]]
    read = [name for name in encoders if "language" in modules[name].get("feeds", ["language"])]
    lanes = lanes_of(modules["language"])
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
        "data": {
            "plugin": "synthetic",
            "pictures": pictures,
            "weights": weights,
            "modalities": list(dict.fromkeys(map(_modality, (*read, *(n for n in given if n not in encoders))))),
            **({"roles": roles} if roles else {}),
        },
        "tokenizer": {"plugin": "word", "words": list(synthetic.WORDS)},
        "modules": {
            name: {
                "plugin": "vit" if name in encoders else "sketch",
                "modality": _modality(name),
                "config": vit if name in encoders else {},
                **keys,
            }
            if name in given
            else {"plugin": "decoder", "config": decoder if name == "language" else TEACHER, **keys}
            for name, keys in modules.items()
        },
        "optimizer": {"lr": RATE, "weight_decay": 0.1, "clip": CLIP, "eps": eps},
    }


def by_tokens(settings: Table, *, batch_tokens: int, micro_tokens: int, longer: str = "cut") -> Table:
    """Return settings whose steps and microbatches have so many tokens at most, and what becomes of longer samples."""
    found = copy.deepcopy(settings)
    del found["run"]["global_batch"], found["run"]["micro_batch"]
    found["run"] |= {"batch_tokens": batch_tokens, "micro_tokens": micro_tokens}
    longest = min(found["data"].get("max_tokens", 1024), micro_tokens)
    found["data"] |= {"max_tokens": longest, "longer": longer}
    return found


def scheduled(settings: Table, schedule: str) -> Table:
    """Return settings with one of `SCHEDULES`, and what it needs: chunks, layers for them, microbatches enough.

    Where nothing is pipelined, a schedule that needs chunks is not for these settings.

    Raises:
        LookupError: the samples of a step don't make as many microbatches as it needs.
    """
    found = copy.deepcopy(settings)
    found["schedule"] = dict(SCHEDULES[schedule])
    language = found["modules"]["language"]
    stages, lanes = language.get("pp", 1), lanes_of(language)
    if schedule in CHUNKED:
        assert stages > 1, "needs a pipeline"
        language["chunks"] = 2
    layers = stages * language.get("chunks", 1)
    found["modules"]["language"]["config"] = {**language["config"], "layers": layers * -(-3 // layers)}
    count = enough_microbatches(found["modules"], schedule, SAMPLES // (lanes * settings["run"]["micro_batch"]))
    found["run"]["micro_batch"] = SAMPLES // (lanes * count)
    return found


def enough_microbatches(modules: Mapping[str, Mapping[str, Any]], schedule: str, wanted: int) -> int:
    """Return how many microbatches a step is cut into: as many as are wanted, or as a schedule needs beyond that.

    Raises:
        LookupError: the samples of a step don't make as many.
    """
    stages, lanes = modules["language"].get("pp", 1), lanes_of(modules["language"])
    least = max(map(_least_of_h2, modules.values())) if schedule == "zb-h2" else stages
    multiple = stages if schedule == "interleaved" else 1
    for count in (1, 2, 3, 4, 6, 8, 12, 24):
        if SAMPLES % (lanes * count) == 0 and count >= max(wanted, least) and count % multiple == 0:
            return count
    raise LookupError(schedule)


def _least_of_h2(keys: Mapping[str, Any]) -> int:
    """Return the fewest microbatches that make 2 x pp - 1 passes."""
    return int((2 * keys.get("pp", 1) - 2) * keys.get("batch_factor", 1) + 1)


def _modality(module: str) -> str:
    return {"vision": "image", "lens": "image", "drawer": "image", "scribe": "glyph"}.get(module, module)


def lanes_of(keys: Mapping[str, Any]) -> int:
    """Return a module's data lanes, context ranks not counted."""
    ranks = len(keys["ranks"]) if isinstance(keys["ranks"], list) else 0
    return int(keys.get("dp", 0)) or ranks // (keys.get("pp", 1) * keys.get("cp", 1) * keys.get("tp", 1))


def alone(settings: Table) -> Table:
    """Return the same model and data on one rank, in one microbatch."""
    found = copy.deepcopy(settings)
    if "batch_tokens" in found["run"]:
        found["run"]["micro_tokens"] = found["run"]["batch_tokens"]
    else:
        found["run"]["micro_batch"] = SAMPLES
    found.pop("schedule", None)
    for key in ("compile", "compile_backend"):
        found["run"].pop(key, None)
    for keys in found["modules"].values():
        for axis in AXES_KEYS:
            keys.pop(axis, None)
        keys["ranks"] = [0]
    for keys in (found, *found["modules"].values()):
        if "optimizer" in keys:
            keys["optimizer"] = _replicated(keys["optimizer"])
    if found["optimizer"].get("plugin") == "adamw":
        del found["optimizer"]["plugin"]  # the default: where only this differs, the truth is the same one
    for keys in found["modules"].values():
        if not keys.get("optimizer", True):
            del keys["optimizer"]
    return found


def _replicated(optimizer: Mapping[str, Any]) -> Table:
    """Return an optimizer's keys with nothing spread over lanes, and moments in fp32."""
    kept = {key: value for key, value in optimizer.items() if key not in (*SHARD_KEYS, "moments")}
    if kept.get("plugin") == "distributed":
        kept["plugin"] = "adamw"
    return kept


def world_of(settings: Table) -> int:
    """Return the processes that settings need."""
    return 1 + max(int(rank) for keys in settings["modules"].values() for rank in keys["ranks"])

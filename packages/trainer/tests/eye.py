"""Jobs of a small model with an encoder, of nothing but what the trainer's own environment has."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from mimo.hooks import Kind, Registry, discover
from mimo.model import ENCODERS, EncoderSeam, EncoderSpec, EncoderStages, Stage
from mimo.optimizer import OPTIMIZERS
from mimo.trainer.config.toml import make_settings
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve

Table = dict[str, Any]
SAMPLES = 96
GLOBAL_BATCH = 24


@attrs.frozen(kw_only=True)
class EyeConfig:
    """Settings of the encoder ``eye``."""

    width: int = 8


class Eye(nn.Module):
    """An encoder that makes one row of each image; stages and seam are declared and never cut."""

    def __init__(self, config: EyeConfig, hidden: int) -> None:
        super().__init__()
        self.tower = nn.Linear(1, config.width)
        self.projector = nn.Linear(config.width, hidden)

    def forward(self, items: list[Mapping[str, Tensor]]) -> Tensor:
        """No test of these jobs computes."""
        raise AssertionError(items)


def _cut(module: nn.Module, stage: object) -> nn.Module:
    raise AssertionError((module, stage))


def _held(_config: EyeConfig, stage: Stage) -> frozenset[str]:
    first, last = stage.index == 0, stage.index == stage.count - 1
    return frozenset({*(["encoder"] if first else []), *(["projector"] if last else [])})


EYE = EncoderSpec(
    name="eye",
    config=EyeConfig,
    measure=lambda _raw: (1, 1),
    rows=lambda _config, _size: 1,
    prepare=lambda _config, _raw: {},
    build=Eye,
    parts={"encoder": ("tower",), "projector": ("projector",)},
    stages=EncoderStages(
        layers=lambda _config: 2,
        message_rows=lambda _config, _size: 1,
        width=lambda config: config.width,
        cut=_cut,
        parts=_held,
    ),
    seam=EncoderSeam(rows=lambda _config, _size: 1, width=lambda config: config.width, cut=_cut),
)


@functools.cache
def _installed(kind: Kind[Any]) -> Registry[Any]:
    """Discover the plugins of a kind once: it takes a fifth of a second."""
    return discover(kind)


def find(kind: Kind[Any], name: str, where: str) -> Any:
    """Find ``eye``; ``spread``, AdamW with a key that says how parameters lie; and otherwise what is installed."""
    if kind is ENCODERS and name == "eye":
        return EYE
    if kind is OPTIMIZERS and name == "spread":
        adamw = _installed(kind).find("adamw", where)
        keys = {"shard": attrs.field(type=str, default="optimizer")}
        config = attrs.make_class("SpreadConfig", keys, bases=(adamw.config,), frozen=True, kw_only=True)
        every = frozenset({"fp32", "bf16", "fp16"})
        return attrs.evolve(adamw, name=name, config=config, lays=frozenset({"shard"}), precisions=every)
    return _installed(kind).find(name, where)


def on(first: int, last: int, **sizes: Any) -> dict[str, Any]:
    """Return a grid on ranks ``first`` to ``last``; dp follows from the other sizes."""
    return {"ranks": list(range(first, last + 1)), **sizes}


def table(modules: Mapping[str, Mapping[str, Any]], **sections: Mapping[str, Any]) -> Table:
    """Return the settings of a run of ten steps of 24 samples, each with an image where there is an encoder.

    Args:
        modules: keys of ``[modules.<name>]`` by name, beside plugin and config.
        sections: keys of other sections, which replace those here.
    """
    decoder = {"hidden": 24, "layers": 3, "heads": 6, "kv_heads": 2, "intermediate": 37, "vocabulary": 300}
    images = {"height": 8, "width": 8} if modules.keys() - {"language"} else {"images": 0}
    found: Table = {
        "run": {"name": "r", "steps": 10, "seed": 5, "global_batch": GLOBAL_BATCH, "micro_batch": 4},
        "data": {"plugin": "mock", "samples": SAMPLES, "text": 8, **images},
        "tokenizer": {"plugin": "byte"},
        "modules": {
            name: {"plugin": "decoder", "config": decoder, **keys}
            if name == "language"
            else {"plugin": "eye", "config": {}, **keys}
            for name, keys in modules.items()
        },
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip": 1.0},
    }
    return {**found, **{section: {**found.get(section, {}), **keys} for section, keys in sections.items()}}


def make_job(settings: Mapping[str, Any]) -> Job:
    """Resolve settings."""
    return resolve(make_settings(settings), find=find)

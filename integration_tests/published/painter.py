"""The generator ``painter``, as others may bring one: the network of ``flow``, and a table of folders that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo.hooks import ConfigError, hookimpl
from mimo.model import GeneratorSpec, HfFamily, HfTensor, hf_number, hf_only
from mimo_generator_flow import FLOW, FlowConfig

KEYS = {
    "height": "sample_height",
    "width": "sample_width",
    "channels": "in_channels",
    "patch": "patch_size",
    "hidden": "hidden_size",
    "layers": "num_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
}
ENDS = {
    "connector.norm": "caption_norm",
    "connector.project": "caption_projection",
    "patch": "x_embedder",
    "time.up": "t_embedder.linear_1",
    "time.down": "t_embedder.linear_2",
    "modulation": "norm_out",
    "output": "proj_out",
}
LAYER = {"modulation": "ada_norm", "attention.output": "attn.proj", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}


def settings(published: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a ``config.json``."""
    hf_only(published, "hidden_act", ["gelu_pytorch_tanh"])
    return {ours: hf_number(published, theirs) for ours, theirs in KEYS.items()}


def describe(config: FlowConfig) -> Mapping[str, Any]:
    """Return the ``config.json`` of settings."""
    if config.activation != "gelu_tanh":
        raise ConfigError("config.activation", expected="'gelu_tanh', as painters have", got=repr(config.activation))
    return {theirs: getattr(config, ours) for ours, theirs in KEYS.items()} | {"hidden_act": "gelu_pytorch_tanh"}


def tensors(config: FlowConfig) -> list[HfTensor]:
    """Return the table: projections of attention lie in one tensor, modulations the other way round."""
    pairs, width = dict(ENDS), config.hidden
    table = [HfTensor(ours="connector.null.weight", theirs="null_caption", shape=(width,))]
    for index in range(config.layers):
        ours, theirs = f"layers.{index}", f"blocks.{index}"
        pairs |= {f"{ours}.{one}": f"{theirs}.{other}" for one, other in LAYER.items()}
        for leaf, names in {"weight": ("query", "key", "value"), "bias": ("query", "value")}.items():
            table += [
                HfTensor(
                    ours=f"{ours}.attention.{name}.{leaf}",
                    theirs=f"{theirs}.attn.{'qkv' if leaf == 'weight' else 'qv'}.{leaf}",
                    rows=(place * width, (place + 1) * width),
                )
                for place, name in enumerate(names)
            ]
    for ours, theirs in pairs.items():
        dims = (1, 0) if ours.endswith("modulation") else None
        table.append(HfTensor(ours=f"{ours}.weight", theirs=f"{theirs}.weight", dims=dims))
        table.append(HfTensor(ours=f"{ours}.bias", theirs=f"{theirs}.bias"))
    return table


FAMILY = HfFamily(
    model_type="painter_dit",
    architecture="PainterTransformer",
    settings=settings,
    describe=describe,
    tensors=tensors,
    renamed=({}, {"": "generator."}),
)
PAINTER = attrs.evolve(FLOW, name="painter", hf=[FAMILY])


@hookimpl
def mimo_register_generators() -> list[GeneratorSpec]:
    """Register ``painter``."""
    return [PAINTER]

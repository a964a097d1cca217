"""Where published C-RADIO folders hold what ours has: those of `transformers`' ``RadioModel``. Free of torch.

In a composed model (Nemotron 3 Nano Omni) the tower's names begin with ``vision_model.``. Its patches of video are left
out: this encoder reads images. So are class tokens' places in a summary, which a language model never sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mimo.model import (
    Activation,
    HfFamily,
    HfTensor,
    hf_known,
    hf_no_dropout,
    hf_number,
    hf_only,
    hf_rate,
    hf_real,
    hf_refused,
    hf_small,
)
from mimo_encoder_radio._config import CLIP_MEAN, CLIP_STD, RadioConfig

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "relu": "relu",
    "relu2": "squared_relu",
}
_MUST_BE: Mapping[str, Any] = {
    "use_swiglu_ffn": False,
    "qkv_bias": True,
    "layerscale_value": 1.0,
}
"""Keys of ``config.json`` with the one value that ours can do, which is also what is meant where they are missing."""
_REFUSED = ("attention_probs_dropout_prob",)
"""Keys that drop weights of attention. ``hidden_dropout_prob`` says nothing of the model: ``RadioConfig`` has it, and
nothing in `transformers`' ``modeling_radio.py`` (5.23.0) reads it."""
_DROPOUT = (*_REFUSED, "hidden_dropout_prob", "drop_path_rate")

_LEFT_OUT: Mapping[str, Any] = {
    "hidden_size": 1280,
    "patch_size": 16,
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 32,
    "mlp_ratio": 4.0,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "max_img_size": 2048,
    "num_cls_tokens": 3,
    "num_registers": 7,
    "norm_mean": CLIP_MEAN,
    "norm_std": CLIP_STD,
}
"""What keys mean where they are missing."""
_LARGEST_RATIO = 1e3
_LARGEST_COLOUR = 1e3


def radio_settings(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of ours that a ``config.json`` decides.

    Raises:
        ConfigError: it asks for what ours can't do.
    """
    for key, value in _MUST_BE.items():
        hf_only(found, key, [value])
    hf_no_dropout(found, _REFUSED)
    given = {**_LEFT_OUT, **found}
    width, patch, heads = (hf_number(given, key) for key in ("hidden_size", "patch_size", "num_attention_heads"))
    hf_only(found, "head_dim", [width // heads])
    if hf_number(given, "max_img_size") < patch:
        raise hf_refused("max_img_size", f"at least patch_size = {patch}", given["max_img_size"])
    return {
        "patch": patch,
        "channels": hf_number(given, "num_channels"),
        "width": width,
        "layers": hf_number(given, "num_hidden_layers"),
        "heads": heads,
        "intermediate": int(width * hf_real(given, "mlp_ratio", low=0, most=_LARGEST_RATIO, above=True)),
        "activation": hf_known(given, "hidden_act", _ACTIVATIONS),
        "eps": hf_small(given, "layer_norm_eps"),
        "drop_path": hf_rate(given, "drop_path_rate"),
        "positions": given["max_img_size"] // patch,
        "class_tokens": hf_number(given, "num_cls_tokens"),
        "registers": hf_number(given, "num_registers", low=0),
        "mean": _each_channel(given, "norm_mean", low=-_LARGEST_COLOUR),
        "std": _each_channel(given, "norm_std", low=0, above=True),
    }


def _each_channel(given: Mapping[str, Any], key: str, *, low: float, above: bool = False) -> tuple[float, ...]:
    """Return a number for each channel, by which pixels of 0 .. 1 are moved or divided."""
    values = given[key] if isinstance(given[key], list | tuple) else [given[key]]
    return tuple(hf_real({key: value}, key, low=low, most=_LARGEST_COLOUR, above=above) for value in values)


def describe_radio(config: RadioConfig) -> Mapping[str, Any]:
    """Return the ``config.json`` of these settings."""
    ratio = config.intermediate / config.width
    if int(config.width * ratio) != config.intermediate:  # rounded down when it is read
        ratio = (config.intermediate + 0.5) / config.width
    return {
        **_MUST_BE,
        **dict.fromkeys(_DROPOUT, 0.0),
        "drop_path_rate": config.drop_path,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "mlp_ratio": ratio,
        "hidden_act": next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation),
        "layer_norm_eps": config.eps,
        "num_channels": config.channels,
        "patch_size": config.patch,
        "max_img_size": config.positions * config.patch,
        "num_cls_tokens": config.class_tokens,
        "num_registers": config.registers,
        "summary_idxs": list(range(config.class_tokens)),
        "norm_mean": list(config.mean),
        "norm_std": list(config.std),
    }


def radio_tensors(config: RadioConfig) -> Sequence[HfTensor]:
    """Return the table."""
    return list(_tensors(config))


def _tensors(config: RadioConfig) -> Iterator[HfTensor]:
    root, width = "radio_model.model", config.width
    yield HfTensor(ours="patch.weight", theirs=f"{root}.patch_generator.embedder.weight")
    yield HfTensor(
        ours="positions.weight",
        theirs=f"{root}.patch_generator.pos_embed",
        shape=(1, config.positions**2, width),
    )
    yield HfTensor(ours="prefix.weight", theirs=f"{root}.patch_generator.cls_token.token")
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}", f"{root}.blocks.{layer}"
        for leaf in ("weight", "bias"):
            for number, name in enumerate(("query", "key", "value")):
                yield HfTensor(
                    ours=f"{ours}.attention.{name}.{leaf}",
                    theirs=f"{theirs}.attn.qkv.{leaf}",
                    rows=(number * width, (number + 1) * width),
                )
            for mine, name in _SAME.items():
                yield HfTensor(ours=f"{ours}.{mine}.{leaf}", theirs=f"{theirs}.{name}.{leaf}")


_SAME: Mapping[str, str] = {
    "attention_norm": "norm1",
    "attention.output": "attn.proj",
    "mlp_norm": "norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
"""What a layer has under another name only."""


def _linears(config: RadioConfig) -> list[HfTensor]:
    """Return the linears by the names of modules, of which no two of ours are one."""
    pairs = {"patch": "embeddings.patch_projection"}
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}", f"encoder.layer.{layer}"
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        pairs |= {f"{ours}.attention.{mine}": f"{theirs}.attention.{name}" for mine, name in names.items()}
        pairs |= {f"{ours}.mlp.{mine}": f"{theirs}.mlp.{name}" for mine, name in {"up": "fc1", "down": "fc2"}.items()}
    return [HfTensor(ours=f"{mine}.weight", theirs=f"{name}.weight") for mine, name in pairs.items()]


def _fixed(config: RadioConfig) -> Mapping[str, Sequence[float]]:
    return {
        "*input_conditioner.norm_mean": config.mean,
        "*input_conditioner.norm_std": config.std,
        "*.layer_scale[12].lambda1": (1.0,),
    }


RADIO_HF = HfFamily(
    model_type="radio",
    architecture="RadioModel",
    settings=radio_settings,
    describe=describe_radio,
    tensors=radio_tensors,
    adaptable=_linears,
    renamed=({}, {"": "vision_model."}),
    fixed=_fixed,
    dropout=_DROPOUT,
    ignored=("*summary_idxs", "*patch_generator.video_embedder.*"),
)

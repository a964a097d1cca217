"""Where published C-RADIO folders hold what ours has: those of `transformers`' ``RadioModel``. Free of torch.

In a composed model (Nemotron 3 Nano Omni) the tower's names begin with ``vision_model.``. Its patches of video are left
out: this encoder reads images. So are class tokens' places in a summary, which a language model never sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mimo.model import Activation, HfFamily, HfTensor, hf_known, hf_only
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
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
}
"""Keys of ``config.json`` with the one value that ours can do, which is also what is meant where they are missing."""


_SIZES = {"hidden_size": 1280, "patch_size": 16, "num_attention_heads": 16}
"""What keys mean where they are missing."""


def radio_settings(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of ours that a ``config.json`` decides.

    Raises:
        ConfigError: it asks for what ours can't do.
    """
    for key, value in _MUST_BE.items():
        hf_only(found, key, [value])
    width, patch, heads = (found.get(key, value) for key, value in _SIZES.items())
    hf_only(found, "head_dim", [width // heads])
    return {
        "patch": patch,
        "channels": found.get("num_channels", 3),
        "width": width,
        "layers": found.get("num_hidden_layers", 32),
        "heads": heads,
        "intermediate": int(width * found.get("mlp_ratio", 4.0)),
        "activation": hf_known({"hidden_act": "gelu", **found}, "hidden_act", _ACTIVATIONS),
        "eps": found.get("layer_norm_eps", 1e-6),
        "positions": found.get("max_img_size", 2048) // patch,
        "class_tokens": found.get("num_cls_tokens", 3),
        "registers": found.get("num_registers", 7),
        "mean": tuple(found.get("norm_mean", CLIP_MEAN)),
        "std": tuple(found.get("norm_std", CLIP_STD)),
    }


def describe_radio(config: RadioConfig) -> Mapping[str, Any]:
    """Return the ``config.json`` of these settings."""
    ratio = config.intermediate / config.width
    if int(config.width * ratio) != config.intermediate:  # rounded down when it is read
        ratio = (config.intermediate + 0.5) / config.width
    return {
        **_MUST_BE,
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
    ignored=("*radio_model.summary_idxs", "*patch_generator.video_embedder.*"),
)

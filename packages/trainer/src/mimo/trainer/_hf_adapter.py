"""What LoRA has learned, as a folder that the library PEFT loads beside the published model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mimo.checkpoint import Stream, write_safetensors
from mimo.hooks import ConfigError
from mimo.model import HfTensor, lora_names
from mimo.trainer._merge import Merged

ADAPTER_NAME = "adapter_model.safetensors"
_BEFORE = "base_model.model."  # as PEFT begins all names


def write_adapter(
    merged: Merged, out: Path, *, module: str, table: Sequence[HfTensor], base: str, causal: bool, dtype: torch.dtype
) -> int:
    """Write the folder, and return how many linears it adapts.

    Args:
        merged: the checkpoint.
        out: the new folder.
        module: whose linears they are.
        table: where the published model has what the module has.
        base: folder or name of the published model; empty if it isn't known.
        causal: whether that is a language model.
        dtype: of the tensors.

    Raises:
        ConfigError: nothing is adapted, or a linear that is none of the published model.
        CheckpointError: the checkpoint is damaged, or ``out`` exists.
    """
    paths = [one.removeprefix(f"{module}.") for one in sorted(merged.linears) if one.startswith(f"{module}.")]
    if not paths:
        raise ConfigError("--adapter", expected=f"a module with LoRA in it, as {module}", got="one without")
    theirs, lora = dict(_linears(table)), merged.loras[module]
    foreign = [path for path in paths if path not in theirs]
    if foreign:
        raise ConfigError(
            "--adapter",
            expected="linears that are linears of the published model too",
            got=f"{', '.join(foreign[:8])}, which are none there",
            fix="Export without --adapter: then LoRA is added to the weights.",
        )
    about: Mapping[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [theirs[path] for path in paths],
    }
    streams = {
        f"{_BEFORE}{theirs[path]}.lora_{letter}.weight": _stream(merged, name, dtype)
        for path in paths
        for letter, name in zip("AB", lora_names(f"{module}.{path}"), strict=True)
    }
    texts = {"adapter_config.json": json.dumps(about, indent=2, sort_keys=True) + "\n"}
    write_safetensors(out, streams, texts=texts, file=ADAPTER_NAME)
    return len(paths)


def _linears(table: Sequence[HfTensor]) -> Iterator[tuple[str, str]]:
    """Yield our paths of linears with theirs, of those that are the same matrix there."""
    for entry in table:
        alike = entry.rows is entry.shape is entry.dims is None
        if alike and isinstance(entry.theirs, str) and entry.ours.endswith(".weight"):
            yield entry.ours.removesuffix(".weight"), entry.theirs.removesuffix(".weight")


def _stream(merged: Merged, name: str, dtype: torch.dtype) -> Stream:
    whole = merged.whole(name).to(dtype)
    return Stream(dtype=dtype, shape=tuple(whole.shape), chunks=partial(iter, [whole.view(-1)]))

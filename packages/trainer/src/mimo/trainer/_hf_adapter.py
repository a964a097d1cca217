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
from mimo.model import Frozen, HfTensor, LanguageModelSpec, is_frozen, lora_names
from mimo.trainer._hf_parts import Spec
from mimo.trainer._merge import Merged

ADAPTER_NAME = "adapter_model.safetensors"
_BEFORE = "base_model.model."  # as PEFT begins all names


def write_adapter(
    merged: Merged, out: Path, *, module: str, spec: Spec, table: Sequence[HfTensor], dtype: torch.dtype
) -> int:
    """Write the folder, and return how many linears it adapts.

    Args:
        merged: the checkpoint.
        out: the new folder.
        module: whose linears they are.
        spec: its plugin.
        table: where the published model has what the module has.
        dtype: of the tensors.

    Raises:
        ConfigError: nothing is adapted, or a linear that is none of the published model, or more of that was trained.
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
    beside = {f"{path}.{leaf}" for path in paths for leaf in ("weight", "bias")}
    frozen = _frozen(merged.manifest.config["modules"][module])
    names = dict.fromkeys(entry.ours for entry in table if entry.ours not in beside)
    others = [name for name in names if not is_frozen(spec, name, frozen)]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ConfigError(
            "--adapter",
            expected="a module of which LoRA alone was trained of all that the published model has",
            got=f"one of which {others[0]}{more} was trained too",
            fix="Export without --adapter: then all of it is in the folder.",
        )
    about: Mapping[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(spec, LanguageModelSpec) else None,
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


def _frozen(table: Mapping[str, Any]) -> Frozen:
    """Return what an adapted module's settings freeze: all, where they say nothing."""
    frozen = table["frozen"]
    return frozen if isinstance(frozen, bool) else frozenset(frozen) or True


def _linears(table: Sequence[HfTensor]) -> Iterator[tuple[str, str]]:
    """Yield our paths of linears with theirs, of those that are the same matrix there."""
    for entry in table:
        alike = entry.rows is entry.shape is entry.dims is None
        if alike and isinstance(entry.theirs, str) and entry.ours.endswith(".weight"):
            yield entry.ours.removesuffix(".weight"), entry.theirs.removesuffix(".weight")


def _stream(merged: Merged, name: str, dtype: torch.dtype) -> Stream:
    whole = merged.whole(name).to(dtype)
    return Stream(dtype=dtype, shape=tuple(whole.shape), chunks=partial(iter, [whole.view(-1)]))

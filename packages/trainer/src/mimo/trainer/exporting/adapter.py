"""Writes LoRA weights as a folder that the library PEFT loads with the published model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint import Stream, write_safetensors
from mimo.hooks import ConfigError
from mimo.model import Frozen, HfTensor, LanguageModelSpec, ModuleSpec, is_frozen, lora_names
from mimo.trainer.exporting.low_rank import beside_theirs
from mimo.trainer.exporting.merge import Merged

ADAPTER_NAME = "adapter_model.safetensors"
_BEFORE = "base_model.model."  # as PEFT begins all names


def write_adapter(
    merged: Merged,
    out: Path,
    *,
    module: str,
    spec: ModuleSpec,
    table: Sequence[HfTensor],
    linears: Sequence[HfTensor],
    dtype: torch.dtype,
) -> int:
    """Write the folder, and return how many linears and convolutions of the published model it adapts.

    Args:
        merged: the checkpoint.
        out: the new folder.
        module: whose linears they are.
        spec: its plugin.
        table: where the published model has what the module has.
        linears: beside which there LoRA can stand.
        dtype: of the tensors.

    Raises:
        ConfigError: nothing is adapted, or a linear that the published model has not so, or more was trained.
        CheckpointError: the checkpoint is damaged, or ``out`` exists.
    """
    paths = [one.removeprefix(f"{module}.") for one in sorted(merged.linears) if one.startswith(f"{module}.")]
    if not paths:
        raise ConfigError("--adapter", expected=f"a module with LoRA in it, as {module}", got="one without")
    lora = merged.loras[module]
    found = list(beside_theirs(linears, {path: _learned(merged, f"{module}.{path}", dtype) for path in paths}))
    foreign = sorted(set(paths).difference(*(one.paths for one in found)))
    if foreign:
        raise ConfigError(
            "--adapter",
            expected="linears that are linears of the published model, or rows of one, and that PEFT can adapt there",
            got=f"{', '.join(foreign[:8])}, which are none",
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
    ranks = {re.escape(one.name): len(one.down) for one in found if len(one.down) != lora.rank}
    about: Mapping[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(spec, LanguageModelSpec) else None,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "rank_pattern": ranks,
        "alpha_pattern": {name: lora.scale * rank for name, rank in ranks.items()},
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [one.name for one in found],
    }
    streams = {
        f"{_BEFORE}{one.name}.lora_{letter}.weight": _stream(learned)
        for one in found
        for letter, learned in (("A", one.down), ("B", one.up))
    }
    texts = {"adapter_config.json": json.dumps(about, indent=2, sort_keys=True) + "\n"}
    write_safetensors(out, streams, texts=texts, file=ADAPTER_NAME)
    return len(found)


def _frozen(table: Mapping[str, Any]) -> Frozen:
    """Return what an adapted module's settings freeze: all, where they say nothing."""
    frozen = table["frozen"]
    return frozen if isinstance(frozen, bool) else frozenset(frozen) or True


def _learned(merged: Merged, linear: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``down`` and ``up`` beside a linear."""
    down, up = (merged.whole(name).to(dtype) for name in lora_names(linear))
    return down, up


def _stream(whole: Tensor) -> Stream:
    return Stream(dtype=whole.dtype, shape=tuple(whole.shape), chunks=lambda: iter([whole.reshape(-1)]))

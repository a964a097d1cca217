"""What a stage of a stranger's module takes, guessed from the shapes of its parameters: nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mimo.model import OpCost, Stage
from mimo.trainer.cost.memory import build_stage
from mimo.trainer.job.job import JobModule


def guess_work(module: JobModule, stage: Stage, *, hidden: int, rows: int) -> Mapping[str, OpCost]:
    """Return by part what ``rows`` rows take, as if every matrix were a product with all of them.

    Tables that are looked up take nothing. What attention and the like take is not known, and every module counts as
    if nothing were recomputed.
    """
    with torch.device("meta"):
        built = build_stage(module, stage, hidden)
    tables = {f"{path}.weight" for path, part in built.named_modules() if _is_table(part)}
    found: dict[str, OpCost] = dict.fromkeys(_in_order(module, built), OpCost())
    for name, parameter in built.named_parameters():
        numbers = parameter.numel()
        ends = rows * sum(parameter.shape[-2:]) if parameter.dim() > 1 and name not in tables else 0
        found[part_of(module, name)] += OpCost(
            weighted=2.0 * rows * numbers if ends else 0.0, copied=ends, operands=ends, weights=numbers
        )
    return found


def _is_table(part: nn.Module) -> bool:
    return isinstance(part, nn.Embedding) or "embedding" in type(part).__name__.lower()


def _in_order(module: JobModule, built: nn.Module) -> list[str]:
    """Return the parts of a stage, as their parameters come."""
    return list(dict.fromkeys(part_of(module, name) for name, _ in built.named_parameters()))


def part_of(module: JobModule, name: str) -> str:
    """Return the part that a parameter belongs to; the whole module's name stands for none."""
    for part, prefixes in module.spec.parts.items():
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes):
            return part
    return module.name

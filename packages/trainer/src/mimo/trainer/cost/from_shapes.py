"""What follows from the shapes of a module's parameters: operations of its parts, and what of each part is trained.

Modules are built without storage, so nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mimo.model import OpCost, Stage, lora_linear
from mimo.model.runtime import build_stage, create_on, stage_without_storage, trainable_paths
from mimo.trainer.job.job import JobModule, PartShare


def op_costs_from_shapes(module: JobModule, stage: Stage, *, hidden: int, rows: int) -> Mapping[str, OpCost]:
    """Return what each part of a stage costs for ``rows`` rows, as if every matrix were multiplied with all of them.

    It stands in where a third-party plugin has no formula. Embedding tables cost nothing. Attention and whatever else
    multiplies no weights is left out, and recomputation is not counted.
    """
    with create_on("meta"):
        built = build_stage(module.spec, module.config, stage, hidden)
    tables = {f"{path}.weight" for path, part in built.named_modules() if _is_table(part)}
    parameters = list(built.named_parameters())
    costs: dict[str, OpCost] = dict.fromkeys((part_of(module, name) for name, _ in parameters), OpCost())
    for name, parameter in parameters:
        elements = parameter.numel()
        ends = rows * sum(parameter.shape[-2:]) if parameter.dim() > 1 and name not in tables else 0
        costs[part_of(module, name)] += OpCost(
            weighted=2.0 * rows * elements if ends else 0.0, copied=ends, operands=ends, weights=elements
        )
    return costs


def part_shares(module: JobModule, stage: Stage, *, hidden: int) -> dict[str, PartShare]:
    """Return for each part of a stage how much of it is trained, and what LoRA adds to it.

    Args:
        module: its settings name parameters that are frozen, or linears that LoRA adapts.
        stage: of it.
        hidden: width of the language model's rows.
    """
    built = stage_without_storage(module.spec, module.config, stage, hidden, module.lora)
    trained = trainable_paths(module.spec, built, frozen=module.frozen, lora=module.lora)
    counts: dict[str, dict[str, int]] = {}
    for path, parameter in built.named_parameters():
        part = counts.setdefault(part_of(module, path), {"own": 0, "trained": 0, "added": 0, "operands": 0})
        if lora_linear(path) is None or path not in trained:
            part["own"] += parameter.numel()
            part["trained"] += parameter.numel() * (path in trained)
        else:
            part["added"] += parameter.numel()
            part["operands"] += parameter.shape[-1]  # columns that each of the two products reads
    return {
        name: PartShare(trained=part["trained"] / max(part["own"], 1), added=part["added"], operands=part["operands"])
        for name, part in counts.items()
    }


def part_of(module: JobModule, name: str) -> str:
    """Return the part that a parameter belongs to, or the module's name if it belongs to none."""
    for part, prefixes in module.spec.parts.items():
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes):
            return part
    return module.name


def _is_table(part: nn.Module) -> bool:
    return isinstance(part, nn.Embedding) or "embedding" in type(part).__name__.lower()

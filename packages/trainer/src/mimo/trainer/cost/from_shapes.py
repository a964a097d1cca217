"""What follows from the shapes of a module's parameters: operations of its parts, and what of each part is trained.

Modules are built without storage, so nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import nn

from mimo.model import OpCost, Stage, lora_linear
from mimo.model.runtime import Split, TensorAxis, build_stage, create_on, stage_without_storage, trainable_paths
from mimo.topology import Recompute
from mimo.trainer.job.job import JobModule, PartShare

_CONVOLUTION = 3
"""Dimensions above which a weight is one of a convolution, of outputs by inputs by sides."""


def op_costs_from_shapes(
    module: JobModule, stage: Stage, *, hidden: int, rows: int, recompute: Recompute
) -> Mapping[str, OpCost]:
    """Return what each part of a stage costs for ``rows`` rows, as if every matrix were multiplied with all of them.

    It stands in where a third-party plugin has no formula. Embedding tables cost nothing. Attention and whatever else
    multiplies no weights is left out. Saved are the rows that matrices multiply and give, if they can be trained; with
    recomputation, of layers that compute again, the rows of their first matrix alone.
    """
    with create_on("meta"):
        built = build_stage(module.spec, module.config, stage, hidden)
    axis = TensorAxis(rank=0, size=module.grid.tp, sequence_parallel=module.sequence_parallel)
    splits = {} if module.spec.tensor is None else module.spec.tensor.plan(built, axis)
    tables = {f"{path}.weight" for path, part in built.named_modules() if _is_table(part)}
    layer_of = _recomputed_layers(module, built) if recompute == "full" else {}
    groups: dict[tuple[str, nn.Module | None], list[OpCost]] = {}
    for name, parameter in built.named_parameters():
        is_matrix = parameter.dim() > 1 and name not in tables
        work = _product(parameter, splits.get(name, Split()), rows) if is_matrix else OpCost(weights=parameter.numel())
        groups.setdefault((part_of(module, name), layer_of.get(name)), []).append(work)
    costs: dict[str, OpCost] = {}
    for (part, layer), works in groups.items():
        work = sum(works, OpCost())
        if layer is not None:
            work = _repeated(work, next((one.operands - one.working for one in works if one.operands), 0.0))
        costs[part] = costs.get(part, OpCost()) + work
    return costs


def _product(parameter: nn.Parameter, split: Split, rows: int) -> OpCost:
    """Return what it takes to multiply rows with a matrix, of each expert, or with the weight of a convolution."""
    many, shape = parameter.dim() > _CONVOLUTION, parameter.shape
    outputs, inputs = (shape[0], shape[1:].numel()) if many else shape[-2:]
    ends = {parameter.dim() - 2: rows * outputs, parameter.dim() - 1: rows * inputs}
    cut = ends.get(-1 if split.dim is None else split.dim, 0.0) if not many else 0.0
    learns = parameter.requires_grad
    return OpCost(
        weighted=2.0 * rows * parameter.numel(),
        split=cut * learns,
        copied=(rows * (outputs + inputs) - cut) * learns,
        working=float(rows * outputs),
        operands=rows * (outputs + inputs),
        weights=parameter.numel(),
        largest=parameter.numel(),
    )


def _repeated(layer: OpCost, inputs: float) -> OpCost:
    """Return the cost of a layer that saves its inputs, so many elements, and computes all else again."""
    again = max(layer.split + layer.copied - inputs, 0.0)
    return attrs.evolve(layer, repeated=layer.forward, split=0.0, copied=inputs, recomputed=again)


def _recomputed_layers(module: JobModule, built: nn.Module) -> Mapping[str, nn.Module]:
    """Return the layers that compute all of theirs again, by the paths of their parameters."""
    methods = module.spec.recompute.get("full")
    if methods is None:
        return {}
    paths = {parameter: path for path, parameter in built.named_parameters()}
    layers = [layer for method in methods(built) if isinstance(layer := getattr(method, "__self__", None), nn.Module)]
    return {paths[parameter]: layer for layer in layers for parameter in layer.parameters()}


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

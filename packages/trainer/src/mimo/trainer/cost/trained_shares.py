"""How much of each part of a stage is trained, where patterns or LoRA say it: from shapes, nothing is allocated."""

from __future__ import annotations

from mimo.model import Stage, lora_linear
from mimo.model.runtime import stage_without_storage, trainable_paths
from mimo.trainer.cost.flops_from_shapes import part_of
from mimo.trainer.job.job import JobModule, PartShare


def part_shares(module: JobModule, stage: Stage, *, hidden: int) -> dict[str, PartShare]:
    """Return by part what of it is trained, and what LoRA adds to it.

    Args:
        module: whose settings name parameters or linears.
        stage: of it.
        hidden: width of the language model's rows.
    """
    built = stage_without_storage(module.spec, module.config, stage, hidden, module.lora)
    trained = trainable_paths(module.spec, built, frozen=module.frozen, lora=module.lora)
    found: dict[str, dict[str, int]] = {}
    for path, parameter in built.named_parameters():
        counts = found.setdefault(part_of(module, path), {"own": 0, "trained": 0, "added": 0, "kept": 0})
        if lora_linear(path) is None or path not in trained:
            counts["own"] += parameter.numel()
            counts["trained"] += parameter.numel() * (path in trained)
        else:
            counts["added"] += parameter.numel()
            counts["kept"] += parameter.shape[-1]  # what each of the two reads
    return {
        part: PartShare(
            trained=counts["trained"] / max(counts["own"], 1), added=counts["added"], operands=counts["kept"]
        )
        for part, counts in found.items()
    }

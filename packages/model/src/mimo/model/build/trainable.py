"""Which parameters of a module are trained: decided by their names in the module itself, built without storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn

from mimo.hooks import ConfigError
from mimo.model.build.create_on import create_on
from mimo.model.build.frozen import Frozen, is_frozen
from mimo.model.build.lora import attach_lora, check_targets, low_ranks
from mimo.model.spec import LanguageModelSpec, Lora, ModuleSpec, Stage, lora_names, noun_of

_CLOSEST = 3


def trainable_paths(spec: ModuleSpec, module: nn.Module, *, frozen: Frozen, lora: Lora | None) -> frozenset[str]:
    """Return the paths of the parameters of a stage that are trained.

    Args:
        spec: the module's plugin.
        module: the stage, with what `attach_lora` adds.
        frozen: what is not trained.
        lora: whose own parameters are, and never the linears beside which they stand.
    """
    adapted = [path for path, _ in low_ranks(module)] if lora is not None else []
    own = {name for path in adapted for name in lora_names(path)}
    beside = {f"{path}.{leaf}" for path in adapted for leaf in ("weight", "bias")}
    return frozenset(
        path
        for path, parameter in module.named_parameters()
        if parameter.requires_grad
        and parameter.is_floating_point()
        and (path in own or (path not in beside and not is_frozen(spec, path, frozen)))
    )


def check_names(
    spec: ModuleSpec,
    config: Any,
    *,
    name: str,
    hidden: int,
    frozen: Frozen,
    lora: Lora | None,
) -> None:
    """Do what `mimo.model.check_training` says, with the module's own names."""
    module = stage_without_storage(spec, config, Stage(), hidden)
    if lora is not None:
        check_targets(module, lora, name=name)
    if isinstance(frozen, bool):
        return
    paths = [path for path, _ in module.named_parameters()]
    noun = noun_of(spec)
    parts = f"parts of {noun} {spec.name!r} ({', '.join(map(repr, spec.parts))}), or " if spec.parts else ""
    for entry in sorted(frozen - set(spec.parts)):
        if not any(is_frozen(spec, path, frozenset({entry})) for path in paths):
            raise ConfigError(
                f"modules.{name}.frozen",
                expected=f"{parts}patterns of the paths of parameters inside it",
                got=f"{entry!r}, which matches none",
                fix=f"The closest are {', '.join(_closest(entry, [*spec.parts, *paths]))}."
                if paths
                else "It has no parameters.",
            )


def stage_without_storage(
    spec: ModuleSpec, config: Any, stage: Stage, hidden: int, lora: Lora | None = None
) -> nn.Module:
    """Return a stage at full shapes with what LoRA adds, on the meta device; one that can't be built so, on the CPU."""
    try:
        with create_on("meta"):
            module = build_stage(spec, config, stage, hidden)
    except (RuntimeError, TypeError):  # some read numbers back while being built
        with _one_thread():  # a process that forks others must not have made threads
            module = build_stage(spec, config, stage, hidden)
    attach_lora(module, lora, {})
    return module


def build_stage(spec: ModuleSpec, config: Any, stage: Stage, hidden: int | None) -> nn.Module:
    """Return a stage as its plugin makes it, on the device of the caller's context."""
    if isinstance(spec, LanguageModelSpec):
        return spec.build(config, stage)
    assert hidden is not None, "encoders and generators are built for the width of the language model's rows"
    module = spec.build(config, hidden)
    if spec.stages is not None:
        module = spec.stages.cut(module, stage.pipeline)
    if not stage.seam or not (stage.is_projector or stage.ends_tower):
        return module
    assert spec.seam is not None, f"encoder {spec.name!r} has no seam"
    return spec.seam.cut(module, "projector" if stage.is_projector else "tower")


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _closest(entry: str, names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: -SequenceMatcher(None, entry, name).ratio())[:_CLOSEST]

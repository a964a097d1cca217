"""One ``[modules.<name>]`` table: its plugin, grid, frozen parts and optimizer, each checked against the others."""

from __future__ import annotations

import re

import attrs

from mimo.hooks import ConfigError
from mimo.model import (
    ENCODERS,
    LANGUAGE_MODELS,
    EncoderSpec,
    Frozen,
    LanguageModelSpec,
    Stage,
    check_module,
    check_training,
    named_by_parts,
    stage_trains,
)
from mimo.topology import Grid
from mimo.trainer._plugins import Find
from mimo.trainer._resolve_optimizer import refuse_keys_of_frozen, resolve_module_optimizer
from mimo.trainer._resolved import JobModule
from mimo.trainer._settings import LANGUAGE, ModuleSettings, Settings
from mimo.trainer._structure import structure

RESERVED_NAMES = frozenset(
    {
        "base",
        "checkpoint",
        "data",
        "imported",
        "logging",
        "loss_scale",
        "model",
        "optimizer",
        "progress",
        "rerun",
        "run",
        "schedule",
    }
    | {"settings", "tokenizer"}
    | {"drain", "peers", "transfer", "unknown"}
)
"""Names that a module cannot have, since checkpoints, metrics and causes of waiting use them for something else."""


def resolve_module(name: str, settings: Settings, find: Find) -> JobModule:
    """Return one module as its table describes it.

    Raises:
        ConfigError: the table is wrong, by the path of the key.
    """
    where, table = f"modules.{name}", settings.modules[name]
    _check_name(name)
    spec: EncoderSpec | LanguageModelSpec
    if name == LANGUAGE:
        spec = find(LANGUAGE_MODELS, table.plugin, f"{where}.plugin")
        if table.modality:
            raise ConfigError(
                f"{where}.modality", expected="nothing, as only encoders read one", got=repr(table.modality)
            )
        if table.batch_factor != 1:
            raise ConfigError(
                f"{where}.batch_factor",
                expected="1, as only passes of encoders serve several microbatches",
                got=repr(table.batch_factor),
                fix="Set run.micro_batch to change what the language model takes at once.",
            )
        if table.prefetch:
            raise ConfigError(
                f"{where}.prefetch",
                expected="false, as only an encoder's next step can be encoded during this one",
                got="true",
                fix="Leave it out.",
            )
    else:
        spec = find(ENCODERS, table.plugin, f"{where}.plugin")
    module = JobModule(
        name=name,
        spec=spec,
        config=structure(table.config, spec.config, f"{where}.config"),
        grid=_grid(name, table),
        chunks=table.chunks,
        sequence_parallel=table.sequence_parallel,
        batch_factor=table.batch_factor,
        prefetch=table.prefetch,
        recompute=table.recompute,
        frozen=_frozen(table),
        lora=table.lora,
        modality="" if isinstance(spec, LanguageModelSpec) else table.modality or spec.modality,
        optimizer=resolve_module_optimizer(name, settings, find),
    )
    check_module(
        spec,
        module.config,
        grid=module.grid,
        sequence_parallel=module.sequence_parallel,
        chunks=module.chunks,
        recompute=module.recompute,
    )
    _check_encoder(module)
    return module


def with_training(module: JobModule, settings: Settings, *, hidden: int) -> JobModule:
    """Return a module that knows which of its stages hold anything that is trained.

    Args:
        module: of `resolve_module`.
        settings: the whole file.
        hidden: width of the language model's rows.

    Raises:
        ConfigError: what is frozen or adapted is nothing that it has, or its own optimizer has nothing to do.
    """
    spec, config, frozen, lora = module.spec, module.config, module.frozen, module.lora
    check_training(spec, config, name=module.name, hidden=hidden, frozen=frozen, lora=lora)
    count = module.grid.pp * module.chunks
    stages = (Stage(index, count) for index in range(count))
    if named_by_parts(spec, frozen=frozen, lora=lora):
        module = attrs.evolve(
            module, trains=tuple(stage_trains(spec, config, stage=stage, frozen=frozen) for stage in stages)
        )
    else:
        from mimo.trainer._shares import part_shares  # it builds the module, with torch

        shares = tuple(part_shares(module, stage, hidden=hidden) for stage in stages)
        trains = tuple(any(one.trained or one.added for one in parts.values()) for parts in shares)
        module = attrs.evolve(module, trains=trains, shares=shares)
    if not any(module.trains):
        refuse_keys_of_frozen(module.name, settings.modules[module.name].optimizer, module.optimizer.spec)
    return module


def _frozen(table: ModuleSettings) -> Frozen:
    """Return what is not trained; where linears are adapted and nothing is said, all else is not."""
    if table.lora is not None and table.frozen == ():
        return True
    return table.frozen if isinstance(table.frozen, bool) else frozenset(table.frozen)


def _check_name(name: str) -> None:
    if name in RESERVED_NAMES:
        raise ConfigError(
            f"modules.{name}", expected="a name that is not taken", got=repr(name), fix="Call the module otherwise."
        )
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise ConfigError(f"modules.{name}", expected="a name of letters, digits and underscores", got=repr(name))


def _grid(name: str, table: ModuleSettings) -> Grid:
    others = table.pp * table.cp * table.tp
    follows = max(1, len(table.ranks) // others) if others > 0 else 1
    return Grid(
        name=name,
        ranks=table.ranks,
        pp=table.pp,
        dp=table.dp or follows,
        cp=table.cp,
        tp=table.tp,
        ep=table.ep,
        etp=table.etp,
    )


def _check_encoder(module: JobModule) -> None:
    where = f"modules.{module.name}"
    if module.name == LANGUAGE:
        return
    if not re.fullmatch(r"[A-Za-z]\w*", module.modality, re.ASCII):
        raise ConfigError(
            f"{where}.modality", expected="a name of letters, digits and underscores", got=repr(module.modality)
        )

"""One ``[modules.<name>]`` table: its plugin, grid, frozen parts and optimizer, each checked against the others."""

from __future__ import annotations

import re

from mimo.hooks import ConfigError
from mimo.model import ENCODERS, LANGUAGE_MODELS, EncoderSpec, LanguageModelSpec, Stage, check_module, stage_trains
from mimo.topology import Grid
from mimo.trainer._plugins import Find
from mimo.trainer._resolve_optimizer import refuse_keys_of_frozen, resolve_module_optimizer
from mimo.trainer._resolved import JobModule
from mimo.trainer._settings import LANGUAGE, ModuleSettings, Settings
from mimo.trainer._structure import structure

RESERVED_NAMES = frozenset(
    {
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
        frozen=table.frozen if isinstance(table.frozen, bool) else frozenset(table.frozen),
        modality="" if isinstance(spec, LanguageModelSpec) else table.modality or spec.modality,
        optimizer=resolve_module_optimizer(name, settings, find),
    )
    check_module(
        spec,
        module.config,
        grid=module.grid,
        frozen=module.frozen,
        sequence_parallel=module.sequence_parallel,
        chunks=module.chunks,
        recompute=module.recompute,
    )
    if not any(stages_that_train(module)):
        refuse_keys_of_frozen(name, table.optimizer, module.optimizer.spec)
    _check_encoder(module)
    return module


def stages_that_train(module: JobModule) -> tuple[bool, ...]:
    """Return for each stage whether it holds anything that is trained."""
    count = module.grid.pp * module.chunks
    stages = (Stage(index, count) for index in range(count))
    return tuple(stage_trains(module.spec, module.config, stage=stage, frozen=module.frozen) for stage in stages)


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

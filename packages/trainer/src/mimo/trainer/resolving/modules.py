"""One ``[modules.<name>]`` table: its plugin, grid, frozen parts and optimizer, each checked against the others."""

from __future__ import annotations

import re
from typing import Any

import attrs

from mimo.hooks import ConfigError
from mimo.model import (
    EncoderSpec,
    Frozen,
    LanguageModelSpec,
    ModuleSpec,
    Stage,
    check_module,
    check_training,
    hf_families,
    named_by_parts,
    noun_of,
    stage_trains,
)
from mimo.topology import Grid
from mimo.trainer.config.names import BASE, IMPORTED, OPTIMIZER, PROGRESS, RERUN, SETTINGS
from mimo.trainer.config.plugin_kinds import Find, module_kind
from mimo.trainer.config.setting_paths import naming_settings
from mimo.trainer.config.settings import LANGUAGE, ModuleSettings, Settings
from mimo.trainer.config.structure import structure, unstructure
from mimo.trainer.job.job import JobModule
from mimo.trainer.resolving.optimizer import refuse_keys_of_frozen, resolve_module_optimizer

_WITH_ARTICLE = {"encoder": "an encoder", "generator": "a generator"}
RESERVED_NAMES = frozenset(
    {BASE, IMPORTED, OPTIMIZER, PROGRESS, RERUN, SETTINGS}
    | {"checkpoint", "data", "logging", "loss_scale", "model", "run", "schedule", "tokenizer"}
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
    spec = naming_settings(_plugin(name, table, find), where)
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
        loss_rows=table.loss_rows,
        round_rows=table.round_rows,
        frozen=True if _is_of_teacher(name, settings) else _frozen(table),
        lora=table.lora,
        modality="" if isinstance(spec, LanguageModelSpec) else table.modality or spec.modality,
        optimizer=resolve_module_optimizer(name, settings, find),
        feeds=() if table.fed_by else table.takers,
        is_of_teacher=_is_of_teacher(name, settings),
        distil=table.distil,
        loss_weight=table.loss_weight,
    )
    check_module(
        spec,
        module.config,
        grid=module.grid,
        sequence_parallel=module.sequence_parallel,
        chunks=module.chunks,
        recompute=module.recompute,
        loss_rows=module.loss_rows,
    )
    _check_encoder(module)
    _check_feeds(name, settings)
    if _is_of_teacher(name, settings):
        _refuse_training(where, table)
    if isinstance(spec, LanguageModelSpec) and table.distil is not None and table.distil.top_k:
        check_distils(where, spec)
    _check_ignored(where, spec, module.config, table)
    return module


def _plugin(name: str, table: ModuleSettings, find: Find) -> ModuleSpec:
    """Return a module's plugin; keys that its kind of module does not have are refused."""
    where = f"modules.{name}"
    _check_fed_by(name, table)
    if name == LANGUAGE and table.distil is not None:
        raise ConfigError(
            f"{where}.distil",
            expected="nothing, as this module is the one that learns",
            got=repr(unstructure(table.distil)),
            fix="Put it into the table of another language model, which is its teacher.",
        )
    kind = module_kind(name, distil=table.distil, fed_by=table.fed_by)
    spec: ModuleSpec = find(kind, table.plugin, f"{where}.plugin")
    if isinstance(spec, LanguageModelSpec):
        _check_language_keys(where, table)
    else:
        _check_item_keys(where, table, noun_of(spec))
    return spec


def _check_language_keys(where: str, table: ModuleSettings) -> None:
    """Refuse keys that language models do not have."""
    if table.modality:
        raise ConfigError(f"{where}.modality", expected="nothing, as only encoders read one", got=repr(table.modality))
    if table.batch_factor != 1:
        raise ConfigError(
            f"{where}.batch_factor",
            expected="1, as only passes of encoders and generators serve several microbatches",
            got=repr(table.batch_factor),
            fix="Set run.micro_batch to change what the language model takes at once.",
        )
    if table.distil is not None and not table.distil.top_k:
        _refuse_keys_of_ids(where, table)


def _refuse_keys_of_ids(where: str, table: ModuleSettings) -> None:
    """Refuse what only a teacher that sends ids has a use for."""
    if table.loss_weight != 1:
        raise ConfigError(
            f"{where}.loss_weight",
            expected="1 beside distil.top_k = 0, as it is that of the divergence",
            got=repr(table.loss_weight),
            fix=f"Set {where}.distil.hidden_weight instead.",
        )
    if table.loss_rows:
        raise ConfigError(
            f"{where}.loss_rows",
            expected="0 beside distil.top_k = 0, as a teacher that sends no ids makes no logits",
            got=repr(table.loss_rows),
            fix="Leave it out.",
        )


def _check_item_keys(where: str, table: ModuleSettings, noun: str) -> None:
    """Refuse keys that encoders, or generators, do not have."""
    if table.loss_weight != 1 and not table.fed_by:
        raise ConfigError(
            f"{where}.loss_weight",
            expected="1, as an encoder has no targets of its own",
            got=repr(table.loss_weight),
            fix="Leave it out.",
        )
    if table.prefetch and table.fed_by:
        raise ConfigError(
            f"{where}.prefetch",
            expected="false, as a generator reads rows that the language model makes in their own step",
            got="true",
            fix="Leave it out.",
        )
    if table.round_rows != 1:
        raise ConfigError(
            f"{where}.round_rows",
            expected=f"1, as {_WITH_ARTICLE[noun]} makes the rows of its items and no others",
            got=repr(table.round_rows),
            fix=f"Set modules.{LANGUAGE}.round_rows to pad the rows of the language model.",
        )


def _check_fed_by(name: str, table: ModuleSettings) -> None:
    """Refuse generators that another module is to feed, and keys of other kinds of modules beside theirs."""
    if not table.fed_by:
        return
    where, others = f"modules.{name}", {"distil": table.distil is not None, "feeds": table.takers != (LANGUAGE,)}
    if name == LANGUAGE or table.fed_by != LANGUAGE:
        raise ConfigError(
            f"{where}.fed_by",
            expected="nothing, as this module is the language model"
            if name == LANGUAGE
            else f"{LANGUAGE!r}, whose rows feed all generators",
            got=repr(table.fed_by),
            fix="Leave it out, or put it into the table of a generator."
            if name == LANGUAGE
            else f'Where an encoder is to feed it too, set feeds = "{name}" in that one\'s table.',
        )
    for key, is_set in others.items():
        if is_set:
            raise ConfigError(
                f"{where}.{key}",
                expected="nothing beside fed_by, which makes the module a generator",
                got=repr(unstructure(getattr(table, key))),
                fix="Leave one of the two out.",
            )


def _check_feeds(name: str, settings: Settings) -> None:
    """Refuse encoders that feed another encoder or no module, and language models that are to feed another one."""
    table, where = settings.modules[name], f"modules.{name}.feeds"
    if table.takers == (LANGUAGE,):
        return
    if name == LANGUAGE or table.distil is not None:
        raise ConfigError(
            where,
            expected=f"{LANGUAGE!r}, as only encoders may feed another module",
            got=repr(unstructure(table.feeds)),
            fix="Leave it out.",
        )
    teachers = [other for other, own in settings.modules.items() if own.distil is not None]
    generators = [other for other, own in settings.modules.items() if own.fed_by]
    several = len(table.takers) != 1
    known = {LANGUAGE, *generators} if several else {LANGUAGE, *teachers, *generators}
    if not table.takers or not known.issuperset(table.takers):
        names = ", ".join([*(() if several else teachers), *generators]) or "there is none"
        raise ConfigError(
            where,
            expected=f"a list of any of {LANGUAGE!r} and the generators (with fed_by): {names}"
            if several
            else f"{LANGUAGE!r}, a teacher (a module with a table distil), or a generator (one with fed_by): {names}",
            got=repr(unstructure(table.feeds)),
            fix="Give a teacher an encoder of its own." if {*teachers}.intersection(table.takers) else "",
        )
    if len(set(table.takers)) != len(table.takers):
        raise ConfigError(where, expected="each module once", got=repr(unstructure(table.feeds)))


def _is_of_teacher(name: str, settings: Settings) -> bool:
    """Tell whether a module is a teacher, or feeds one."""
    table = settings.modules[name]
    takers = [one for taker in table.takers if (one := settings.modules.get(taker)) is not None]
    return name != LANGUAGE and not table.fed_by and any(one.distil is not None for one in (table, *takers))


def _refuse_training(where: str, table: ModuleSettings) -> None:
    """Refuse to train a teacher, or what feeds it."""
    which = "a teacher" if table.distil is not None else "what feeds a teacher"
    if table.frozen not in {(), True}:
        raise ConfigError(
            f"{where}.frozen",
            expected=f"true, or nothing, as {which} isn't trained",
            got=repr(unstructure(table.frozen)),
            fix="Leave it out.",
        )
    if table.lora is not None:
        raise ConfigError(
            f"{where}.lora",
            expected=f"nothing, as {which} isn't trained",
            got=repr(unstructure(table.lora)),
            fix="Merge the adapter into its weights.",
        )


def check_distils(where: str, spec: LanguageModelSpec) -> None:
    """Refuse a language model that can neither teach by ids nor be taught by them.

    Raises:
        ConfigError: naming its plugin.
    """
    if not spec.distils:
        raise ConfigError(
            f"{where}.plugin",
            expected="a language model whose plugin says `distils`",
            got=repr(spec.name),
            fix="Give its last stage what mimo.model.runtime.SupportsDistillation says, or have all teachers teach by "
            'hidden rows alone: distil = { top_k = 0, hidden = "mse" }.',
        )


def _check_ignored(where: str, spec: ModuleSpec, config: Any, table: ModuleSettings) -> None:
    """Refuse keys that no published family of a plugin lets anyone set aside."""
    if not table.ignore:
        return
    known = sorted({key for family in hf_families(spec, config) for key in family.dropout})
    for key in table.ignore:
        if key not in known:
            raise ConfigError(
                f"{where}.ignore",
                expected=f"keys that drop at random, of what {spec.name!r} reads: {', '.join(known) or 'none'}",
                got=repr(key),
            )


def with_training(module: JobModule, settings: Settings, *, hidden: int, ahead: bool = False) -> JobModule:
    """Return a module that knows which of its stages hold anything that is trained, and whether it is divided.

    Args:
        module: of `resolve_module`.
        settings: the whole file.
        hidden: width of the language model's rows.
        ahead: whether it is to work a step ahead, and is divided at its seam if anything of it trains.

    Raises:
        ConfigError: what is frozen or adapted is nothing that it has, its own optimizer has nothing to do, or what is
            to work ahead trains.
    """
    spec, config, frozen, lora = module.spec, module.config, module.frozen, module.lora
    check_training(spec, config, name=module.name, hidden=hidden, frozen=frozen, lora=lora)
    module = _with_stages(module, hidden=hidden, divided=False)
    if not any(module.trains):
        refuse_keys_of_frozen(module.name, settings.modules[module.name].optimizer, module.optimizer.spec)
    elif ahead:
        module = _divided(module, hidden=hidden)
    return module


def _with_stages(module: JobModule, *, hidden: int, divided: bool) -> JobModule:
    """Return a module, divided at its seam or not, that knows what its stages train."""
    spec, config, frozen, lora = module.spec, module.config, module.frozen, module.lora
    count = module.grid.pp * module.chunks + divided
    stages = (Stage(index, count, divided) for index in range(count))
    if named_by_parts(spec, frozen=frozen, lora=lora):
        trains = tuple(stage_trains(spec, config, stage=stage, frozen=frozen) for stage in stages)
        return attrs.evolve(module, divided=divided, trains=trains)
    from mimo.trainer.cost.from_shapes import part_shares  # imports torch

    shares = tuple(part_shares(module, stage, hidden=hidden) for stage in stages)
    trains = tuple(any(one.trained or one.added for one in parts.values()) for parts in shares)
    return attrs.evolve(module, divided=divided, trains=trains, shares=shares)


def _divided(module: JobModule, *, hidden: int) -> JobModule:
    """Return a module of which something trains as its tower, which works a step ahead, and its projector.

    Raises:
        ConfigError: its plugin has no seam, or something of the tower trains.
    """
    spec, where = module.spec, f"modules.{module.name}.prefetch"
    if isinstance(spec, LanguageModelSpec):
        raise ConfigError(
            where,
            expected="false, unless all of the language model is frozen and feeds a generator",
            got="true",
            fix="Leave it out, or set frozen = true beside it.",
        )
    assert isinstance(spec, EncoderSpec), module.name
    if spec.seam is None:
        raise ConfigError(
            where,
            expected=f"a module of which nothing is trained, since encoder {spec.name!r} has no seam between a tower "
            "that works ahead and a projector that trains",
            got="one that trains",
            fix="Freeze all of it (frozen = true), leave prefetch out, or give the plugin a seam: see "
            "docs/write-an-encoder.md.",
        )
    behind = ", ".join(map(repr, sorted(spec.seam.parts)))
    divided = _with_stages(module, hidden=hidden, divided=True)
    if any(divided.trains[:-1]):
        raise ConfigError(
            where,
            expected=f"a tower of which nothing is trained, as it is encoded before the step that would change it; "
            f"what may train is behind it: {behind}",
            got=_trained_of_tower(divided),
            fix=f"Freeze that too, by modules.{module.name}.frozen, or leave prefetch out.",
        )
    return divided


def _trained_of_tower(module: JobModule) -> str:
    """Return in words what trains of a tower."""
    assert isinstance(module.spec, EncoderSpec)
    assert module.spec.seam is not None
    shares = module.shares[:-1]
    whole = {part for stage in shares for part, share in stage.items() if share.trained}
    added = {part for stage in shares for part, share in stage.items() if share.added}
    if not shares and not isinstance(module.frozen, bool):
        whole = set(module.spec.parts) - module.spec.seam.parts - module.frozen
    if not shares and module.frozen is False:
        whole = set(module.spec.parts) - module.spec.seam.parts
    words = [*map(repr, sorted(whole)), *(f"what LoRA adds to {part!r}" for part in sorted(added))]
    return f"{' and '.join(words) or 'its parameters'}, which train{'' if len(words) > 1 else 's'}"


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
    if isinstance(module.spec, LanguageModelSpec):
        return
    if not re.fullmatch(r"[A-Za-z]\w*", module.modality, re.ASCII):
        raise ConfigError(
            f"{where}.modality", expected="a name of letters, digits and underscores", got=repr(module.modality)
        )

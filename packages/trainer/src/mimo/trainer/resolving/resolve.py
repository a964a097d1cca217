"""From settings to a `Job`: everything that can be wrong before launch is refused here, by the setting's path.

Torch stays out, so that `mimo check` and refusals are quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import attrs

from mimo.data import DATASETS, TOKENIZERS, Dataset, LimitedTokenizer, SplitName, Tokenizer
from mimo.hooks import ConfigError, UserError
from mimo.model import EncoderSpec, GeneratorSpec, LanguageModelSpec, noun_of
from mimo.schedule import SCHEDULES, Costs, Plan, ScheduleSpec, check
from mimo.topology import Module, ModuleGraph, Placement, StageId, count_microbatches
from mimo.trainer.config.fields import own_keys
from mimo.trainer.config.plugin_kinds import Find, find_installed
from mimo.trainer.config.settings import (
    LANGUAGE,
    LOGITS_BYTES,
    MAX_MODULES,
    MAX_PLACED,
    Balance,
    DataSettings,
    ScheduleSettings,
    Settings,
    TokenizerSettings,
)
from mimo.trainer.config.structure import structure, unstructure
from mimo.trainer.cost.step_cost import job_costs
from mimo.trainer.job.job import NUMBER_BYTES, Job, JobModule, plain_settings
from mimo.trainer.job.measured_dataset import MeasuredDataset, knows_all_sizes, measured
from mimo.trainer.job.precision import check_precision
from mimo.trainer.job.sample_index import IndexRules, open_index
from mimo.trainer.resolving.dataset import DatasetChoice
from mimo.trainer.resolving.job_size import check_microbatches, check_tokenizer_size
from mimo.trainer.resolving.load import check_load
from mimo.trainer.resolving.microbatches import plans_of_steps, step_microbatches
from mimo.trainer.resolving.modules import resolve_module, with_training
from mimo.trainer.resolving.optimizer import check_clip_groups, follows_one_plugin, resolve_optimizer
from mimo.trainer.resolving.rerun import check_rerun
from mimo.trainer.resolving.teachers import check_teachers

Purpose = Literal["train", "evaluate", "generate", "import"]
"""To train; to evaluate held-out samples; to write from prompts, without teachers; to know the modules alone."""


def resolve(
    settings: Settings,
    *,
    purpose: Purpose = "train",
    find: Find = find_installed,
    needs_data: bool = True,
    writes_index: bool = False,
) -> Job:
    """Return the job that settings describe, its plans proved free of deadlock.

    Args:
        settings: the whole file.
        purpose: what for; only training opens the training data, only training and evaluation open any.
        find: where plugins come from.
        needs_data: whether data that can't be opened are refused; otherwise the job has none.
        writes_index: whether what plugins keep of data, to open them sooner, is written anew; no sizes are then taken
            from an index, nor its broken samples.

    Raises:
        ConfigError: a setting is wrong by itself or beside another one.
        PluginError: a plugin that is asked for cannot be imported, or breaks its contract.
        PlanError: the schedule made a plan that could deadlock.
    """
    _check_language(settings)
    check_load(settings)
    optimizer = resolve_optimizer(settings, find)
    written = tuple(resolve_module(name, settings, find) for name in _used(settings, purpose))
    check_precision(settings, written)
    tokenizer, tokenizer_config = _tokenizer(settings, written, find)
    read = (_with_loss_rows(_with_vocabulary(module, tokenizer)) for module in written)
    modules = _with_training(tuple(read), settings, purpose)
    check_teachers(modules, trains=purpose == "train")
    check_clip_groups(settings, [module for module in modules if any(module.trains)])
    schedule = find(SCHEDULES, settings.schedule.plugin, "schedule.plugin")
    schedule_config: Any = structure(
        settings.schedule.config, schedule.config, "schedule", siblings=own_keys(ScheduleSettings)
    )
    model_graph = _graph(modules, purpose, schedule.placement(schedule_config))
    graph = model_graph.divided()
    world = _world(settings, model_graph)
    lanes = _lanes(graph)
    numbers = step_microbatches(settings, graph)
    if purpose == "train":
        check_rerun(settings, model_graph, microbatches=numbers[-1], world=world)
    evaluation_microbatches = _evaluation_microbatches(settings, lanes)
    check_microbatches(
        settings,
        graph,
        train=numbers[-1],
        evaluation=evaluation_microbatches,
        evaluation_batch=settings.evaluation_batch(lanes),
    )
    rules = IndexRules.of(
        modules,
        tokenizer,
        settings={"plugin": settings.tokenizer.plugin, **unstructure(tokenizer_config)},
        max_tokens=settings.data.max_tokens,
    )
    data_config, train, evaluation = _data(
        settings, modules, tokenizer, purpose, find, None if writes_index else rules, needs_data=needs_data
    )
    job = Job(
        settings=settings,
        modules=modules,
        model_graph=model_graph,
        graph=graph,
        plans=tuple(_no_plan(schedule, number) for number in numbers),
        evaluation_graph=graph.without_training(),
        evaluation_microbatches=evaluation_microbatches,
        evaluation_plan=_no_plan(schedule, evaluation_microbatches),
        tokenizer=tokenizer,
        train=train,
        evaluation=evaluation,
        world=world,
        plain=plain_settings(
            settings,
            written,
            {
                "data": data_config,
                "tokenizer": tokenizer_config,
                "optimizer": optimizer.config if follows_one_plugin(optimizer, written) else {},
                "schedule": schedule_config,
            },
        ),
    ).balanced(_balance(settings, None if writes_index else train))
    if train is not None:
        job.sample_order()  # refuses weights of a mixture
    uses_costs = settings.schedule.profile or (schedule.uses_costs and purpose in {"train", "evaluate"})
    costs = job_costs(job) if uses_costs else Costs.even(graph)
    evaluation_costs = costs.trained(job.evaluation_graph)
    return attrs.evolve(
        job,
        plans=plans_of_steps(
            numbers,
            partial(_plan, schedule, graph, config=schedule_config, costs=costs),
            exactly=not settings.run.batch_tokens,
        ),
        evaluation_plan=_plan(
            schedule, job.evaluation_graph, evaluation_microbatches, config=schedule_config, costs=evaluation_costs
        ),
    )


def _balance(settings: Settings, train: Dataset | None) -> Balance:
    """Return how samples are placed: by cost, unless settings say otherwise or a step has too many to read first.

    Raises:
        ConfigError: there are too many of which no index knows the sizes, and settings say that it be by cost.
    """
    asked, batch = settings.data.balance, settings.most_samples
    is_known = batch <= MAX_PLACED or (train is not None and knows_all_sizes(train))
    if asked == "cost" and train is not None and not is_known:
        raise ConfigError(
            "data.balance",
            expected=f"'count', or data with an index, where run.global_batch is above {MAX_PLACED}: without an index "
            "each rank reads the headers of all samples of a step before it can place them by cost",
            got=f"{asked!r}, data without an index, and {batch} samples",
            fix="Run `mimo data index FILE` with the file of these settings, which reads them once, set "
            'data.balance = "count", or run.global_batch to less.',
        )
    if asked == "auto":
        return "cost" if is_known else "count"
    return asked


def _check_language(settings: Settings) -> None:
    if len(settings.modules) > MAX_MODULES:
        raise ConfigError("modules", expected=f"at most {MAX_MODULES} modules", got=f"{len(settings.modules)}")
    if LANGUAGE not in settings.modules:
        raise ConfigError(
            f"modules.{LANGUAGE}",
            expected="a language model, which every model has",
            got=f"only {', '.join(settings.modules)}" if settings.modules else "no module",
            fix=f"Add a table [modules.{LANGUAGE}].",
        )


def _used(settings: Settings, purpose: Purpose) -> list[str]:
    """Return the names of the modules that are needed: nobody is taught while the language model writes."""
    teachers = {name for name, table in settings.modules.items() if table.distil is not None}
    left = teachers if purpose == "generate" else set()
    return [name for name, table in settings.modules.items() if not left & {name, *table.takers}]


def _tokenizer(settings: Settings, modules: tuple[JobModule, ...], find: Find) -> tuple[Tokenizer, Any]:
    readers: dict[tuple[str, str], str] = {}
    for module in (one for one in modules if one.modality):
        verb = "makes" if module.is_generator else "reads"
        for key in ((taker, module.modality) for taker in module.feeds or ("",)):
            if key in readers:
                raise ConfigError(
                    f"modules.{module.name}.modality",
                    expected=f"a modality that no other module {verb}",
                    got=f"{module.modality!r}, which {readers[key]} {verb}",
                    fix="Give one of them another name; the data's placeholders tell them apart.",
                )
            readers[key] = module.name
    modalities = _modalities(modules)
    spec = find(TOKENIZERS, settings.tokenizer.plugin, "tokenizer.plugin")
    config: Any = structure(settings.tokenizer.config, spec.config, "tokenizer", siblings=own_keys(TokenizerSettings))
    tokenizer = spec.build(config, modalities)
    check_tokenizer_size(tokenizer)
    for modality in modalities:
        tokenizer.placeholder(modality)  # refused here rather than by the first sample
    return tokenizer, config


def _encoders(modules: Iterable[JobModule]) -> list[JobModule]:
    """Return the encoders that feed the language model, each of a modality of its own."""
    return [module for module in modules if isinstance(module.spec, EncoderSpec) and module.feeds_language]


def _modalities(modules: Iterable[JobModule]) -> tuple[str, ...]:
    """Return the modalities that the language model's encoders read and generators make, each once."""
    ends = [module for module in modules if module.is_generator or module.feeds_language]
    return tuple(dict.fromkeys(module.modality for module in ends if module.modality))


def _with_vocabulary(module: JobModule, tokenizer: Tokenizer) -> JobModule:
    """Return the language model with the tokenizer's vocabulary where it names none; other modules as they are."""
    if not isinstance(module.spec, LanguageModelSpec):
        return module
    vocabulary = module.spec.vocabulary(module.config)
    if vocabulary == 0:
        return attrs.evolve(module, config=attrs.evolve(module.config, vocabulary=tokenizer.vocabulary))
    if vocabulary < tokenizer.vocabulary:
        raise ConfigError(
            f"modules.{module.name}.config.vocabulary",
            expected=f"at least the tokenizer's {tokenizer.vocabulary} ids",
            got=repr(vocabulary),
            fix="Set it to 0 to take the tokenizer's.",
        )
    return module


def _with_loss_rows(module: JobModule) -> JobModule:
    """Return the language model with as many rows of logits at a time as `LOGITS_BYTES` hold, where none are set."""
    if not isinstance(module.spec, LanguageModelSpec) or not module.spec.chunks_loss or module.loss_rows:
        return module
    row = NUMBER_BYTES["fp32"] * -(-module.spec.vocabulary(module.config) // module.grid.tp)
    return attrs.evolve(module, loss_rows=LOGITS_BYTES // row)


def _with_training(modules: tuple[JobModule, ...], settings: Settings, purpose: Purpose) -> tuple[JobModule, ...]:
    languages = {module.name: module for module in modules if isinstance(module.spec, LanguageModelSpec)}

    def width(module: JobModule) -> int:
        """Return that of the rows between a module and another one."""
        taker = next((languages[name] for name in module.feeds if name in languages), None)
        if taker is None:  # a generator, or what feeds one
            spec, config = languages[LANGUAGE].spec, languages[LANGUAGE].config
            assert isinstance(spec, LanguageModelSpec)
            return spec.hidden(config)
        assert isinstance(taker.spec, LanguageModelSpec)
        return taker.spec.row_width(taker.config)

    return tuple(
        with_training(module, settings, hidden=width(module), ahead=module.prefetch and purpose == "train")
        for module in modules
    )


def _graph(modules: tuple[JobModule, ...], purpose: Purpose, placement: Placement) -> ModuleGraph:
    graph = ModuleGraph(
        modules=tuple(
            Module(
                grid=module.grid,
                trains=module.trains,
                tied=isinstance(module.spec, LanguageModelSpec) and module.spec.tied(module.config),
                experts=isinstance(module.spec, LanguageModelSpec)
                and module.spec.experts is not None
                and module.spec.experts.count(module.config) > 0,
                chunks=module.chunks,
                placement=placement,
                batch_factor=module.batch_factor,
                prefetch=module.prefetch and purpose == "train" and not module.divided,
                seam=module.divided,
                recompute=module.recompute,
                gathers=module.optimizer.spec.rendezvous(module.optimizer.config),
                shard_lanes=_shard_lanes(module, purpose),
                overlaps=module.optimizer.spec.overlaps(module.optimizer.config),
                feeds="first" if module.distil is None else "last",
            )
            for module in modules
        ),
        arrows=tuple(
            arrow
            for module in modules
            if module.name != LANGUAGE
            for arrow in ([(LANGUAGE, module.name)] if module.is_generator else product([module.name], module.feeds))
        ),
    )
    if purpose == "train" and not any(trains for module in graph.modules for trains in module.trains):
        raise ConfigError(
            "modules",
            expected="at least one part that is trained",
            got="every module frozen",
            fix="Take something out of modules.<name>.frozen.",
        )
    for module in graph.modules:
        backward = any(graph.runs_backward(StageId(module.name, stage)) for stage in range(module.stages))
        if module.recompute != "none" and not backward:
            raise ConfigError(
                f"modules.{module.name}.recompute",
                expected="none, as nothing in it is trained, nor anything that feeds it: there is no backward",
                got=repr(module.recompute),
                fix="Leave it out.",
            )
    return graph


def _shard_lanes(module: JobModule, purpose: Purpose) -> int:
    """Return over how many lanes copies are spread: where nothing trains, as many of the training's as these allow."""
    wanted = module.optimizer.spec.shard_lanes(module.optimizer.config)
    return wanted if purpose == "train" else math.gcd(module.grid.dp * module.grid.cp, wanted)


def _world(settings: Settings, graph: ModuleGraph) -> int:
    highest, world = max(graph.ranks), settings.run.world
    if world and world <= highest:
        name = next(module.name for module in graph.modules if highest in module.grid.ranks)
        raise ConfigError(
            "run.world",
            expected=f"{highest + 1} or more, as modules.{name}.ranks names rank {highest}",
            got=repr(world),
            fix="Leave it out to have it follow from the ranks.",
        )
    return world or highest + 1


def _lanes(graph: ModuleGraph) -> int:
    return graph.by_name[LANGUAGE].grid.dp


def _evaluation_microbatches(settings: Settings, lanes: int) -> int:
    batch = settings.evaluation_batch(lanes)
    try:
        return count_microbatches(global_batch=batch, micro_batch=settings.run.micro_batch, lanes=lanes)
    except ConfigError as error:
        raise ConfigError("run.evaluation_batch", expected=error.expected, got=error.got) from None


def _data(
    settings: Settings,
    modules: Sequence[JobModule],
    tokenizer: Tokenizer,
    purpose: Purpose,
    find: Find,
    rules: IndexRules | None,
    *,
    needs_data: bool,
) -> tuple[Mapping[str, Any], Dataset | None, Dataset | None]:
    spec = find(DATASETS, settings.data.plugin, "data.plugin")
    config: Any = structure(settings.data.config, spec.config, "data", siblings=own_keys(DataSettings))
    limited = LimitedTokenizer(
        inner=tokenizer,
        max_tokens=settings.data.max_tokens,
        modalities=_modalities(modules),
    )
    choice = DatasetChoice.of(spec, config, "data", find)
    readers = _readers(modules, settings)

    def opened(split: SplitName) -> MeasuredDataset | None:
        if rules is None:
            choice.write_index(split)
        dataset = choice.open(limited, split)
        if dataset is None or rules is None:
            return measured(dataset, readers)
        known = open_index(dataset, rules, skips_broken=settings.data.broken == "skip")
        return measured(dataset, readers, known, rules.end)

    try:
        train = opened("train") if purpose == "train" else None
        evaluation = opened("evaluation") if purpose in {"train", "evaluate"} else None
    except (UserError, OSError):
        if needs_data:
            raise
        return choice.plain(), None, None
    if purpose == "train" and (train is None or not len(train)):
        raise ConfigError("data", expected="samples to train on", got="none", fix="Check the keys of [data].")
    if evaluation is None and (purpose == "evaluate" or (purpose == "train" and settings.run.evaluation_interval)):
        raise ConfigError(
            "data",
            expected="held-out samples to evaluate on",
            got="none",
            fix="Check the keys of [data]" + (", or set run.evaluation_interval = 0." if purpose == "train" else "."),
        )
    return choice.plain(), train, evaluation


def _readers(modules: Sequence[JobModule], settings: Settings) -> Mapping[str, EncoderSpec | GeneratorSpec]:
    """Return by modality the plugins that measure its items; where both read or make one, an encoder does."""
    every = [module for module in modules if isinstance(module.spec, EncoderSpec | GeneratorSpec)]
    for module in every if settings.data.max_broken else ():
        assert isinstance(module.spec, EncoderSpec | GeneratorSpec)
        if module.spec.blank is None:
            raise ConfigError(
                "data.max_broken",
                expected=f"0, as {noun_of(module.spec)} {module.spec.name!r} has no item to put in the place of a "
                "broken one",
                got=repr(settings.data.max_broken),
                fix="Leave it out, or have the plugin give `blank`.",
            )
    ordered = sorted(every, key=lambda module: not module.is_generator)
    return {
        module.modality: module.spec
        for module in ordered
        if isinstance(module.spec, EncoderSpec | GeneratorSpec) and (module.is_generator or module.feeds_language)
    }


def _no_plan(spec: ScheduleSpec, microbatches: int) -> Plan:
    """Return an empty plan, for a job whose costs are not known yet."""
    return Plan(schedule=spec.name, microbatches=microbatches, actors=())


def _plan(spec: ScheduleSpec, graph: ModuleGraph, microbatches: int, *, config: Any, costs: Costs) -> Plan:
    plan = spec.generate(graph, microbatches, config, costs)
    check(plan, graph)
    return plan

"""What settings resolve to: a `Job`, complete and proved, free of torch. Every rank holds the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data import (
    NEWEST_ORDER,
    Dataset,
    LayoutRules,
    MadeItem,
    PlacedItem,
    SampleLayout,
    SampleOrder,
    Tokenizer,
    WeightChange,
)
from mimo.hooks import DataError, ItemInfo
from mimo.model import EncoderSpec, Frozen, GeneratorSpec, LanguageModelSpec, Lora, ModuleSpec, Stage
from mimo.optimizer import LearningRate, OptimizerSpec, Pattern, Precision, Rule, Rules
from mimo.schedule import Plan
from mimo.topology import Edge, Grid, ModuleGraph, Recompute, StageId
from mimo.trainer.config.settings import LANGUAGE, Balance, Distil, OptimizerSettings, Settings
from mimo.trainer.config.structure import unstructure

NUMBER_BYTES: Mapping[Precision, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})
"""Of one element that layers compute with, and that travels between stages."""
ID_BYTES = 4
"""Of the id of a token that a teacher sends."""


@attrs.frozen(kw_only=True)
class OptimizerChoice:
    """One module's optimizer: the plugin, its own settings, and what all optimizers share, the module's merged in.

    Args:
        spec: the plugin.
        config: its settings.
        settings: what all optimizers share.
        learning_rate: of each step.
        clip_group: parameters of one group share one norm.
        patterns: what other parameters follow; the first that matches counts.
    """

    spec: OptimizerSpec
    config: Any
    settings: OptimizerSettings
    learning_rate: LearningRate
    clip_group: str = ""
    patterns: tuple[Pattern, ...] = ()

    @property
    def rules(self) -> Rules:
        """How each parameter is stepped."""
        base = Rule(spec=self.spec, config=self.config, learning_rate=self.learning_rate, clip_group=self.clip_group)
        return Rules(base=base, patterns=self.patterns)


@attrs.frozen(kw_only=True)
class PartShare:
    """How much of a part of a stage is trained.

    Args:
        trained: fraction of the part's own elements that are trained.
        added: elements that LoRA adds.
        operands: elements of each row that the added products read.
    """

    trained: float
    added: int = 0
    operands: int = 0


@attrs.frozen(kw_only=True)
class JobModule:
    """One module of the model.

    Args:
        name: as in ``[modules.<name>]``.
        spec: the plugin's.
        config: the plugin's settings.
        grid: its ranks.
        chunks: stages on each rank.
        sequence_parallel: whether rows are split over the tensor ranks between layers.
        batch_factor: microbatches that one pass serves.
        prefetch: whether its next step is encoded during this one.
        recompute: what its backward computes again.
        loss_rows: of how many rows the language model's loss holds logits at a time, 0 for all.
        round_rows: of how many rows the language model's tensors have a multiple, padded at the end.
        frozen: what is not trained, True for the whole module.
        lora: which of its linears are adapted, by parameters of their own that are trained whatever is frozen.
        modality: what an encoder reads, or a generator makes; empty for language models.
        feeds: the modules that take its rows: of an encoder one teacher, or any of the language model and generators;
            of a teacher the language model; of a generator none.
        is_of_teacher: whether it is a teacher, or feeds one: nothing of it is trained, nor drawn at random.
        distil: how it teaches, if it is a teacher.
        loss_weight: of the loss by labels, the divergence from a teacher, or a generator's own loss.
        optimizer: how it is stepped.
        divided: whether it is divided at its seam: the tower works ahead, the projector, its last stage, does not.
        trains: for each stage whether it holds anything that is trained; `mimo.trainer.resolving.resolve` finds out.
        shares: for each stage what of its parts is trained, where that does not follow from the parts' names.
    """

    name: str
    spec: ModuleSpec
    config: Any
    grid: Grid
    chunks: int
    sequence_parallel: bool
    batch_factor: int
    prefetch: bool
    recompute: Recompute
    loss_rows: int
    round_rows: int
    frozen: Frozen
    lora: Lora | None
    modality: str
    optimizer: OptimizerChoice
    feeds: tuple[str, ...] = (LANGUAGE,)
    is_of_teacher: bool = False
    distil: Distil | None = None
    loss_weight: float = 1.0
    divided: bool = False
    trains: tuple[bool, ...] = ()
    shares: tuple[Mapping[str, PartShare], ...] = ()

    @property
    def sends_ids(self) -> bool:
        """Whether it is a teacher that says which ids it finds likeliest."""
        return self.distil is not None and self.distil.top_k > 0

    @property
    def is_learned_from(self) -> bool:
        """Whether it adds anything to the loss of a step: a language model, a teacher or a generator."""
        by_hidden = self.distil is not None and self.distil.compares_hidden and self.distil.hidden_weight > 0
        return by_hidden or (self.loss_weight > 0 and (self.distil is None or self.sends_ids))

    @property
    def feeds_language(self) -> bool:
        """Whether the language model takes its rows."""
        return LANGUAGE in self.feeds

    @property
    def is_generator(self) -> bool:
        """Whether it makes items from rows of the language model."""
        return isinstance(self.spec, GeneratorSpec)

    @property
    def made_item(self) -> MadeItem:
        """How a sample holds an item that this generator is to make."""
        assert isinstance(self.spec, GeneratorSpec), self.name
        return MadeItem(rows=self.spec.rows(self.config), reads_own=self.spec.reads(self.config) == "own")

    @property
    def slices(self) -> int:
        """Into how many slices tensor ranks cut the rows of a context rank between layers."""
        return self.grid.tp if self.sequence_parallel else 1


@attrs.frozen(kw_only=True)
class Job:
    """Everything that a process needs to know to start.

    Args:
        settings: as written, with defaults.
        modules: in the order of the file.
        model_graph: the modules' grids, edges, and what trains, as the model is built.
        graph: the same as plans are made for it, where an encoder with a seam may be two: see `ModuleGraph.divided`.
        plans: of a step, one for each number of microbatches that one may have, ascending.
        evaluation_graph, evaluation_microbatches, evaluation_plan: the same of an evaluation, where nothing trains.
        tokenizer: with a placeholder for each modality.
        train: samples to train on; None where no data is asked for.
        evaluation: held-out samples, if the data has any.
        world: number of processes.
        balance: how samples of training are placed.
    """

    settings: Settings
    modules: tuple[JobModule, ...]
    model_graph: ModuleGraph
    graph: ModuleGraph
    plans: tuple[Plan, ...]
    evaluation_graph: ModuleGraph
    evaluation_microbatches: int
    evaluation_plan: Plan
    tokenizer: Tokenizer
    train: Dataset | None
    evaluation: Dataset | None
    world: int
    plain: Mapping[str, Any]
    """The resolved settings as plain data, those that plugins add included; reads back as a file does."""
    balance: Balance = "count"

    def balanced(self, balance: Balance) -> Job:
        """Return the job with its samples placed so."""
        plain = {**self.plain, "data": {**self.plain["data"], "balance": balance}}
        return attrs.evolve(self, balance=balance, plain=plain)

    @property
    def plan(self) -> Plan:
        """The plan of a step; where steps have several numbers of microbatches, of one with the fewest."""
        return self.plans[0]

    @property
    def microbatches(self) -> int:
        """Microbatches of a step, likewise."""
        return self.plan.microbatches

    def plan_of(self, microbatches: int) -> Plan:
        """Return the plan of a step of so many microbatches."""
        return next(plan for plan in self.plans if plan.microbatches == microbatches)

    @property
    def evaluation_batch(self) -> int:
        """Samples of one evaluation batch."""
        return self.settings.evaluation_batch(self.language.grid.dp)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.settings.directory)

    def module(self, name: str) -> JobModule:
        """Return the module of this name; of one that is divided, the names of both its parts in ``graph`` are."""
        name = self.graph.by_name[name].projector_of or name
        return next(module for module in self.modules if module.name == name)

    def built(self, stage: StageId) -> StageId:
        """Return which stage of the model a stage of the plans is."""
        owner = self.graph.by_name[stage.module].projector_of
        return StageId(owner, self.model_graph.by_name[owner].stages - 1) if owner else stage

    def stage(self, built: StageId) -> Stage:
        """Return a stage of the model as plugins know it."""
        module = self.model_graph.by_name[built.module]
        return Stage(built.stage, module.stages, module.seam)

    def stages_of(self, module: str) -> tuple[StageId, ...]:
        """Return the stages of a module as plans name them."""
        return tuple(stage for stage in self.graph.stages if self.built(stage).module == module)

    def is_inside(self, edge: Edge) -> bool:
        """Tell whether both ends of an edge are stages of one module."""
        return self.built(edge.source).module == self.built(edge.target).module

    @property
    def language(self) -> JobModule:
        """The language model."""
        return self.module(LANGUAGE)

    @property
    def beside(self) -> tuple[JobModule, ...]:
        """The modules beside the language model: encoders, teachers and generators."""
        return tuple(module for module in self.modules if module.name != LANGUAGE)

    @property
    def item_modules(self) -> tuple[JobModule, ...]:
        """The modules that are given items: to read, or to learn to make."""
        return tuple(module for module in self.modules if isinstance(module.spec, EncoderSpec | GeneratorSpec))

    @property
    def generators(self) -> tuple[JobModule, ...]:
        """The modules that make items."""
        return tuple(module for module in self.modules if module.is_generator)

    @property
    def encoders(self) -> tuple[JobModule, ...]:
        """The modules that read items."""
        return tuple(module for module in self.modules if isinstance(module.spec, EncoderSpec))

    def encoders_of(self, taker: JobModule) -> tuple[JobModule, ...]:
        """Return the encoders that feed a language model, or a generator."""
        return tuple(module for module in self.encoders if taker.name in module.feeds)

    def feeders_of(self, generator: JobModule) -> tuple[JobModule, ...]:
        """Return what feeds a generator, in the order in which an item's rows lie: its encoders, the language model."""
        return (*self.encoders_of(generator), self.language)

    def generators_of(self, encoder: JobModule) -> tuple[JobModule, ...]:
        """Return the generators that an encoder feeds."""
        return tuple(module for module in self.generators if module.name in encoder.feeds)

    @property
    def taught_modalities(self) -> frozenset[str]:
        """What teachers read beside text, each of them all of it."""
        found = [module.modality for teacher in self.teachers for module in self.encoders_of(teacher)]
        return frozenset(found)

    @cached_property
    def teachers(self) -> tuple[JobModule, ...]:
        """The frozen language models that the language model learns from."""
        return tuple(module for module in self.modules if module.distil is not None)

    def row_width(self, module: JobModule) -> int:
        """Return the width of the rows that a module takes from another one, or that an encoder delivers."""
        takers = [self.module(name) for name in module.feeds] if isinstance(module.spec, EncoderSpec) else [module]
        for taker in takers:
            if isinstance(taker.spec, LanguageModelSpec):
                return taker.spec.row_width(taker.config)
        return self._hidden(self.language)

    def _hidden(self, language: JobModule) -> int:
        """Return the width of the rows that a head reads."""
        assert isinstance(language.spec, LanguageModelSpec), language.name
        return language.spec.hidden(language.config)

    @property
    def learns_from_labels(self) -> bool:
        """Whether a step with labels has something to learn from: their loss, a teacher, labels further on, routers."""
        spec = self.language.spec
        assert isinstance(spec, LanguageModelSpec), spec
        routes = spec.experts is not None and spec.experts.count(self.language.config) > 0
        learned_from = any(module.is_learned_from for module in (self.language, *self.teachers))
        return learned_from or routes or self.next_tokens > 0

    @property
    def next_tokens(self) -> int:
        """How many labels beyond its own each row of the language model is trained on."""
        spec = self.language.spec
        assert isinstance(spec, LanguageModelSpec), spec
        return spec.next_tokens(self.language.config)

    @property
    def reads_items(self) -> bool:
        """Whether the language model reads which rows are one item's."""
        spec = self.language.spec
        assert isinstance(spec, LanguageModelSpec), spec
        return spec.reads_items(self.language.config)

    def teaches(self, edge: Edge) -> bool:
        """Tell whether the rows of an edge are what a teacher says: bytes, and not numbers to compute with."""
        return not self.is_inside(edge) and self.module(edge.source.module).distil is not None

    def sends_some(self, edge: Edge) -> bool:
        """Tell whether an encoder sends but some of its rows on an edge: to a generator, and all to another module."""
        source, target = (self.module(end.module) for end in (edge.source, edge.target))
        return target.is_generator and isinstance(source.spec, EncoderSpec) and len(source.feeds) > 1

    def row_bytes(self, edge: Edge) -> int:
        """Return the bytes of a row that travels on an edge."""
        number = NUMBER_BYTES[self.settings.run.precision]
        source = self.module(edge.source.module)
        if source.distil is not None and self.teaches(edge):
            hidden = self._hidden(source) if source.distil.compares_hidden else 0
            return source.distil.top_k * (ID_BYTES + number) + hidden * number
        return self.width(edge) * number

    def width(self, edge: Edge) -> int:
        """Return the columns of the rows that travel on an edge: numbers, or a teacher's bytes."""
        source = self.module(edge.source.module)
        if self.teaches(edge):
            return self.row_bytes(edge)
        if not self.is_inside(edge):
            return self.row_width(self.carried_by(edge))
        if isinstance(source.spec, LanguageModelSpec):
            return source.spec.message_width(source.config, self.stage(self.built(edge.source)))
        across = source.spec.seam if edge.is_boundary else source.spec.stages
        assert across is not None
        return across.width(source.config)

    def carried_by(self, edge: Edge) -> JobModule:
        """Return the module for which rows travel between modules: one that feeds another, or what language feeds."""
        source = self.module(edge.source.module)
        return self.module(edge.target.module) if source.name == LANGUAGE else source

    def message_rows(self, edge: Edge, size: tuple[int, ...], made_from: int = 0) -> int:
        """Return the rows that one item of this size sends on an edge inside an encoder, or inside a generator.

        Args:
            edge: which.
            size: of the item.
            made_from: from how many rows a generator makes it.
        """
        source = self.module(edge.source.module)
        spec, config = source.spec, source.config
        if isinstance(spec, GeneratorSpec):
            assert spec.stages is not None
            return spec.stages.message_rows(config, size, made_from)
        assert isinstance(spec, EncoderSpec), source.name
        if edge.is_boundary:
            assert spec.seam is not None
            return spec.seam.rows(config, size)
        assert spec.stages is not None
        return spec.stages.message_rows(config, size)

    def sample_order(self, *, version: int = 0, changes: Sequence[WeightChange] = ()) -> SampleOrder:
        """Return the order in which a run reads the samples to train on, of a new run unless the arguments say more.

        Args:
            version: of the order; 0: what settings say.
            changes: weights of a mixture that hold instead of those of the settings.
        """
        assert self.train is not None, "this job was resolved without training data"
        run = self.settings.run
        return SampleOrder.of(
            self.train,
            global_batch=run.global_batch,
            seed=run.seed,
            version=version or self.settings.data.order or NEWEST_ORDER,
            changes=changes,
        )

    def lay_out(self, dataset: Dataset, sample: int) -> SampleLayout:
        """Return where every token and item of a sample lies; see `lay_out_all`."""
        return self.lay_out_all(dataset, [sample])[0]

    def lay_out_all(self, dataset: Dataset, samples: Sequence[int]) -> list[SampleLayout]:
        """Return where every token and item of samples lies; see `mimo.data.LayoutRules`.

        Raises:
            DataError: one can't be laid out, or is longer than settings allow.
        """
        found = self._rules.lay_out_all(dataset, samples, max_tokens=self.settings.data.max_tokens)
        if self.settings.data.longer == "refuse":
            self._refuse_longer(dataset, found)
        for encoder in self.encoders if self.teachers else ():
            for layout in found if encoder.is_of_teacher else ():
                self._check_rows(encoder, layout, dataset.where(layout.sample))
        return found

    def _refuse_longer(self, dataset: Dataset, layouts: Sequence[SampleLayout]) -> None:
        longer = next((layout for layout in layouts if layout.truncated), None)
        if longer is not None:
            raise DataError(
                dataset.where(longer.sample),
                expected=f"at most data.max_tokens = {self.settings.data.max_tokens} tokens, those of items included",
                got="more",
                fix='Shorten it, or set data.max_tokens higher, or data.longer = "cut".',
            )

    def place_item(self, info: ItemInfo, *, at: int) -> tuple[NDArray[np.int64], PlacedItem]:
        """Return the ids that stand for an item of a sequence that is written, and where it lies from a position on."""
        return self._rules.place(lambda: "what was written", info, at=at)

    @cached_property
    def _rules(self) -> LayoutRules:
        specs = [
            (each.modality, each.spec, each.config)
            for each in self.encoders_of(self.language)
            if isinstance(each.spec, EncoderSpec)
        ]
        return LayoutRules(
            tokenizer=self.tokenizer,
            rows={modality: _by_size(spec.rows, config) for modality, spec, config in specs},
            grids={modality: _by_size(spec.grid, config) for modality, spec, config in specs if spec.grid is not None},
            patterns={
                modality: _by_size(spec.pattern, config) for modality, spec, config in specs if spec.pattern is not None
            },
            made={module.modality: module.made_item for module in self.generators},
        )

    def _check_rows(self, encoder: JobModule, layout: SampleLayout, where: str) -> None:
        """Refuse an encoder of a teacher that makes other rows of an item than the one whose places these take.

        Raises:
            DataError: naming the item.
        """
        assert isinstance(encoder.spec, EncoderSpec), encoder.name
        for item in layout.items_of(encoder.modality):
            rows = encoder.spec.rows(encoder.config, item.info.size)
            grid = None if encoder.spec.grid is None else encoder.spec.grid(encoder.config, item.info.size)
            if rows != item.rows or grid != item.grid:
                raise DataError(
                    f"{where}: {encoder.modality} {item.info.index}",
                    expected=f"the {item.rows} rows of the student's encoder from modules.{encoder.name} too, which "
                    "feeds a teacher, in the same grid: both models read them at the same placeholders",
                    got=f"{rows}",
                    fix="Give both the same sizes of patches and images.",
                )

    def edge_ranks(self, edge: Edge) -> tuple[int, ...]:
        """Return the ranks at either end of an edge, ascending."""
        ends = (self.graph.stage_ranks(stage) for stage in (edge.source, edge.target))
        return tuple(sorted({rank for ranks in ends for rank in ranks}))


def _by_size(function: Callable[..., Any], config: Any) -> Callable[[tuple[int, ...]], Any]:
    """Return a function of an encoder as one of an item's size, called once for each of the last thousands."""
    return lru_cache(1 << 12)(partial(function, config))


def plain_settings(settings: Settings, modules: Sequence[JobModule], tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings as plain data with the defaults of plugins filled in.

    Args:
        settings: as written.
        modules: their plugin configs, as the user wrote them, replace the ``config`` tables.
        tables: configs of the plugins whose keys stand in a section of their own, by section.
    """
    plain = dict(unstructure(settings))
    for section, config in tables.items():
        plain[section] = {**plain[section], **unstructure(config)}
    plain["modules"] = {
        module.name: {**plain["modules"][module.name], "config": unstructure(module.config)} for module in modules
    }
    return plain

"""From settings to a job: what follows from what, and everything that is refused before launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import pytest

from mimo.data import DATASETS, TOKENIZERS, DatasetSpec, Tokenizer, TokenizerSpec
from mimo.hooks import ConfigError, Kind
from mimo.model import ENCODERS, EncoderSpec, EncoderStages, Stage, TensorSupport
from mimo.schedule import SCHEDULES
from mimo.topology import StageId
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.toml import make_settings
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import Purpose, resolve

S = TypeVar("S")


@attrs.frozen(kw_only=True)
class EyeConfig:
    heads: int = attrs.field(default=6, validator=attrs.validators.gt(0))
    layers: int = 2


def _parts(_config: EyeConfig, stage: Stage) -> frozenset[str]:
    return frozenset({"trunk", "projector"}) if stage.is_last else frozenset({"trunk"})


def eye(name: str, **optional: Any) -> EncoderSpec:
    """Return an encoder that nobody can build."""

    def unused(*_arguments: Any) -> Any:
        raise AssertionError(_arguments)

    return EncoderSpec(
        name=name, config=EyeConfig, measure=unused, rows=unused, prepare=unused, build=unused, **optional
    )


SPECS = {
    "plain": eye("plain"),
    "eye": eye(
        "eye",
        parts={"trunk": ("trunk",), "projector": ("projector",)},
        tensor=TensorSupport(divisible=lambda config: {"heads": config.heads}, plan=lambda _module, _axis: {}),
        stages=EncoderStages(
            layers=lambda config: config.layers,
            message_rows=lambda _config, _size: 1,
            width=lambda _config: 8,
            cut=lambda module, _stage: module,
            parts=_parts,
        ),
        recompute={"full": lambda _module: ()},
    ),
}


@attrs.frozen(kw_only=True)
class NoConfig:
    pass


def _deaf(_config: NoConfig, _modalities: Sequence[str]) -> Tokenizer:
    return find_installed(TOKENIZERS, "byte", "").build(find_installed(TOKENIZERS, "byte", "").config(), ["sound"])


def find(kind: Kind[S], name: str, where: str) -> S:
    """Find the stubs above, and otherwise what is installed."""
    found: Any = SPECS.get(name) if kind.group == ENCODERS.group else None
    if kind.group == TOKENIZERS.group and name == "deaf":
        found = TokenizerSpec(name="deaf", config=NoConfig, build=_deaf)
    if kind.group == SCHEDULES.group and name == "turning":
        found = attrs.evolve(find_installed(SCHEDULES, "1f1b", ""), name=name, placement=lambda _config: "v")
    return found or find_installed(kind, name, where)


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """Settings of a small model on disjoint ranks."""
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"text": "hello"}\n' * 8)
    return {
        "run": {"name": "r", "steps": 10, "global_batch": 8, "micro_batch": 2},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "tokenizer": {"plugin": "byte"},
        "modules": {
            "vision": {"plugin": "eye", "ranks": "0-1"},
            "language": {"plugin": "decoder", "ranks": "2-3", "tp": 2, "config": {"hidden": 32, "heads": 4}},
        },
    }


def resolved(table: dict[str, Any], *overrides: str, purpose: Purpose = "train") -> Job:
    """Return the job of a table with overrides."""
    return resolve(make_settings(table, overrides), purpose=purpose, find=find)


def test_lanes_world_batches_and_vocabulary_follow(table: dict[str, Any]) -> None:
    """What is left out is worked out."""
    job = resolved(table, "run.evaluation_batch=4")
    assert [(module.name, module.grid.shape) for module in job.modules] == [
        ("vision", (1, 2, 1, 1)),
        ("language", (1, 1, 1, 2)),
    ]
    assert (job.world, job.microbatches, job.evaluation_microbatches, job.row_width(job.language)) == (4, 4, 2, 32)
    assert job.language.config.vocabulary == job.tokenizer.vocabulary
    assert job.module("vision").modality == "image"
    assert job.train is not None
    assert len(job.train) == 8
    assert job.evaluation is None
    assert [edge.name for edge in job.graph.edges if edge.gradient] == ["vision->language"]
    assert {action.kind for actor in job.evaluation_plan.actors for action in actor.actions} == {
        "forward",
        "send",
        "receive",
    }


def test_the_loss_holds_as_many_rows_of_logits_as_are_set_or_take_a_gibibyte(table: dict[str, Any]) -> None:
    """Of this rank's share of the vocabulary."""
    wide = ("modules.language.config.vocabulary=152064",)
    assert resolved(table, *wide).language.loss_rows == 2**30 // (4 * 76032)
    assert resolved(table, *wide, "modules.language.loss_rows=100").language.loss_rows == 100
    assert resolved(table, *wide, "modules.language.loss_rows=0").language.loss_rows == 2**30 // (4 * 76032)


def test_a_gap_in_the_ranks_counts_for_the_world(table: dict[str, Any]) -> None:
    """Ranks without a module are there and idle."""
    assert resolved(table, "modules.language.ranks=5-6").world == 7
    assert resolved(table, "run.world=9").world == 9


def test_the_resolved_settings_read_back_as_the_same_job(table: dict[str, Any]) -> None:
    """Defaults of plugins are filled in; what follows from other settings still does."""
    job = resolved(table, "optimizer.weight_decay=0.5", "modules.vision.optimizer.lr=0.1")
    assert job.plain["optimizer"]["betas"] == [0.9, 0.95]
    assert job.plain["modules"]["language"]["config"]["vocabulary"] == 0
    again = resolve(make_settings(job.plain), find=find)
    assert [attrs.evolve(module, optimizer=job.modules[0].optimizer) for module in again.modules] == [
        attrs.evolve(module, optimizer=job.modules[0].optimizer) for module in job.modules
    ]
    assert again.plain == job.plain


def test_a_modules_optimizer_is_merged_over_the_global_one(table: dict[str, Any]) -> None:
    """Key by key, the plugin's own keys included."""
    job = resolved(
        table,
        "optimizer.lr=0.5",
        "optimizer.lr_schedule=cosine",
        "optimizer.weight_decay=0.25",
        "optimizer.eps=1e-6",
        "modules.vision.optimizer={lr = 0.125, weight_decay = 0}",
    )
    vision, language = (job.module(name).optimizer for name in ("vision", "language"))
    assert (vision.config.weight_decay, vision.config.eps) == (0.0, 1e-6)
    assert (language.config.weight_decay, language.config.eps) == (0.25, 1e-6)
    assert (vision.learning_rate.lr, language.learning_rate.lr) == (0.125, 0.5)
    assert vision.learning_rate.lr_decay_steps == 10


def test_what_is_encoded_ahead_is_so_in_training_alone(table: dict[str, Any]) -> None:
    """The plan of a step encodes the next one's microbatches; that of an evaluation its own."""
    job = resolved(table, "modules.vision.frozen=true", "modules.vision.prefetch=true")
    for plan, graph, is_ahead in (
        (job.plan, job.graph, True),
        (job.evaluation_plan, job.evaluation_graph, False),
    ):
        assert graph.by_name["vision"].prefetch == is_ahead
        encoded = {
            microbatch >= plan.microbatches
            for actor in plan.actors
            for action in actor.actions
            if (action.kind, action.module) == ("forward", "vision")
            for microbatch in action.microbatches
        }
        assert encoded == {is_ahead}


def test_chunks_passes_and_recomputation_come_into_the_graph(table: dict[str, Any]) -> None:
    """A module has as many stages as ranks hold together, laid out as the schedule says."""
    overrides = (
        *("modules.language.tp=1", "modules.language.pp=2", "modules.language.chunks=2"),
        *("modules.language.config.layers=4", "modules.language.recompute=full", "modules.language.config.tied=true"),
        *("modules.vision.pp=2", "modules.vision.batch_factor=3", 'modules.vision.frozen=["trunk"]'),
    )
    graph = resolved(table, *overrides).graph
    vision, language = (graph.by_name[name] for name in ("vision", "language"))
    assert (vision.batch_factor, vision.recompute, vision.stages) == (3, "none", 2)
    assert (language.batch_factor, language.recompute, language.chunks) == (1, "full", 2)
    assert (language.trains, language.placement, language.tied_stages) == ((True,) * 4, "loop", (0, 3))
    job = resolved(table, *overrides, "schedule.plugin=turning")
    assert (job.graph.by_name["language"].placement, job.graph.by_name["language"].tied_stages) == ("v", ())
    assert job.evaluation_graph.by_name["language"].placement == "v"
    ranks = {edge.name: job.edge_ranks(edge) for edge in job.graph.edges}
    assert ranks == {
        "vision.0-1": (0, 1),
        "vision->language": (1, 2),
        "language.0-1": (2, 3),
        "language.1-2": (3,),
        "language.2-3": (2, 3),
    }


def test_a_frozen_part_decides_which_stages_train_and_which_edges_carry_gradient(table: dict[str, Any]) -> None:
    """The trunk's first stage holds nothing that trains; the projector is on the last."""
    job = resolved(table, 'modules.vision.frozen=["trunk"]', "modules.vision.pp=2")
    assert job.graph.by_name["vision"].trains == (False, True)
    assert not job.graph.runs_backward(StageId("vision", 0))
    everything = resolved(table, "modules.vision.frozen=true")
    assert everything.graph.by_name["vision"].trains == (False,)
    assert resolved(table, "modules.vision.plugin=plain").graph.by_name["vision"].trains == (True,)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["modules.vision.plugin=eyes"], "modules.vision.plugin: expected an installed encoder"),
        (["optimizer.plugin=adam"], r"optimizer.plugin: expected an installed optimizer .*, got 'adam'. Did you mean"),
        (["schedule.plugin=pipes"], "schedule.plugin: expected an installed schedule"),
        (["data.plugin=json"], "data.plugin: expected an installed dataset"),
        (["tokenizer.plugin=bite"], "tokenizer.plugin: expected an installed tokenizer"),
        (["data.paht=x"], r"data.paht: expected a known key, got an unknown one. Did you mean 'path'\?"),
        (["data.max_token=3"], r"data.max_token: expected a known key, .* Did you mean 'max_tokens'\?"),
        (["optimizer.clipp=1"], r"optimizer.clipp: expected a known key, .* Did you mean 'clip'\?"),
        (["schedule.warm=1"], r"schedule.warm: expected a known key, .* Known here: plugin."),
        (["optimizer.betas=[0.9, 1.5]"], "optimizer.betas: expected two numbers from 0 to below 1"),
        (
            ["modules.vision.optimizer.betas=[0.9, 1.5]"],
            "modules.vision.optimizer.betas: expected two numbers from 0 to below 1",
        ),
        (["modules.vision.optimizer.clip=1"], "modules.vision.optimizer.clip: expected a key that a module can have"),
        (["optimizer.lr_min=1", "optimizer.lr_schedule=linear"], "optimizer.lr_min: expected at most lr = 0.001"),
        (["optimizer.clip=inf"], "optimizer.clip: expected a finite number of 0 or more, got inf"),
        (["optimizer.clip=nan"], "optimizer.clip: expected a number, got nan"),
        (["optimizer.eps=0"], "optimizer.eps: expected a finite number above 0, got 0.0"),
        (["modules.vision.config.layers=x"], "modules.vision.config.layers: expected a whole number, got 'x'"),
        (["modules.vision.config.heads=0"], "modules.vision.config.heads: expected a valid value"),
        (["modules.language.config.heads=5"], "modules.language.config.hidden: expected a multiple of heads = 5"),
        (["modules.vision.ranks="], "modules.vision.ranks: expected at least one rank, got none"),
        (["modules.vision.ranks=[1, 0]"], "modules.vision.ranks: expected distinct ranks from 0 in ascending order"),
        (["modules.vision.tp=0"], "modules.vision.tp: expected a size of 1 or more, got 0"),
        (["modules.vision.dp=3"], "modules.vision: expected sizes that multiply to its 2 ranks, got pp 1 x dp 3"),
        (
            ["modules.language.ranks=2-4"],
            "modules.language: expected sizes that multiply to its 3 ranks, got .* tp 2 = 2",
        ),
        (
            ["modules.vision.ranks=0-3", "modules.vision.tp=4"],
            r"modules.vision.tp: expected a divisor of heads = 6, got 4",
        ),
        (
            ["modules.vision.plugin=plain", "modules.vision.tp=2"],
            "modules.vision.tp: expected 1, since encoder 'plain'",
        ),
        (
            ["modules.vision.plugin=plain", "modules.vision.cp=2"],
            "modules.vision.cp: expected 1, since encoder 'plain' has no context parallelism, got 2",
        ),
        (["modules.vision.ep=2"], "modules.vision.ep: expected 1, since encoder 'eye' has no experts, got 2"),
        (["modules.language.etp=2"], "modules.language.etp: expected 1, since language model 'decoder' has no experts"),
        (
            ["modules.language.ep=4"],
            r"modules.language: expected ep x etp that divides the 2 ranks of a stage .*, got ep 4 x etp 1 = 4",
        ),
        (
            ["modules.language.ep=2", "modules.language.config.experts=5"],
            r"modules.language.ep: expected a divisor of experts = 5, got 2. Set it to 1 or 5\.",
        ),
        (["modules.language.ep=0"], "modules.language.ep: expected a size of 1 or more, got 0"),
        (
            ["modules.language.cp=3"],
            "modules.language: expected sizes that multiply to its 2 ranks, got pp 1 x dp 1 x cp 3",
        ),
        (
            ["modules.vision.plugin=plain", "modules.vision.pp=2"],
            "modules.vision.pp: expected 1, since encoder 'plain'",
        ),
        (
            ["modules.vision.pp=2", "modules.vision.config.layers=1"],
            "modules.vision.pp: expected at most its layers = 1",
        ),
        (
            ["modules.language.tp=1", "modules.language.pp=2", "modules.language.config.layers=1"],
            "modules.language.pp: ex",
        ),
        (["modules.vision.chunks=0"], "modules.vision.chunks: expected 1 or more, got 0"),
        (["modules.vision.chunks=2"], r"modules.vision.chunks: expected 1, since one pipeline rank .* got 2"),
        (
            ["modules.vision.pp=2", "modules.vision.chunks=2"],
            "modules.vision.chunks: expected .* pp x chunks = 2 x 2 divides its layers = 2, got 2. Set it to 1, or ",
        ),
        (["modules.vision.batch_factor=0"], "modules.vision.batch_factor: expected 1 or more, got 0"),
        (
            ["modules.language.batch_factor=2"],
            (
                "modules.language.batch_factor: expected 1, as only passes of encoders and generators serve several "
                "microbatches, got 2"
            ),
        ),
        (
            ["modules.language.prefetch=true"],
            "modules.language.prefetch: expected false, unless all of the language model is frozen and feeds a",
        ),
        (
            ['modules.vision.frozen=["trunk"]', "modules.vision.prefetch=true"],
            "modules.vision.prefetch: expected a module of which nothing is trained, since encoder 'eye' has no seam",
        ),
        (["modules.language.recompute=all"], "modules.language.recompute: expected one of 'none', 'selective', 'full'"),
        (
            ["modules.vision.recompute=selective"],
            "modules.vision.recompute: expected none or full, since encoder 'eye' has no such recomputation, got",
        ),
        (
            ["modules.vision.plugin=plain", "modules.vision.recompute=full"],
            "modules.vision.recompute: expected none, since encoder 'plain' has no recomputation, got 'full'. Leave",
        ),
        (
            ["modules.vision.frozen=true", "modules.vision.recompute=full"],
            "modules.vision.recompute: expected none, as nothing in it is trained, nor anything that feeds it: there",
        ),
        (
            ["modules.vision.frozen=true", "modules.language.frozen=true"],
            "modules: expected at least one part that is tr",
        ),
        (
            ["modules.vision.sequence_parallel=true"],
            "modules.vision.sequence_parallel: expected false, since encoder 'eye' does not split its rows",
        ),
        (
            ["modules.vision.loss_rows=9"],
            "modules.vision.loss_rows: expected 0, since encoder 'eye' makes no loss of a few rows at a time, got 9. L",
        ),
        (
            ["modules.vision.round_rows=8"],
            "modules.vision.round_rows: expected 1, as an encoder makes the rows of its items and no others, got 8. S",
        ),
        (["modules.language.round_rows=0"], "modules.language.round_rows: expected 1 or more, got 0"),
        (["modules.language.loss_rows=-1"], "modules.language.loss_rows: expected 0 or more, got -1"),
        (
            ["modules.vision.modality=a b"],
            "modules.vision.modality: expected a name of letters, digits and underscores",
        ),
        (["modules.language.modality=text"], "modules.language.modality: expected nothing, as only encoders read one"),
        (
            ["modules.ears={plugin='plain', ranks='0'}"],
            "modules.ears.modality: expected a modality that no other module",
        ),
        (["modules.optimizer={plugin='plain', ranks='0'}"], "modules.optimizer: expected a name that is not taken"),
        (["modules.progress={plugin='plain', ranks='0'}"], "modules.progress: expected a name that is not taken"),
        (
            ["modules.x-y={plugin='plain', ranks='0'}"],
            "modules.x-y: expected a name of letters, digits and underscores",
        ),
        (
            ["modules.language.config.vocabulary=7"],
            "modules.language.config.vocabulary: expected at least the tokenizer's",
        ),
        (["tokenizer.plugin=deaf"], "tokenizer: expected a placeholder <image>"),
        (["run.world=3"], "run.world: expected 4 or more, as modules.language.ranks names rank 3, got 3"),
        (
            ["run.global_batch=9"],
            "run.global_batch: expected a multiple of run.micro_batch x language lanes = 2 x 1 = 2",
        ),
        (["run.evaluation_batch=3"], "run.evaluation_batch: expected a multiple of run.micro_batch x language lanes"),
        (["run.evaluation_interval=5"], "data: expected held-out samples to evaluate on, got none"),
        (["data.path=none.jsonl"], "data.path: expected an existing jsonl file, got 'none.jsonl'"),
    ],
)
def test_what_cannot_run_is_refused_before_launch(table: dict[str, Any], overrides: list[str], text: str) -> None:
    """Each by the path of the setting to change."""
    with pytest.raises(ConfigError, match=f"^{text}"):
        resolved(table, *overrides)


def test_a_model_without_a_language_model_is_refused(table: dict[str, Any]) -> None:
    """The missing table is named."""
    del table["modules"]["language"]
    with pytest.raises(
        ConfigError, match=r"^modules.language: expected a language model, .*, got only vision. Add a tab"
    ):
        resolved(table)


def test_generation_asks_for_no_data_and_evaluation_for_held_out_samples(table: dict[str, Any]) -> None:
    """Training files need not be there when a checkpoint is used."""
    assert resolved(table, "data.path=none.jsonl", purpose="generate").train is None
    text = r"^data: expected held-out samples to evaluate on, got none. Check the keys of \[data\]\.$"
    with pytest.raises(ConfigError, match=text):
        resolved(table, "data.path=none.jsonl", purpose="evaluate")
    held_out = f"data.evaluation_path={table['data']['path']}"
    job = resolved(table, "data.path=none.jsonl", held_out, "modules.vision.frozen=true", purpose="evaluate")
    assert job.evaluation is not None


def test_an_encoder_of_another_name_reads_its_own_modality(table: dict[str, Any]) -> None:
    """Two encoders are distinguished by their placeholders."""
    job = resolved(table, "modules.ears={plugin='plain', ranks='0-1', modality='sound'}")
    ids = {job.tokenizer.placeholder(module.modality) for module in job.encoders}
    assert len(ids) == 2
    assert job.graph.arrows == (("vision", "language"), ("ears", "language"))


@pytest.mark.parametrize(("encodes_samples", "whole"), [(False, True), (True, False)])
def test_only_a_dataset_that_encodes_sample_by_sample_is_spared_long_texts(
    table: dict[str, Any], encodes_samples: bool, whole: bool
) -> None:
    """One that packs a long text into many samples gets all of its ids."""
    text, lengths = "word " * 20_000, []

    def packed(_config: Any, tokenizer: Tokenizer, _split: str) -> Any:
        lengths.append(len(tokenizer.encode(text)))
        return range(8)

    spec = DatasetSpec(name="packed", config=NoConfig, open=packed, encodes_samples=encodes_samples)

    def finding(kind: Kind[S], name: str, where: str) -> S:
        return cast("S", spec) if kind.group == DATASETS.group else find(kind, name, where)

    settings = make_settings({**table, "data": {"plugin": "packed", "max_tokens": 64}})
    resolve(settings, find=finding)
    assert [length == len(text) for length in lengths] == [whole, whole]
    assert find_installed(DATASETS, "jsonl", "").encodes_samples

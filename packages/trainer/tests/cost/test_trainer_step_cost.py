"""What a step costs: by formula from the shapes of models and samples, or as a profile says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from mimo.hooks import ConfigError
from mimo.model import DECODER, LANGUAGE_MODELS
from mimo.optimizer import OPTIMIZERS
from mimo.schedule import SCHEDULES, Costs, Link, Seconds
from mimo.topology import StageId
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.structure import unstructure
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.profile import (
    VERSION,
    EdgeTimes,
    LinearTime,
    PassTimes,
    Profile,
    StageTimes,
    digest,
    layout_of,
    machine,
)
from mimo.trainer.cost.step_cost import ACCELERATOR, PROCESSOR, formula_costs, job_costs
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve
from mimo.trainer.run.profiling import fit, sizes, split_backwards

FIRST, LAST = StageId("language", 0), StageId("language", 1)


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """Settings of a language model of two stages whose samples are of one length."""
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"text": "hello"}\n' * 8)
    return {
        "run": {"name": "r", "steps": 10, "global_batch": 8, "micro_batch": 2},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "tokenizer": {"plugin": "byte"},
        "modules": {
            "language": {
                "plugin": "decoder",
                "ranks": "0-1",
                "pp": 2,
                "config": {"hidden": 32, "layers": 4, "heads": 4, "intermediate": 48},
            },
        },
    }


@pytest.fixture
def job(table: dict[str, Any]) -> Callable[..., Job]:
    """Resolve the job of the table with overrides."""
    return lambda *overrides, **more: resolve(make_settings(table, overrides), **more)


def profile_of(job: Job, **changes: Any) -> Profile:
    """Return a profile of a job in which each stage's passes take as many seconds as its number says."""

    def times(stage: StageId) -> StageTimes:
        each = LinearTime(fixed=1.0 + stage.stage, sample=0.5)
        return StageTimes(
            module=stage.module,
            stage=stage.stage,
            forward=each,
            backward=LinearTime(fixed=4.0, sample=2.0),
            input_gradient=LinearTime(fixed=1.0, sample=0.5),
            weight_gradient=LinearTime(fixed=1.0, sample=0.5),
            reduce=0.25,
            activations=100,
            weight_inputs=60,
            passes=(PassTimes(samples=2, forward=2.0 + stage.stage),),
        )

    made = Profile(
        version=VERSION,
        machine=machine("cpu", "2"),
        settings=digest(job),
        micro_batch=job.settings.run.micro_batch,
        modules=layout_of(job),
        stages=tuple(times(stage) for stage in job.graph.stages),
        edges=tuple(EdgeTimes(name=edge.name, bytes=10, latency=0.125, bandwidth=80.0) for edge in job.graph.edges),
    )
    return attrs.evolve(made, **changes)


def test_the_last_stage_takes_the_head_besides(job: Callable[..., Job]) -> None:
    """Of equally many layers, the stage with the head is slower and keeps more; backward takes about twice as long."""
    costs = formula_costs(job())
    first, last = costs.stages[FIRST], costs.stages[LAST]
    assert last.forward.each > first.forward.each > 0
    assert last.activations > first.activations > first.weight_inputs > 0
    for stage in (first, last):
        backward = stage.seconds("backward", 1)
        assert backward == stage.seconds("input-gradient", 1) + stage.seconds("weight-gradient", 1)
        assert 2 * stage.forward.each <= backward < 2.2 * stage.forward.each


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (("run.micro_batch=4",), 2.0),
        (("modules.language.ranks=0-3", "modules.language.tp=2"), 0.5),
        (("modules.language.ranks=0-3", "modules.language.cp=2"), 0.5),
        (("modules.language.ranks=0-3", "modules.language.dp=2"), 1.0),
    ],
)
def test_work_follows_the_layout(job: Callable[..., Job], overrides: tuple[str, ...], share: float) -> None:
    """Seconds grow with the samples of a lane and shrink with the ranks that share it; more lanes change nothing."""
    alone, shared = (formula_costs(job(*more)).stages[FIRST] for more in ((), overrides))
    assert shared.forward.each == pytest.approx(share * alone.forward.each)


@pytest.mark.parametrize(("multiple", "share"), [(1, 1), (4, 1), (12, 1), (8, 4 / 3), (24, 2), (1200, 100)])
def test_padding_counts_like_other_rows(job: Callable[..., Job], multiple: int, share: float) -> None:
    """In time and memory; two samples have six tokens each."""
    alone, padded = (formula_costs(job(f"modules.language.round_rows={rows}")).stages[FIRST] for rows in (1, multiple))
    assert padded.forward.each == pytest.approx(share * alone.forward.each)
    assert padded.activations == pytest.approx(share * alone.activations, abs=1)


def test_only_what_trains_has_weight_gradients(job: Callable[..., Job]) -> None:
    """A stage without anything trained has no weight gradient, and if nothing before it trains no backward at all."""
    frozen = job_costs(job('modules.language.frozen=["embedding", "layers"]')).stages
    assert frozen[FIRST].seconds("backward", 1) == 0 == frozen[FIRST].reduce
    whole = job_costs(job()).stages
    assert 0 < frozen[LAST].weight_gradient.each < whole[LAST].weight_gradient.each
    assert frozen[LAST].activations < whole[LAST].activations


def test_lanes_pay_for_their_reduction(job: Callable[..., Job]) -> None:
    """Gradients that nobody else has are not sent."""
    assert formula_costs(job()).stages[FIRST].reduce == 0
    assert formula_costs(job("modules.language.ranks=0-3", "modules.language.dp=2")).stages[FIRST].reduce > 0


def test_messages_are_rows_times_width(job: Callable[..., Job]) -> None:
    """A microbatch of two samples sends all their tokens; nothing is sent within a rank."""
    two = job()
    assert two.train is not None
    tokens = 2 * len(two.train.tokens(0))
    assert formula_costs(two).message_bytes == {"language.0-1": 4 * 32 * tokens}
    turning = job("schedule.plugin=zero-bubble", "schedule.form=v", "modules.language.chunks=2")
    assert formula_costs(turning).message_bytes["language.1-2"] == 0


def test_a_processor_is_slower_than_an_accelerator(job: Callable[..., Job]) -> None:
    """The speed follows from run.device."""
    fast, slow = formula_costs(job()), formula_costs(job("run.device=cpu"))
    ratio = ACCELERATOR.operations / PROCESSOR.operations
    assert slow.stages[FIRST].forward.each == pytest.approx(ratio * fast.stages[FIRST].forward.each)
    assert slow.link == Link(PROCESSOR.latency, PROCESSOR.bandwidth)


def test_costs_without_flops_are_estimated_from_parameters(job: Callable[..., Job]) -> None:
    """Products with weights are found from shapes; attention is not, and tables take nothing."""

    def find(kind: Any, name: str, where: str) -> Any:
        if kind.group == LANGUAGE_MODELS.group:
            return attrs.evolve(DECODER, flops=None)
        return find_installed(kind, name, where)

    known, guessed = formula_costs(job()), formula_costs(job(find=find))
    assert guessed.stages[FIRST].forward.each == pytest.approx(known.stages[FIRST].forward.each, rel=0.15)
    assert guessed.stages[FIRST].forward.each < known.stages[FIRST].forward.each
    assert guessed.stages[FIRST].activations > 0


def test_unreadable_samples_are_left_to_the_step_that_needs_them(
    job: Callable[..., Job], table: dict[str, Any]
) -> None:
    """Where no sample can be read, one as long as can be stands for all."""
    Path(table["data"]["path"]).write_text('{"text": "<picture>"}\n' * 8)
    longest = formula_costs(job("data.max_tokens=64")).message_bytes["language.0-1"]
    assert longest <= 4 * 32 * 2 * 64


def test_a_schedule_that_does_not_weigh_gets_even_costs(job: Callable[..., Job]) -> None:
    """Only a schedule that looks at costs has samples read for it before the run."""
    seen: list[Costs] = []

    def finder(*, uses_costs: bool) -> Any:
        spec = find_installed(SCHEDULES, "1f1b", "")

        def generate(graph: Any, microbatches: int, config: Any, costs: Costs) -> Any:
            seen.append(costs)
            return spec.generate(graph, microbatches, config, costs)

        watched = attrs.evolve(spec, generate=generate, uses_costs=uses_costs)
        return lambda kind, name, where: watched if kind is SCHEDULES else find_installed(kind, name, where)

    job(find=finder(uses_costs=False))
    found = job(find=finder(uses_costs=True))
    assert seen[0] == Costs.even(found.graph)
    assert seen[2] == job_costs(found)
    assert seen[3] == job_costs(found).trained(found.evaluation_graph)


def test_a_profile_says_what_it_measured(job: Callable[..., Job], tmp_path: Path) -> None:
    """Seconds for each microbatch follow its samples; both parts of a backward take together what a whole one took."""
    path = tmp_path / "costs.json"
    path.write_text(profile_of(job()).to_json())
    costs = job_costs(job(f"schedule.profile={path}", "run.micro_batch=4"))
    first = costs.stages[FIRST]
    assert first.forward == Seconds(1.0, 2.0)
    assert (first.input_gradient.of(1), first.weight_gradient.of(1)) == pytest.approx((6.0, 6.0))
    assert (first.reduce, first.activations, first.weight_inputs) == (0.25, 400, 240)
    assert costs.message_bytes == {"language.0-1": 40}
    assert costs.transfer("language.0-1") == 0.125 + 40 / 80


def test_parts_of_a_split_backward_stand_as_measured(job: Callable[..., Job]) -> None:
    """Where no whole backward was measured, there is nothing to make the parts fit."""
    profile = profile_of(job())
    profile = attrs.evolve(profile, stages=tuple(attrs.evolve(times, backward=None) for times in profile.stages))
    assert profile.costs(2).stages[FIRST].input_gradient == Seconds(1.0, 1.0)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("modules.language.config.layers=6", r"modules\.language\.config\.layers is 6.*where it is 4"),
        ("modules.language.recompute=full", r'modules\.language\.recompute is "full".*where it is "none"'),
        ('modules.language.frozen=["embedding"]', r"modules\.language\.frozen is \[\"embedding\"\].*where it is \[\]"),
        ("modules.language.ranks=1-2", r'modules\.language\.ranks is "1-2".*where it is "0-1"'),
    ],
)
def test_a_profile_of_another_job_is_refused(
    job: Callable[..., Job], tmp_path: Path, override: str, match: str
) -> None:
    """What differs first is named, with both values."""
    path = tmp_path / "costs.json"
    path.write_text(profile_of(job()).to_json())
    with pytest.raises(ConfigError, match=rf"(?s)schedule\.profile.*{match}.*mimo profile"):
        job(f"schedule.profile={path}", override)


def test_a_profile_is_of_one_way_to_lay_parameters_out(job: Callable[..., Job], tmp_path: Path) -> None:
    """What passes and reductions take follows from it."""

    def find(kind: Any, name: str, where: str) -> Any:
        found = find_installed(kind, name, where)
        return attrs.evolve(found, lays=frozenset({"eps"})) if kind.group == OPTIMIZERS.group else found

    path = tmp_path / "costs.json"
    path.write_text(profile_of(job(find=find)).to_json())
    job(f"schedule.profile={path}", "optimizer.weight_decay=0.5", find=find)
    with pytest.raises(ConfigError, match=r"modules\.language\.optimizer\.eps is 0\.5, got .*where it is 1e-08"):
        job(f"schedule.profile={path}", "optimizer.eps=0.5", find=find)


def test_a_profile_without_all_stages_is_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    """Each stage has its costs."""
    path = tmp_path / "costs.json"
    profile = profile_of(job())
    path.write_text(attrs.evolve(profile, stages=profile.stages[:1]).to_json())
    with pytest.raises(ConfigError, match=r'stages is \["language.0", "language.1"\].*\["language.0"\]'):
        job(f"schedule.profile={path}")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", r"schedule\.profile: expected JSON"),
        ('{"version": NaN}', r"schedule\.profile: expected JSON, got .*: NaN is not JSON\."),
        ("[]", r"profile of version 1, got .* of version None"),
        ('{"version": 2}', r"profile of version 1, got .* of version 2"),
        ('{"version": 1}', r"schedule\.profile\.machine: expected a table"),
        ("[" * 100_000, r"schedule\.profile: expected JSON"),
    ],
)
def test_what_is_no_profile_is_refused(job: Callable[..., Job], tmp_path: Path, content: str, match: str) -> None:
    """The message says what was expected of the file."""
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=match):
        job(f"schedule.profile={path}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((("stages", 1, "reduce"), value) for value in ("-1.0", '"1"', "1e308", "1" + 400 * "0")),
        (("stages", 0, "activations"), "1e308"),
        (("edges", 0, "bandwidth"), "0"),
        (("edges", 0, "bandwidth"), "-5.0"),
    ],
)
def test_a_profile_holds_numbers_that_can_be(
    job: Callable[..., Job], tmp_path: Path, key: tuple[str, int, str], value: str
) -> None:
    """A number that no time, size or speed can be is refused by its path."""
    path = tmp_path / "costs.json"
    table, index, field = key
    content = json.loads(profile_of(job()).to_json())
    content[table][index][field] = "HERE"
    path.write_text(json.dumps(content).replace('"HERE"', value))
    with pytest.raises(ConfigError, match=rf"schedule\.profile\.{table}\[{index}\]\.{field}: expected a"):
        job(f"schedule.profile={path}")


def test_a_profile_that_is_not_there_or_too_large_is_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    """It is said what is wrong with the file."""
    with pytest.raises(ConfigError, match=r"schedule\.profile: expected a file that can be read.*No such file"):
        job(f"schedule.profile={tmp_path / 'none.json'}")
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (2**24 + 1))
    with pytest.raises(ConfigError, match="which is larger"):
        job(f"schedule.profile={large}")


def test_a_profile_is_read_as_it_was_written(job: Callable[..., Job]) -> None:
    """Nothing is lost on the way, what is None included."""
    profile = profile_of(job())
    assert json.loads(profile.to_json()) == json.loads(json.dumps(unstructure(profile)))


def test_the_line_goes_through_the_size_that_is_run() -> None:
    """Other sizes decide only its slope, and neither part of it is ever below zero."""
    assert fit({1: 3.0, 2: 4.0, 4: 6.0}, at=4) == LinearTime(fixed=2.0, sample=1.0)
    assert fit({1: 9.0, 4: 6.0}, at=4) == LinearTime(fixed=6.0, sample=0.0)
    assert fit({1: 0.5, 4: 6.0}, at=4) == LinearTime(fixed=0.0, sample=1.5)
    assert fit({4: 6.0}, at=4) == LinearTime(fixed=6.0, sample=0.0)


def test_sizes_double_up_to_the_configured_one(job: Callable[..., Job]) -> None:
    """Two sizes at least, so that there is a line."""
    assert sizes(job("run.micro_batch=8")) == (1, 2, 4, 8)
    assert sizes(job("run.micro_batch=1")) == (1, 2)
    assert sizes(job("run.micro_batch=3", "run.global_batch=9")) == (1, 2, 3)


def test_backwards_are_split_in_their_places(job: Callable[..., Job]) -> None:
    """Each whole backward becomes its two parts, and nothing else changes."""
    plan = job().plan
    split = split_backwards(plan)
    for before, after in zip(plan.actors, split.actors, strict=True):
        assert [action for action in after.actions if action.kind != "weight-gradient"] == [
            attrs.evolve(action, kind="input-gradient") if action.kind == "backward" else action
            for action in before.actions
        ]
    assert split_backwards(split) == split

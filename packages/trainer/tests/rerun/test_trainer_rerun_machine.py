"""What the rerun machine makes of the results of a step, and of those of the same step run again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
import torch
from eye import make_job, on, table
from torch import nn

from mimo.hooks import CheckpointError, Common, RestartNeededError, RunInfo, StepInfo
from mimo.launch import ProcessInfo
from mimo.launch.runtime import device_identity
from mimo.optimizer.runtime import ReducedStats, StepDecision
from mimo.topology import StageId
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.config.names import RERUN_FILE
from mimo.trainer.config.rerun_settings import InjectSettings, RerunSettings
from mimo.trainer.job.job import Job
from mimo.trainer.rerun.comparison import Order, Where, relative_difference
from mimo.trainer.rerun.driver import RerunDriver
from mimo.trainer.rerun.machine import RerunStateMachine
from mimo.trainer.rerun.pending import PendingStep, layout_of
from mimo.trainer.rerun.recorder import POWER, Bounds, Injector, NormRecorder
from mimo.trainer.step.probe import PASSES, Computation

CPU = torch.device("cpu")
ALONE = ProcessInfo(rank=0, world=1, local_rank=0)


def job_of(rerun: Mapping[str, Any], directory: Path | str = "unused", **run: Any) -> Job:
    """Return a job of two encoding ranks and two that read, with these settings."""
    modules = {"vision": on(0, 1), "language": on(2, 3, tp=2)}
    plugin = "spread" if "precision" in run else "adamw"
    return make_job(table(modules, run={"directory": str(directory), **run}, rerun=rerun, optimizer={"plugin": plugin}))


@pytest.mark.parametrize("data", [{"balance": "cost"}, {"hand_on": 1}, {"hand_on": 0, "balance": "cost"}])
def test_a_layout_counts_which_rank_has_which_samples_and_items(data: Mapping[str, Any]) -> None:
    """A step that waits for other devices is compared rank by rank, so that these settings must be as they were."""
    modules = {"vision": on(0, 1), "language": on(2, 3, tp=2)}
    settings = table(modules)
    settings["data"]["balance"] = "count"
    before = layout_of(make_job(settings))
    settings["data"]["workers"] = 2
    assert layout_of(make_job(settings)) == before
    settings["data"] |= data
    assert layout_of(make_job(settings)) != before


def test_a_step_that_waits_is_found_again_by_a_later_version() -> None:
    """What stands for the layout of a run by count, with the first default of `hand_on`, stays what it is."""
    settings = table({"vision": on(0, 1), "language": on(2, 3, tp=2)})
    settings["data"] |= {"balance": "count", "hand_on": 1 << 16}
    assert layout_of(make_job(settings)) == "2cb68be3bf705dd2"


def result(
    loss: float, norm: float | None = None, *, tokens: int = 1, learns: bool = True, passes: float = 0.0
) -> StepDecision:
    """Return what all ranks agreed on in a step of one label token; ``passes`` are rows of the language model."""
    norm = loss if norm is None else norm
    finite = math.isfinite(loss) and math.isfinite(norm)
    agreed = ReducedStats(
        loss=loss,
        label_weight=tokens,
        rows={},
        seconds={},
        counts={},
        zeros={},
        extra_sums={
            PASSES: torch.tensor([0.0, 0.0, passes**POWER, *[0.0] * 9], dtype=torch.float64)
        },  # two stages a module
        squares={("language", ""): norm * norm},
        digests_equal=True,
        stops=0,
    )
    return StepDecision(
        agreed=agreed,
        loss=loss,
        norm=norm if finite else math.nan,
        norms={"language": norm},
        group_norms={},
        learns=learns,
        skips=not learns or not finite,
    )


def machine_of(rerun: Mapping[str, Any], directory: Path | str = "unused", **run: Any) -> RerunStateMachine:
    """Return a machine that judges."""
    return RerunStateMachine(job_of({"mode": "validate", **rerun}, directory, **run), ALONE)


def test_what_is_not_finite_is_rejected() -> None:
    """A loss, or a gradient, without labels too; a step that is skipped anyway is not."""
    machine = machine_of({})
    assert machine.assess(result(1.0)) == ""
    assert machine.assess(result(math.nan)) == "a loss that is not finite"
    assert machine.assess(result(1.0, math.inf)) == "a gradient that is not finite"
    assert machine.assess(result(math.nan, tokens=0, learns=False)) == ""
    assert machine.assess(result(math.nan, tokens=0)) == "a loss that is not finite"


def test_an_overflow_of_fp16_is_not_judged_but_a_spike_is() -> None:
    """It is what the loss scale is for."""
    machine = machine_of({"spike_steps": 1}, precision="fp16")
    machine.accept(result(1.0))
    assert machine.assess(result(1.0, math.inf)) == ""
    assert machine.assess(result(11.0, 1.0)) == "a loss of 11, above 10, 10 times the largest of the last 1 steps"


def test_a_spike_is_one_over_the_largest_of_late() -> None:
    """Once as many steps have been as count; those that were skipped don't."""
    machine = machine_of({"spike_factor": 3, "spike_steps": 2})
    for loss, norm in ((2.0, 1.0), (math.nan, 1.0)):
        machine.accept(result(loss, norm))
    assert machine.assess(result(100.0)) == ""
    machine.accept(result(1.0, 1.0))
    assert machine.assess(result(6.0, 3.0)) == ""
    assert machine.assess(result(6.1, 1.0)) == "a loss of 6.1, above 6, 3 times the largest of the last 2 steps"
    assert "a gradient norm of 3.1, above 3, 3 times" in str(machine.assess(result(1.0, 3.1)))
    machine.accept(result(1.0, 1.0))
    assert "above 3," in str(machine.assess(result(6.0, 1.0)))
    assert machine_of({"spike_factor": 0}).assess(result(1e9)) == ""


def test_what_it_knows_goes_through_a_checkpoint() -> None:
    """The largest of late and what was measured, under names that are always the same."""
    machine, other = machine_of({"spike_steps": 2}), machine_of({"spike_steps": 2})
    machine.accept(result(1.0))
    machine.accept(result(2.0))
    machine.measure(0.01)
    machine.measure(math.inf)
    other.load(machine.state())
    assert other.state()["state"] == machine.state()["state"]
    assert set(machine.state()) == {"state", "rank_00000"}
    assert other.tolerance == 0.01
    assert other.assess(result(21.0))


def test_a_step_that_waits_can_be_given_up_in_any_world() -> None:
    """Otherwise another layout is refused first, then a device list of another length."""
    saved = PendingStep(
        step=3,
        layout="other",
        reason="",
        tolerance=0.0,
        ranks=(1,),
        computation=None,
        devices=(("a",), ("b",)),
        values={},
    )
    known: dict[str, Any] = {"losses": [], "norms": [], "measured": 0.0, "waiting": saved.plain()}
    manifest = cast("Any", SimpleNamespace(common={"rerun.state": known}, tensors={}))
    for rerun in ({"skip_steps": [3]}, {"mode": "disabled"}):
        machine = machine_of(rerun)
        assert machine._job.world not in {1, 2}
        machine.expect(manifest, Path("step"))
        machine.load({"state": Common(known)})
        assert machine.waiting is None
    with pytest.raises(CheckpointError, match=r"expected the layout.* give the step up: rerun\.skip_steps=\[3\]"):
        machine_of({}).expect(manifest, Path("step"))
    known["waiting"]["layout"] = machine_of({}).layout
    with pytest.raises(CheckpointError, match=r"waiting\.devices: expected those of"):
        machine_of({}).expect(manifest, Path("step"))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.0, 0.0),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.nan, 1.0, math.inf),
        (0.0, 1.0, 1.0),
        (-1.0, 1.0, 2.0),
        (99.0, 100.0, 0.01),
    ],
)
def test_how_far_two_numbers_are_apart(one: float, other: float, expected: float) -> None:
    """Relative to the larger; equal numbers that are not finite do not differ."""
    assert relative_difference(one, other) == relative_difference(other, one) == expected


class Scripted:
    """A trainer of one rank whose steps come to what is written down, one run after the other."""

    def __init__(self, job: Job, results: list[StepDecision]) -> None:
        self.job, self.rank, self.device, self.model = job, 0, CPU, nn.Linear(1, 1)
        self.results = list(results)
        self.optimizer = SimpleNamespace(propose=lambda _stats: self.results.pop(0), loss_scale=1.0)
        self.holds_modules, self.objects = False, None
        self.data = StepData(make=tuple)
        self.samples = SimpleNamespace(numbers=lambda _step: ())

    def decide(self, _step: int, _record: object) -> StepDecision:
        """Run the first time."""
        return self.results.pop(0)

    def repeat(self, _data: object) -> None:
        """Run again."""

    def cut(self, _kept: object) -> None:
        """Return nothing to run."""


NAN = math.nan
STORIES: Mapping[str, tuple[Mapping[str, Any], list[float], str, int]] = {
    "a fault that passes": ({}, [NAN, 1.0, 1.0], "transient", 0),
    "a spike that passes": ({}, [100.0, 1.0, 1.0], "transient", 0),
    "a spike that stays": ({}, [100.0, 100.0], "reproduced", 0),
    "no number that stays": ({}, [NAN, NAN], "reproduced", 0),
    "one that comes back once": ({}, [NAN, 1.0, NAN, 1.0], "transient", 0),
    "one that comes back again": ({}, [NAN, 1.0, NAN, NAN], "reproduced", 0),
    "three different spikes": ({}, [100.0, 200.0, 300.0], "reproduced", 0),
    "noise at the bound": ({}, [10.01, 9.99, 10.0], "noise", 0),
    "noise that is spiky itself": ({}, [20.0, 20.1, 20.05], "reproduced", 0),
    "within what is allowed": ({"tolerance": 0.01}, [10.01, 9.99], "noise", 0),
    "beyond what is allowed": ({"tolerance": 0.01}, [100.0, 1.0], "transient", 0),
    "the same up to what is allowed": ({"tolerance": 0.01}, [100.0, 100.1], "reproduced", 0),
}


PASS_STORIES: Mapping[str, tuple[Mapping[str, Any], list[tuple[float, float]], list[str], int]] = {
    "one that passes": ({}, [(1.5, 1e9), (1.0, 1.0), (1.0, 1.0)], ["transient"], 0),
    "one that stays": ({}, [(1.0, 1e9), (1.0, 1e9)], ["accepted"], 0),
    "no numbers that stay": ({}, [(1.0, NAN), (1.0, NAN)], ["accepted"], 0),
    "one that stays nearly": ({}, [(1.0, 1e9), (1.0 + 1e-6, 1e9), (1.0 - 1e-6, 1e9)], ["accepted"], 0),
    "one that is never the same": ({}, [(1.0, 1e9), (2.0, 1e9), (4.0, 1e9)], ["reproduced"], 0),
    "a loss that passes and one that stays": ({}, [(NAN, 1e9), (1.0, 1e9), (1.0, 1e9)], ["transient", "accepted"], 0),
    "one that passes before one that stays": ({}, [(2.0, 1e12), (1.0, 1e9), (1.0, 1e9)], ["transient", "accepted"], 0),
    "a loss that stays beside one": ({}, [(NAN, 1e9), (NAN, 1e9)], ["reproduced"], 0),
    "one that is within the bound": ({"pass_factor": 1e10}, [(1.0, 1e9)], [], 0),
    "one that nobody judges": ({"pass_factor": 0.0}, [(1.0, 1e9)], [], 0),
}
"""Loss, and what the rows of the language model come to, of each run."""


def run_pass_story(story: str, plain: Job, directory: Path) -> tuple[list[str], bool, int]:
    """Run a story; return the verdicts, whether the run continued, and how many results were left."""
    rerun, values, *_ = PASS_STORIES[story]
    driver, machine, trainer = _driver(plain, directory, rerun, [result(loss, passes=size) for loss, size in values])
    for _ in range(5):
        machine.accept(result(1.0, passes=1.0))
    continued = True
    try:
        driver.decide(5, None)
    except RestartNeededError:
        continued = False
    path = directory / RERUN_FILE
    reported = [json.loads(line)["verdict"] for line in path.read_text().splitlines()] if path.exists() else []
    return reported, continued, len(trainer.results)


def _driver(
    plain: Job, directory: Path, rerun: Mapping[str, Any], results: list[StepDecision]
) -> tuple[RerunDriver, RerunStateMachine, Scripted]:
    """Return what runs these results."""
    settings = attrs.evolve(
        plain.settings,
        run=attrs.evolve(plain.settings.run, directory=str(directory)),
        rerun=RerunSettings(mode="validate", spike_steps=1, **rerun),
    )
    job = attrs.evolve(plain, settings=settings)
    machine, trainer = RerunStateMachine(job, ALONE), Scripted(job, results)
    machine.save = lambda _step: None
    return RerunDriver(machine, cast("Any", trainer)), machine, trainer


def test_passes_alone_end_no_run_that_comes_to_the_same(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    """The step is reported and accepted; only results that differ each time and are never right need another device."""
    plain = alone(job_of({}))
    (found,) = run_ranks(1, lambda _rank: [run_pass_story(story, plain, tmp_path / story) for story in PASS_STORIES])
    for (story, (_, _, verdicts, left)), reported in zip(PASS_STORIES.items(), found, strict=True):
        assert reported == (verdicts, "reproduced" not in verdicts, left), story


def run_story(story: str, plain: Job, directory: Path) -> tuple[str, float, int]:
    """Run a story; return the verdict, the loss that is stepped by, and how many runs were left."""
    rerun, losses, *_ = STORIES[story]
    driver, machine, trainer = _driver(plain, directory, rerun, [*map(result, losses)])
    machine.accept(result(1.0))
    saved: list[int] = []
    machine.save = saved.append
    try:
        loss = driver.decide(5, None).loss
    except RestartNeededError:
        loss = NAN
        assert saved == [4]
        assert machine.waiting is not None
        assert machine.waiting.ranks == (0,)
    return json.loads((directory / RERUN_FILE).read_text())["verdict"], loss, len(trainer.results)


def alone(job: Job) -> Job:
    """Return the job with all its modules on rank 0."""
    modules = {name: {**keys, "ranks": "0", "tp": 1} for name, keys in job.plain["modules"].items()}
    return make_job({**job.plain, "modules": modules})


def test_what_is_made_of_runs_that_come_to_this(tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    """The loss of each run, first the one that is judged; all are needed, and no more."""
    plain = alone(job_of({}))
    (found,) = run_ranks(1, lambda _rank: [run_story(story, plain, tmp_path / story) for story in STORIES])
    for (story, (_, losses, verdict, left)), (reported, loss, unused) in zip(STORIES.items(), found, strict=True):
        assert (reported, unused) == (verdict, left), story
        assert loss == losses[-1] or (verdict == "reproduced" and math.isnan(loss)), story


def test_a_suspect_is_cleared_by_devices_that_none_of_them_had() -> None:
    """Those that have swapped theirs, or gone back, have the bad one among them still; others don't count."""
    waiting = PendingStep(
        step=4,
        layout="",
        reason="",
        tolerance=0.0,
        ranks=(0, 1),
        computation=None,
        devices=(("a",), ("b",), ("c",)),
        values={},
    )
    settled = {
        devices: waiting.is_settled_on(devices) for devices in (("b", "a", "c"), ("a", "d", "c"), ("d", "e", "c"))
    }
    assert settled == {("b", "a", "c"): False, ("a", "d", "c"): False, ("d", "e", "c"): True}
    again = waiting.on(("d", "a", "c"))
    assert again.devices == (("a", "d"), ("b", "a"), ("c",))
    assert again.first_devices == ("a", "b", "c")
    assert not again.is_settled_on(("d", "b", "c"))


def test_an_event_that_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the disk is full: the run has just been saved from a fault."""
    (tmp_path / RERUN_FILE).mkdir()
    machine_of({}, tmp_path).add_event(4, "transient", "a fault that has passed")
    said, text = capsys.readouterr().err.splitlines()
    assert said.startswith("mimo: step 4: transient is not in rerun.jsonl, which can't be written: [Errno 21] Is a dir")
    assert text == "mimo: step 4: a fault that has passed"


@pytest.mark.parametrize(("made", "reported"), [([5, 6], 6), ([], 4)])
def test_the_event_at_the_end_of_a_run_names_its_last_step(made: list[int], reported: int, tmp_path: Path) -> None:
    """Which is not its last when it was stopped."""
    machine = machine_of({"mode": "report_determinism"}, tmp_path)
    run = cast("RunInfo", SimpleNamespace(first_step=5, steps=400))
    for step in made:
        machine.mimo_step_end(run, cast("StepInfo", SimpleNamespace(step=step)))
    machine.mimo_run_end(run)
    (event,) = map(json.loads, (tmp_path / RERUN_FILE).read_text().splitlines())
    assert (event["step"], event["verdict"]) == (reported, "determinism_of_the_run")


FORWARD = Computation(kind="forward", module="vision", stage=0, microbatches=(1,))
LANGUAGE = Computation(kind="forward", module="language", stage=0, microbatches=(1,))
BACK = attrs.evolve(LANGUAGE, kind="backward")
GRADIENTS = Computation(kind="gradients", module="vision", stage=0)


PLACES: list[tuple[list[list[Computation]], Where]] = [
    ([[GRADIENTS, FORWARD], [], [LANGUAGE], [LANGUAGE, BACK]], Where(computation=FORWARD, ranks=(0,))),
    ([[GRADIENTS], [GRADIENTS], [BACK], [BACK]], Where(computation=BACK, ranks=(2, 3))),
    ([[GRADIENTS], [], [], []], Where(computation=GRADIENTS, ranks=(0,))),
    ([[], [], [attrs.evolve(LANGUAGE, kind="loss")], [LANGUAGE]], Where(computation=LANGUAGE, ranks=(3,))),
    ([[attrs.evolve(FORWARD, microbatches=(3,))], [], [LANGUAGE], [BACK]], Where(computation=LANGUAGE, ranks=(2,))),
    ([[], [], [], []], Where(computation=None, ranks=())),
]


def test_the_earliest_computation_is_found_by_the_plan(run_ranks: Callable[..., list[Any]]) -> None:
    """What other ranks compute from it comes later in the plan; ranks that share it are named together."""
    job = job_of({})
    found = run_ranks(4, lambda rank: [Order(job, rank, None).first(computations[rank]) for computations, _ in PLACES])
    assert found == [[where for _, where in PLACES]] * 4


def test_a_pass_is_corrupted_where_and_as_often_as_settings_say() -> None:
    """In runs of the step, on the device; rows made ahead count for the step that they are for."""
    settings = InjectSettings(step=3, module="vision", rank=1, times=1, factor=2.0)
    here = Injector(settings, rank=1, device="a")
    recorder = NormRecorder(microbatches=2, injector=here)
    stage, ones = StageId("vision", 0), torch.ones(1)

    def rows(step: int | None, ahead: int | None, microbatch: int) -> float:
        recorder.begin(step, ahead)
        return float(recorder.record_pass(stage, (microbatch,), {}, ones))

    assert [rows(2, None, 0), rows(3, None, 1), rows(3, None, 0), rows(3, None, 0)] == [1, 1, 2, 1]
    recorder = NormRecorder(microbatches=2, injector=Injector(settings, rank=1, device="a"))
    assert [rows(2, 3, 2), rows(3, 4, 2)] == [2, 1]
    for other in (
        Injector(settings, rank=0, device="a"),
        Injector(attrs.evolve(settings, device="b"), rank=1, device="a"),
    ):
        recorder = NormRecorder(microbatches=2, injector=other)
        assert rows(3, None, 0) == 1


def test_what_was_made_ahead_belongs_to_its_step() -> None:
    """It is seen with the step that it is for, under the microbatch's number there, and forgotten when made anew."""
    recorder = NormRecorder(microbatches=2, injector=Injector(InjectSettings(), rank=0, device=""))
    stage = StageId("vision", 0)
    recorder.begin(None, 7)
    recorder.record_pass(stage, (3,), {}, torch.tensor([3.0, 4.0]))
    recorder.record_loss(stage, (3,), torch.tensor(2.0))
    assert recorder.values() == {}
    recorder.begin(7, 8)
    recorder.record_pass(stage, (2,), {}, torch.tensor([1.0]))
    recorder.record_loss(stage, (2,), torch.tensor(9.0))
    assert recorder.values() == {FORWARD: 5.0, attrs.evolve(FORWARD, kind="loss"): 2.0}
    recorder.begin(None, 7)
    recorder.begin(7, 8)
    assert recorder.values() == {}


def test_bounds_are_the_largest_of_late() -> None:
    """Larger ones of before count less and less."""
    recorder = NormRecorder(microbatches=2, injector=Injector(InjectSettings(), rank=0, device=""))
    bounds = Bounds(1)
    for norm in (8.0, 1.0, 3.0):
        recorder.begin(1, None)
        recorder.record_pass(StageId("vision", 0), (1,), {}, torch.tensor([norm]))
        bounds.add(recorder)
    assert bounds.values() == {FORWARD: 3.0}
    bounds.add(recorder)
    recorder.begin(1, None)
    recorder.record_pass(StageId("vision", 0), (1,), {}, torch.tensor([1.0]))
    bounds.add(recorder)
    assert bounds.values() == {FORWARD: 1.5}


def test_devices_have_names_of_their_own() -> None:
    """Of a CPU the host and which of its processes it is; settings may give another, or one for each rank."""
    processes = [ProcessInfo(rank=rank, world=2, local_rank=rank) for rank in (0, 1)]
    first, second = (device_identity(process, "") for process in processes)
    assert first.startswith("cpu ")
    assert first != second
    assert first == device_identity(processes[0], "")
    assert device_identity(processes[1], "node-7") == "node-7/1"
    assert device_identity(processes[1], ("x", "y")) == "y"

"""What passes come to, and when that is so far above their past that a step is run again."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from eye import make_job, table

from mimo.checkpoint import Manifest
from mimo.hooks import CheckpointError, Common, StateTree
from mimo.launch import ProcessInfo
from mimo.topology import ModuleGraph, StageId
from mimo.trainer.config.rerun_settings import InjectSettings, RerunSettings
from mimo.trainer.rerun.machine import RerunStateMachine
from mimo.trainer.rerun.passes import PassHistory, read_past
from mimo.trainer.rerun.recorder import POWER, Injector, NormRecorder, norm_of
from mimo.trainer.step.probe import Computation, computations

STAGE = StageId("vision", 0)
FORWARD = Computation(kind="forward", module="vision", stage=0)
BACKWARD = Computation(kind="backward", module="vision", stage=0)
GRADIENTS = Computation(kind="gradients", module="vision", stage=0)
ONE = {"vision": {"ranks": [0]}, "language": {"ranks": [0]}}
TWO = {"vision": {"ranks": [0]}, "language": {"ranks": [0, 1], "pp": 2}}
LARGEST, LEAST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("value", [1e38, LARGEST, -LARGEST])
def test_a_norm_is_finite_where_its_elements_are(value: float, waits: bool) -> None:
    """Although the square of the element isn't; beside it nothing else counts."""
    rows = torch.ones(3, 5)
    rows[1, 2] = value
    assert norm_of(rows, waits=waits).item() == float(rows[1, 2].double().abs())


@pytest.mark.parametrize("waits", [False, True])
def test_a_norm_is_the_usual_one_elsewhere(waits: bool) -> None:
    """Of rows, of none, and of what isn't finite, in any precision."""
    assert norm_of(torch.tensor([3.0, 4.0]), waits=waits).item() == 5.0
    assert norm_of(torch.tensor([[3.0], [4.0]], dtype=torch.bfloat16), waits=waits).item() == 5.0
    assert norm_of(torch.zeros(0, 4), waits=waits).item() == 0.0
    assert norm_of(torch.tensor([1.0, math.inf]), waits=waits).item() == math.inf
    assert norm_of(torch.tensor([1.0, math.nan]), waits=waits).isnan()


def recorder() -> NormRecorder:
    """Return one that has begun to see a step of two microbatches."""
    found = NormRecorder(microbatches=2, injector=Injector(InjectSettings(), rank=0, device=""))
    found.begin(1, None)
    return found


@pytest.mark.parametrize("value", [LARGEST, LEAST, 1.0])
def test_what_a_pass_comes_to_has_a_place_in_the_message(value: float) -> None:
    """From the largest to the least normal number of float32, whatever the number of its rows."""
    seen = recorder()
    seen.record_pass(STAGE, (0,), {}, torch.full((7, 3), value))
    (total,) = seen.sums([FORWARD], loss_scale=1.0).tolist()
    assert total ** (1 / POWER) == pytest.approx(value, rel=1e-6, abs=0)


def test_one_pass_of_many_stands_out_of_their_sum() -> None:
    """The eighth root of the sum of eighth powers is at least the largest, and little more; empty ones add nothing."""
    seen = recorder()
    for _ in range(1000):
        seen.record_pass(STAGE, (0,), {}, torch.ones(2, 2))
        seen.record_pass(STAGE, (1,), {}, torch.ones(0, 2))
    quiet = seen.sums([FORWARD], loss_scale=1.0).item() ** (1 / POWER)
    assert 1.0 <= quiet < 2.4
    seen = recorder()
    for microbatch in range(2):
        seen.record_pass(STAGE, (microbatch,), {}, torch.ones(0, 2))
    assert seen.sums([FORWARD, BACKWARD], loss_scale=1.0).tolist() == [0.0, 0.0]


def test_gradients_are_judged_without_the_scale_of_the_loss() -> None:
    """Which doubles now and then; rows don't know it."""
    seen, given = recorder(), torch.ones(4, 1, requires_grad=True)
    seen.record_pass(STAGE, (0,), {"edge": given}, given * 1.0)
    given.backward(torch.full((4, 1), 2.0**10))
    seen.record_gradients("vision", "lanes", [0], [torch.full((9,), 2.0**10), torch.full((7,), 2.0**10)])
    assert seen.sums([FORWARD, BACKWARD, GRADIENTS], loss_scale=2.0**10).tolist() == [1.0, 1.0, 1.0]
    forward = attrs.evolve(FORWARD, microbatches=(0,))
    expected = {forward: 1.0, attrs.evolve(forward, kind="backward"): 1.0, GRADIENTS: 1.0}
    assert seen.sizes(loss_scale=2.0**10) == expected


def graph_of(modules: dict[str, Any]) -> ModuleGraph:
    """Return the module graph of a small model."""
    return make_job(table(modules)).model_graph


def sums(**values: float) -> list[float]:
    """Return the sums of a step of `ONE` whose passes come to this, by module and kind; the others are empty."""
    found = {
        f"{computation.module}_{computation.kind}": place
        for place, computation in enumerate(computations(graph_of(ONE)))
        if not computation.stage
    }
    totals = [0.0] * 2 * len(found)
    for name, value in values.items():
        totals[found[name]] = value**POWER
    return totals


def history(past: int = 5, **settings: Any) -> PassHistory:
    """Return one with steps in which everything came to 1."""
    found = PassHistory(graph_of(ONE), RerunSettings(mode="validate", **settings))
    for _ in range(past):
        found.accept([1.0] * len(computations(graph_of(ONE))))
    return found


def reason(passes: PassHistory, **values: float) -> str:
    """Return what is said of a step."""
    found = passes.assess(sums(**values))
    return "" if found is None else found.reason


def test_what_is_far_above_its_past_is_rejected() -> None:
    """The first of it in a step is named; what is smaller, however much, is not; nor what was empty."""
    passes = history()
    assert reason(passes, vision_forward=99.9, language_backward=0.0, language_forward=1e-30) == ""
    bound = "of a root mean square of 101, above 100, 100 times the largest of late"
    assert reason(passes, vision_forward=101.0) == f"rows that vision stage 0 makes {bound}"
    assert reason(passes, language_backward=101.0) == f"gradients that language stage 0 sends back {bound}"
    assert reason(passes, vision_gradients=101.0) == f"gradients of the parameters of vision stage 0 {bound}"
    found = passes.assess(sums(vision_gradients=1e9, language_backward=1e9, language_forward=1e30, vision_forward=5.0))
    assert found is not None
    assert found.computation == Computation(kind="forward", module="language", stage=0)
    assert reason(history(pass_factor=3.0), vision_forward=3.1)


def test_what_is_not_finite_needs_no_past() -> None:
    """And is rejected whatever the factor."""
    for passes in (history(0), history(pass_factor=0.0)):
        assert reason(passes, vision_forward=1e30) == ""
        for value in (math.inf, math.nan):
            assert reason(passes, vision_forward=value) == "rows that vision stage 0 makes that are not finite"


@pytest.mark.parametrize(("settings", "needed"), [({}, 5), ({"spike_steps": 2}, 2)])
def test_the_bound_counts_after_a_few_steps(settings: dict[str, Any], needed: int) -> None:
    """In which there were such passes: steps without any don't count."""
    passes = history(needed - 1, **settings)
    passes.accept(sums(language_forward=1.0))
    assert reason(passes, language_forward=1e9)
    assert reason(passes, vision_forward=1e9) == ""


@pytest.mark.parametrize("before", [0, 3, 9])
def test_the_past_is_forgotten(before: int) -> None:
    """What was accepted counts for as many steps as settings say, and for no more than twice as many, however large."""
    passes = history(before, spike_steps=10)
    passes.accept(sums(vision_forward=1e30))
    for _ in range(10):
        assert reason(passes, vision_forward=1e31) == ""
        passes.accept(sums(vision_forward=1.0))
    for _ in range(10):
        passes.accept(sums(vision_forward=1.0))
    assert "above 100," in reason(passes, vision_forward=101.0)


def test_what_was_accepted_though_not_finite_is_not_rejected_each_time() -> None:
    """Until it is finite once: a model that is so by itself is not run twice in every step."""
    passes = history()
    for value in (math.inf, math.nan):
        passes.accept(sums(vision_forward=value))
        assert reason(passes, vision_forward=value) == ""
    passes.accept(sums(vision_forward=2.0))
    assert reason(passes, vision_forward=math.inf)
    assert "above 200," in reason(passes, vision_forward=201.0)


def test_the_past_goes_through_a_checkpoint() -> None:
    """By module, stage and direction, whichever ranks there are; stages of a longer pipeline begin anew."""
    passes = history()
    passes.accept(sums(vision_forward=3.0, language_forward=math.nan))
    state = passes.state()
    assert state["forward of vision, stage 0 of 1"] == [3.0, 0.0, 6]
    assert "forward of language, stage 0 of 1" not in state
    again = PassHistory(graph_of(ONE), RerunSettings(mode="validate"))
    again.load(read_past(state, "here"))
    assert again.state() == state
    assert "above 300," in reason(again, vision_forward=301.0)
    other = PassHistory(graph_of(TWO), RerunSettings(mode="validate"))
    other.load(read_past(state, "here"))
    assert other.state() == {name: value for name, value in state.items() if "of vision" in name}


def machine() -> RerunStateMachine:
    """Return a machine that judges."""
    job = make_job(table(ONE, rerun={"mode": "validate"}))
    return RerunStateMachine(job, ProcessInfo(rank=0, world=1, local_rank=0))


def with_passes(passes: object) -> StateTree:
    """Return the machine's state with another past; None for a checkpoint of before there was any."""
    state = machine().state()
    known = state["state"]
    assert isinstance(known, Common)
    plain = {key: value for key, value in known.value.items() if key != "passes"}
    return {**state, "state": Common(plain if passes is None else {**plain, "passes": passes})}


def test_a_checkpoint_without_a_past_loads() -> None:
    """As those of before; passes then have none yet."""
    found = machine()
    found.load(with_passes(None))
    assert found.state()["state"] == machine().state()["state"]


NAME = "forward of vision, stage 0 of 1"


@pytest.mark.parametrize(
    ("passes", "key"),
    [
        ("none", ""),
        ([1.0, 2], ""),
        ({NAME: 1.0}, NAME),
        ({NAME: [1.0, 2]}, NAME),
        ({NAME: [1.0, 1.0, 2.5]}, NAME),
        ({NAME: [1, 1.0, 2]}, NAME),
        ({NAME: [-1.0, 1.0, 2]}, NAME),
        ({NAME: [math.inf, 1.0, 2]}, NAME),
        ({NAME: [1.0, math.nan, 2]}, NAME),
        ({NAME: [1.0, -1.0, 2]}, NAME),
        ({NAME: [1.0, 1.0, -2]}, NAME),
        ({NAME: [1.0, 1.0, True]}, NAME),
        ({NAME: ["9" * 1000, 1.0, 2]}, NAME),
    ],
)
def test_a_forged_past_is_refused(passes: object, key: str, tmp_path: Path) -> None:
    """By file and key, before anything is loaded."""
    state = with_passes(passes)["state"]
    assert isinstance(state, Common)
    empty: dict[str, Any] = {name: {} for name in ("tensors", "shards", "owned", "topology", "config")}
    manifest = Manifest(step=3, block_bytes=1, common={"rerun.state": state.value}, **empty)
    path = f"{tmp_path}: rerun.state.passes{'.' if key else ''}{key}"
    text = (
        f"{path}: expected the two largest of late of each kind of passes, finite numbers of 0 or more, and a count of"
    )
    with pytest.raises(CheckpointError, match=re.escape(text)) as refused:
        machine().expect(manifest, tmp_path)
    assert len(refused.value.got) <= 80


def test_no_rank_of_any_layout_has_other_sums() -> None:
    """They are as many, in the same order, wherever the ranks are."""
    spread = {"vision": {"ranks": [0, 1]}, "language": {"ranks": [2, 3], "tp": 2}}
    assert computations(graph_of(spread)) == computations(graph_of(ONE))
    kinds = [(computation.kind, computation.module, computation.stage) for computation in computations(graph_of(TWO))]
    forward = [("vision", 0), ("vision", 1), ("language", 0), ("language", 1), ("language", 2)]
    assert kinds[:5] == [("forward", *one) for one in forward]
    assert kinds[5:10] == [("backward", *one) for one in reversed(forward)]
    assert kinds[10:] == [("gradients", *one) for one in reversed(forward)]


def test_a_seam_changes_no_length_and_is_judged_on_both_sides() -> None:
    """Tower and projector have places of their own, and a past of other names than the encoder that is not divided."""
    ahead = {"ranks": [0], "frozen": ["encoder"], "prefetch": True}
    job = make_job(table({**ONE, "vision": ahead}))
    assert {"vision", "vision.projector"} <= {module.name for module in job.graph.modules}
    divided, whole = computations(job.model_graph), computations(graph_of(ONE))
    assert len(divided) == len(whole)
    judged = {StageId(computation.module, computation.stage) for computation in divided}
    assert judged >= {StageId(*job.built(stage)) for stage in job.graph.stages}
    passes = PassHistory(job.model_graph, RerunSettings(mode="validate"))
    passes.accept([1.0] * len(divided))
    assert "forward of vision, stage 1 of 2" in passes.state()
    assert "forward of vision, stage 0 of 1" not in passes.state()

"""Numbers that go wrong on one rank of one module are given to it, whatever the layout, optimizer and schedule."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rerunning import Ended, events, run, with_rerun
from tables import Table, scheduled, table

from mimo.testing import Pool, RanksError

STEP = 4
SPIKES: Mapping[str, Any] = {"spike_factor": 3.0, "spike_steps": 2}

LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "disjoint": {"vision": {"ranks": [0, 1]}, "language": {"ranks": [2, 3], "tp": 2}},
    "colocated": {"vision": {"ranks": [0, 1]}, "language": {"ranks": [0, 1]}},
    "pipelined": {"vision": {"ranks": [0]}, "language": {"ranks": [1, 2], "pp": 2}},
}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {},
    "optimizer": {"plugin": "distributed", "shard": "optimizer"},
    "gradients": {"plugin": "distributed", "shard": "gradients"},
    "full": {"plugin": "distributed", "shard": "full"},
    "overlapped": {"plugin": "distributed", "shard": "optimizer", "overlap_grad_reduce": True},
    "cpu-offload": {"plugin": "cpu-offload"},
}
FAULTS: Mapping[str, Mapping[str, Any]] = {
    "vision forward": {"module": "vision", "what": "forward"},
    "vision gradient": {"module": "vision", "what": "gradient"},
    "vision spike": {"module": "vision", "what": "gradient", "factor": 1e4},
    "language forward": {"module": "language", "what": "forward"},
    "language gradient": {"module": "language", "what": "gradient"},
    "language spike": {"module": "language", "what": "forward", "factor": 1e3},
    "language gradient spike": {"module": "language", "what": "gradient", "factor": 1e4},
}
ENDINGS = ("transient", "persistent", "correct")
CASES = list(itertools.product(LAYOUTS, OPTIMIZERS, FAULTS, ENDINGS))
ORDINARY = {
    ("disjoint", "adamw", "vision forward", "persistent"),
    ("disjoint", "full", "language gradient", "transient"),
    ("colocated", "cpu-offload", "vision spike", "correct"),
    ("pipelined", "adamw", "language gradient spike", "transient"),
}
"""Each layout and ending, and three optimizers; the others are for the soak."""


def settings_of(layout: str, optimizer: str) -> Table:
    """Return a run of five steps, two microbatches each."""
    found = table(LAYOUTS[layout], microbatches=2)
    found["run"]["steps"] = STEP + 1
    found["optimizer"] |= OPTIMIZERS[optimizer]
    return scheduled(found, "zb-h1") if layout == "pipelined" else found


class Undisturbed:
    """Runs in which nothing goes wrong and nobody judges, each done once."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._found: dict[tuple[str, str], list[Ended]] = {}

    def run(self, layout: str, optimizer: str) -> list[Ended]:
        """Return how a run ends."""
        if (layout, optimizer) not in self._found:
            settings = with_rerun(settings_of(layout, optimizer), self._folder)
            self._found[layout, optimizer] = run(self._pool, settings)
        return self._found[layout, optimizer]


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Keep them for the tests of this file."""
    return Undisturbed(pool, tmp_path_factory.mktemp("undisturbed"))


def reported(layout: str, fault: str) -> tuple[int, dict[str, Any]]:
    """Return on which rank a fault is made, and what is to be said of it: of a tensor group all its ranks share it."""
    module, what = FAULTS[fault]["module"], FAULTS[fault]["what"]
    ranks = LAYOUTS[layout][str(module)]["ranks"]
    shared = what == "gradient" and "tp" in LAYOUTS[layout][str(module)]
    kind = "forward" if what == "forward" else "backward" if module == "language" else "gradients"
    where = {"module": module, "what": kind, "ranks": ranks if shared else [ranks[-1]]}
    return ranks[-1], where


@pytest.mark.parametrize(
    ("layout", "optimizer", "fault", "ending"),
    [pytest.param(*case, marks=() if case in ORDINARY else pytest.mark.soak) for case in CASES],
)
def test_a_fault_is_given_to_where_it_was_made(
    layout: str, optimizer: str, fault: str, ending: str, tmp_path: Path, pool: Pool, undisturbed: Undisturbed
) -> None:
    """And once it has passed, or its device is left, the run is the one that nothing has disturbed, to the bit."""
    settings = settings_of(layout, optimizer)
    rank, where = reported(layout, fault)
    inject: dict[str, Any] = {"step": STEP, "rank": rank, "microbatch": 1, **FAULTS[fault]}
    if ending == "transient":
        inject["times"] = 1
    if ending == "persistent":
        inject["device"] = f"a/{rank}"
    rerun: dict[str, Any] = {"mode": "validate", **SPIKES, "device": "a", "inject": inject}
    first = run(pool, with_rerun(settings, tmp_path, **rerun))
    assert {one.code for one in first} == {0 if ending == "transient" else 16}
    if ending == "transient":
        check_same(first, undisturbed.run(layout, optimizer))
        (event,) = events(tmp_path)
    else:
        again = run(pool, with_rerun(settings, tmp_path, "latest", **rerun | {"device": "b"}))
        assert {one.code for one in again} == {0 if ending == "persistent" else 17}
        before, event = events(tmp_path)
        assert before["verdict"] == "reproduced"
        assert set(before["ranks"]) >= set(where["ranks"])
        if "factor" not in inject:
            assert {key: before[key] for key in where} == where
    assert event["verdict"] == ending
    assert event["step"] == STEP
    if ending != "correct":
        assert {key: event[key] for key in where} == where
        assert event["devices"] == [f"a/{one}" for one in where["ranks"]]
        assert where["what"] == "gradients" or event["microbatches"] == [1]
    if ending == "persistent":
        check_same(again, undisturbed.run(layout, optimizer))


def check_same(found: list[Ended], plain: list[Ended]) -> None:
    """Refuse a run that is not the one that was not disturbed, or its end, to the bit."""
    for one, other in zip(found, plain, strict=True):
        assert one.steps == other.steps[-len(one.steps) :]
        assert one.held == other.held


@pytest.mark.parametrize(
    "layout", ["disjoint", *(pytest.param(name, marks=pytest.mark.soak) for name in ("colocated", "pipelined"))]
)
@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.soak) for name in OPTIMIZERS if name != "adamw")]
)
def test_a_healthy_run_is_the_same_and_talks_no_more(
    layout: str, optimizer: str, tmp_path: Path, pool: Pool, undisturbed: Undisturbed
) -> None:
    """To the bit, and with as many messages and collectives."""
    judged = run(pool, with_rerun(settings_of(layout, optimizer), tmp_path, mode="validate", **SPIKES))
    plain = undisturbed.run(layout, optimizer)
    check_same(judged, plain)
    assert [one.collectives for one in judged] == [one.collectives for one in plain]
    assert min(one.collectives for one in plain) > STEP
    assert not events(tmp_path)


def test_what_a_step_changes_beside_weights_is_put_back(tmp_path: Path, pool: Pool) -> None:
    """Buffers and generators: a third-party encoder counts its calls in one and draws from the other."""
    settings = settings_of("colocated", "adamw")
    settings["modules"]["vision"]["plugin"] = "noisy-vit"
    inject = {"step": STEP, "rank": 1, "module": "language", "device": "a/1"}
    rerun: dict[str, Any] = {"mode": "validate", "device": "a", "inject": inject}
    passed = run(pool, with_rerun(settings, tmp_path / "passed", **rerun | {"inject": {**inject, "times": 1}}))
    plain = run(pool, with_rerun(settings, tmp_path / "plain"))
    check_same(passed, plain)
    run(pool, with_rerun(settings, tmp_path, **rerun))
    assert {one.code for one in run(pool, with_rerun(settings, tmp_path, "latest", **rerun))} == {16}
    check_same(run(pool, with_rerun(settings, tmp_path, "latest", **rerun | {"device": "b"})), plain)
    assert [event["verdict"] for event in events(tmp_path)] == ["reproduced", "undecided", "persistent"]


@pytest.mark.soak
def test_a_step_that_is_given_up_leaves_nothing_behind(tmp_path: Path, pool: Pool) -> None:
    """As what is saved is the state before it: an encoder that counts its calls has not counted those."""
    settings = settings_of("colocated", "adamw")
    settings["modules"]["vision"]["plugin"] = "counting-vit"
    inject = {"step": STEP, "rank": 1, "module": "language"}
    assert {one.code for one in run(pool, with_rerun(settings, tmp_path, mode="validate", inject=inject))} == {16}
    found = run(pool, with_rerun(settings, tmp_path, "latest", skip_steps=[STEP]))
    check_same(found, run(pool, with_rerun(settings, tmp_path / "plain", skip_steps=[STEP])))


def test_a_step_is_run_again_from_what_was_read_then(tmp_path: Path, pool: Pool) -> None:
    """After the restart the dataset holds other samples: the step comes to the same from those that were saved."""
    settings = settings_of("disjoint", "adamw")
    settings["data"]["weights"] = "mixed"
    rerun: dict[str, Any] = {"mode": "validate", "inject": {"step": STEP, "rank": 1, "module": "vision", "factor": 0.0}}
    run(pool, with_rerun(settings, tmp_path, device="a", **rerun))
    again = run(pool, with_rerun(settings, tmp_path, "latest", device="b", **rerun), changed=True)
    assert {one.code for one in again} == {17}
    fix = f"rerun.skip_steps=[{STEP}]"
    assert all(fix in one.text for one in again)
    left = run(pool, with_rerun(settings, tmp_path, "latest", device="b", **rerun, skip_steps=[STEP]))
    assert [skipped for *_, skipped in left[0].steps] == [True, False]
    assert {one.code for one in left} == {0}
    assert [event["verdict"] for event in events(tmp_path)] == ["reproduced", "correct", "skipped"]


@pytest.mark.soak
@pytest.mark.parametrize("ending", ["transient", pytest.param("persistent", marks=pytest.mark.soak)])
@pytest.mark.parametrize("module", ["vision", pytest.param("language", marks=pytest.mark.soak)])
def test_what_was_made_ahead_is_made_again(module: str, ending: str, tmp_path: Path, pool: Pool) -> None:
    """A frozen encoder works a step ahead: its fault is found in the step that its rows are for."""
    settings = settings_of("disjoint", "adamw")
    settings["modules"]["vision"] |= {"frozen": True, "prefetch": True}
    rank = 1 if module == "vision" else 3
    inject = {"step": STEP, "rank": rank, "module": module, "microbatch": 1}
    inject |= {"times": 1} if ending == "transient" else {"device": f"a/{rank}"}
    rerun: dict[str, Any] = {"mode": "validate", "device": "a", "inject": inject}
    found = run(pool, with_rerun(settings, tmp_path, **rerun))
    if ending == "persistent":
        found = run(pool, with_rerun(settings, tmp_path, "latest", **rerun | {"device": "b"}))
    check_same(found, run(pool, with_rerun(settings, tmp_path / "plain")))
    event = events(tmp_path)[-1]
    assert (event["verdict"], event["module"], event["ranks"], event["what"], event["microbatches"]) == (
        *(ending, module, [rank], "forward", [1]),
    )


@pytest.mark.parametrize(
    ("module", "what", "weights"),
    [
        ("drawer", "gradient", "zero"),
        pytest.param("drawer", "gradient", "none", marks=pytest.mark.soak),
        pytest.param("drawer", "forward", "zero", marks=pytest.mark.soak),
        pytest.param("teacher", "forward", "none", marks=pytest.mark.soak),
    ],
)
def test_faults_of_teachers_and_generators_are_given_to_them(
    module: str, what: str, weights: str, tmp_path: Path, pool: Pool
) -> None:
    """In steps without labels too; and what a flow draws in a step that is run again is what it drew before."""
    flow = {"height": 4, "width": 6, "channels": 1, "patch": 2, "hidden": 24, "layers": 2, "heads": 2}
    modules: dict[str, dict[str, Any]] = {
        "vision": {"ranks": [0]},
        "teacher": {"ranks": [0], "distil": {"top_k": 3}, "prefetch": True},
        "language": {"ranks": [1]},
        "drawer": {"ranks": [2], "fed_by": "language", "plugin": "flow", "config": {**flow, "drop_condition": 0.2}},
    }
    settings = table(modules, microbatches=2, weights=weights, roles={"image": ("input", "output", "both")})
    settings["run"]["steps"] = STEP + 1
    rank = modules[module]["ranks"][0]
    inject = {"step": STEP, "rank": rank, "module": module, "what": what, "microbatch": 1, "times": 1}
    found = run(pool, with_rerun(settings, tmp_path, mode="validate", device="a", inject=inject))
    check_same(found, run(pool, with_rerun(settings, tmp_path / "plain")))
    (event,) = events(tmp_path)
    assert (event["verdict"], event["module"], event["ranks"], event["what"], event["microbatches"]) == (
        *("transient", module, [rank], "backward" if what == "gradient" else what, [1]),
    )


@pytest.mark.parametrize("ending", ["persistent", pytest.param("transient", marks=pytest.mark.soak)])
def test_a_fault_of_a_language_model_that_works_ahead_is_found_in_its_step(
    ending: str, tmp_path: Path, pool: Pool
) -> None:
    """Its losses are those of the samples of that step, where a run on other devices repeats it too."""
    modules: dict[str, dict[str, Any]] = {
        "vision": {"ranks": [0], "frozen": True, "prefetch": True},
        "language": {"ranks": [1, 2], "pp": 2, "frozen": True, "prefetch": True},
        "drawer": {"ranks": [0], "fed_by": "language"},
    }
    settings = table(modules, microbatches=2, roles={"image": ("input", "output", "both")})
    settings["run"]["steps"] = STEP + 1
    inject = {"step": STEP, "rank": 2, "module": "language", "microbatch": 1}
    inject |= {"times": 1} if ending == "transient" else {"device": "a/2"}
    rerun: dict[str, Any] = {"mode": "validate", "device": "a", "inject": inject}
    found = run(pool, with_rerun(settings, tmp_path, **rerun))
    if ending == "persistent":
        found = run(pool, with_rerun(settings, tmp_path, "latest", **rerun | {"device": "b"}))
    check_same(found, run(pool, with_rerun(settings, tmp_path / "plain")))
    event = events(tmp_path)[-1]
    assert (event["verdict"], event["module"], event["ranks"], event["what"], event["microbatches"]) == (
        *(ending, "language", [2], "forward", [1]),
    )


def test_each_step_runs_twice_to_measure_how_far_apart_runs_are(
    tmp_path: Path, pool: Pool, undisturbed: Undisturbed
) -> None:
    """Nothing where all is drawn from generators; what an encoder makes up as it likes is seen, and kept."""
    settings = settings_of("colocated", "adamw")
    steady = run(pool, with_rerun(settings, tmp_path / "steady", mode="report_determinism"))
    check_same(steady, undisturbed.run("colocated", "adamw"))
    reported = events(tmp_path / "steady")
    assert [event["verdict"] for event in reported] == ["determinism"] * (STEP + 1)
    assert {off for event in reported for off in event["differences"].values()} == {0.0}
    settings["modules"]["vision"]["plugin"] = "unsteady-vit"
    run(pool, with_rerun(settings, tmp_path, mode="report_determinism"))
    assert all(0 < event["differences"]["passes.vision"] < 1 for event in events(tmp_path))
    assert all(event["differences"]["passes.vision"] > event["differences"]["loss"] for event in events(tmp_path))


def test_an_overflow_of_fp16_is_no_fault(tmp_path: Path, pool: Pool) -> None:
    """It is skipped, and halves the loss scale as ever."""
    settings = settings_of("colocated", "optimizer")
    settings["run"] |= {"precision": "fp16", "loss_scale": 2.0**32}
    found = run(pool, with_rerun(settings, tmp_path, mode="validate"))
    assert found[0].steps[0][2]
    assert {one.code for one in found} == {0}
    assert not events(tmp_path)


def test_a_step_that_waits_needs_the_layout_that_it_was_run_in(tmp_path: Path, pool: Pool) -> None:
    """Each rank runs its own part of it again; once it is given up, any layout can resume."""
    before, after = settings_of("disjoint", "adamw"), settings_of("colocated", "adamw")
    rerun: dict[str, Any] = {"mode": "validate", "inject": {"step": STEP, "rank": 1, "module": "vision"}}
    assert {one.code for one in run(pool, with_rerun(before, tmp_path, **rerun))} == {16}
    with pytest.raises(RanksError, match=r"the layout, batch and precision in which step 4 was run") as reported:
        run(pool, with_rerun(after, tmp_path, "latest", mode="validate"))
    assert "rerun.skip_steps=[4]" in str(reported.value)
    left = run(pool, with_rerun(after, tmp_path, "latest", mode="validate", skip_steps=[STEP]))
    assert [(one.code, one.steps[0][2]) for one in left] == [(0, True)] * 2

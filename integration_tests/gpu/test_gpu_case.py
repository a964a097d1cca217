"""What tests of a day on a GPU have in common: one failure hides nothing else, and they get what ranks get."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _census
import _families
import _layouts
import attrs
import pytest
import torch
from _case import Case, Found, alone, name_of, noting
from _compare import RelativeDifference
from tables import Table

from mimo.launch import ProcessInfo


def case_of(folder: Path, **options: str) -> Case:
    """Return a case on the CPU."""
    return Case(device=torch.device("cpu"), tiny=True, folder=folder, options=options)


def test_what_is_raised_is_reported_and_the_rest_still_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With its traceback printed."""
    wrong: list[str] = []
    with noting("one", wrong):
        raise ValueError("no such kernel")
    with noting("two", wrong):
        pass
    assert wrong == ["one: ValueError: no such kernel"]
    assert "Traceback" in capsys.readouterr().err


def test_a_device_that_does_not_answer_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error on a GPU all that asks it anything fails."""

    def refuse(_device: torch.device) -> str:
        raise RuntimeError("illegal access")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", refuse)
    assert name_of(torch.device("cuda:0")) == "cuda, whose name is not told: RuntimeError"


def test_one_model_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their figures are there."""

    def compare(_case: Case, settings: str, *_others: object) -> Any:
        if settings == "bad":
            raise RuntimeError("no such kernel")
        return RelativeDifference(loss=0.5, gradient=0.5, weight=2.0, names=("g", "w"))

    monkeypatch.setattr(_families, "models", lambda _group, **_keys: {"a": "bad", "b": "good"})
    monkeypatch.setattr(_families, "_in_single", compare)
    monkeypatch.setattr(_families, "Pool", lambda *_args: noting("pool", []))
    monkeypatch.setattr(_families, "alone", lambda _case: noting("alone", []))
    found = _families.test(case_of(tmp_path, group="decoders", dtype="fp32"))
    assert [*found.figures] == ["b"]
    assert found.wrong == ["a: RuntimeError: no such kernel", "b: weight w is off by 2 times what is allowed"]


def test_one_census_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted before and after it is there."""

    def count(_case: Case, settings: str, *_others: object) -> Any:
        if settings == "bad":
            raise RuntimeError("no such kernel")
        return Counter({"mimo/a.py:1": 2})

    monkeypatch.setattr(_census, "models", lambda **_keys: {"a": "bad", "b": "good"})
    monkeypatch.setattr(_census, "_count", count)
    monkeypatch.setattr(_census, "alone", lambda _case: noting("alone", []))
    found: Found = _census.test(case_of(tmp_path))
    assert [*found.figures] == ["counted", "b"]
    assert found.wrong == ["a: RuntimeError: no such kernel"]


def test_a_step_that_waits_more_often_than_it_may_fails_on_a_gpu(tmp_path: Path) -> None:
    """More than three times, and once for each microbatch and layer of experts."""
    on_cpu = case_of(tmp_path)
    on_gpu = attrs.evolve(on_cpu, device=torch.device("cuda"))
    for name, most in {"vit and decoder": 3, "experts": 7, "hybrid": 5}.items():
        enough, more = Counter({"mimo/a.py:1": most * 10}), Counter({"mimo/a.py:1": most * 10, "mimo/b.py:2": 5})
        assert _census.missed_by(on_gpu, name, enough, 10) == _census.missed_by(on_cpu, name, more, 10) == []
        line = f"{name}: {most}.5 synchronisations a step, more than {most}"
        assert _census.missed_by(on_gpu, name, more, 10) == [line]


@pytest.mark.parametrize("late", [False, True])
def test_layouts_after_one_that_fails_are_launched_again(
    tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless no time is left; those before it stay."""
    launched: list[list[int]] = []

    def launch(task: Any, *, world: int, terms: Any, **_others: object) -> int:
        rest: Mapping[int, Table] = task.args[0]
        launched.append([*rest])
        assert terms.timeout == _layouts.TIMEOUT
        for number in rest:
            for rank in range(world - (number == 1)):
                (tmp_path / f"{number}-{rank}.safetensors").touch()
            if number == 1:
                return 3
        return 0

    monkeypatch.setattr(_layouts, "launch", launch)
    until = time.monotonic() + (-1 if late else 60)
    wrong = _layouts.run_all(case_of(tmp_path), [{}, {}, {}, {}], world=2, until=until)
    message = "the launch ended with code 3, in layout 1"
    assert wrong == ([message, "no time was left for layouts 2, 3"] if late else [message])
    assert launched == ([[0, 1, 2, 3]] if late else [[0, 1, 2, 3], [2, 3]])
    assert [_layouts.ended(tmp_path, number, 2) for number in range(4)] == [True, False, not late, not late]


def test_the_one_rank_gets_the_group_of_what_lies_on_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the world that it has joined."""
    joined: Any = object()
    monkeypatch.setattr(
        "_case.join_world", lambda *_args, **_keys: ProcessInfo(rank=0, world=1, local_rank=0, objects=joined)
    )
    monkeypatch.setattr("_case.dist.destroy_process_group", lambda: None)
    monkeypatch.setattr("_case.plain_arithmetic", lambda: None)
    with alone(case_of(tmp_path)) as process:
        assert process.objects is joined

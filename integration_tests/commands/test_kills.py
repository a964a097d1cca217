"""Runs that are killed at any moment resume from a complete checkpoint, and end as if nothing had been."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from cases import some
from commands import losses, read_metrics
from house import ROOT
from killing import Blow, command

from mimo.checkpoint import latest, verify

STEPS = 5
WORLD = 3
LIFE_SECONDS = 4.0
"""About as long as a rank of these runs lives."""
WRITES = 40
"""About as many calls as the rank that writes most has in one run."""

WORDS = (
    "train",
    ROOT / "examples" / "digits.toml",
    f"run.steps={STEPS}",
    "run.global_batch=4",
    "run.micro_batch=2",
    "run.evaluation_interval=0",
    "run.timeout=60",
    "data.held_out=0.01",
    "modules.vision.ranks=0",
    "modules.language.ranks=1-2",
    "optimizer.lr_schedule=constant",
    "optimizer.lr_min=0",
    "checkpoint.interval=1",
    "checkpoint.keep=2",
    "logging.interval=1",
)
ASYNCHRONOUS = [False, True]


def draw(source: random.Random) -> Blow:
    """Return a blow at any moment; those in saves are as many as others, however short they are."""
    when: Literal["write", "time", "load"] = source.choice(("write", "write", "time", "load"))
    return Blow(
        when=when,
        rank=source.randrange(WORLD),
        number=source.randint(1, WRITES),
        seconds=source.uniform(0, LIFE_SECONDS if when == "time" else 0.1),
        everybody=source.random() < 0.3,
    )


def words(run: Path, *, asynchronous: bool) -> list[str | Path]:
    """Return the words of a command that begins a run, or resumes it."""
    load = "latest" if (run / "config.toml").exists() else "none"
    chosen = (f"run.directory={run}", f"checkpoint.asynchronous={str(asynchronous).lower()}", f"checkpoint.load={load}")
    return [*WORDS, *chosen]


def survive(run: Path, blows: Sequence[Blow], expected: Sequence[float], *, asynchronous: bool) -> int:
    """Deal blows one after the other to a run, let it come to its end, and return how many struck.

    After each the newest checkpoint is complete, and the next start resumes it; the losses are the expected ones.
    """
    struck = 0
    for blow in (*blows, None):
        found = latest(run / "checkpoints")
        first = 1 if found is None else int(found.name.removeprefix("step_")) + 1
        ended = command(words(run, asynchronous=asynchronous), blow)
        code, printed = ended.code, ended.out + ended.err
        assert code in ((0, 3, -9) if blow is not None else (0,)), f"{blow}: {code}\n{printed}"
        struck += code != 0
        if 1 < first <= STEPS and ", in " in printed:
            assert f"step {first} to {STEPS} with" in printed, f"{blow}:\n{printed}"
        if code == 3:
            assert "Traceback" not in printed, f"{blow}:\n{printed}"
            assert f"rank {blow.rank if blow else '-'} was ended by signal 9" in printed, f"{blow}:\n{printed}"
        if (found := latest(run / "checkpoints")) is not None:
            verify(found)
    assert losses(run) == expected
    assert [step["step"] for step in read_metrics(run)[0]] == list(range(1, STEPS + 1))
    left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    assert not left, left
    return struck


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that nobody disturbs."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert command(words(run, asynchronous=False)).printed
    return losses(run)


@pytest.mark.parametrize("asynchronous", some(ASYNCHRONOUS, {True}))
def test_a_killed_run_resumes_from_a_complete_checkpoint(
    asynchronous: bool, tmp_path: Path, expected: list[float]
) -> None:
    """Killed in a save, in the load that follows, and once more in a step."""
    blows = [
        Blow(when="write", rank=0, number=WRITES // 2, everybody=asynchronous),
        Blow(when="load", rank=1, seconds=0.01, everybody=not asynchronous),
        Blow(when="write", rank=2, number=3),
    ]
    assert survive(tmp_path / "run", blows, expected, asynchronous=asynchronous) == len(blows)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(70))
def test_runs_survive_kills_at_any_moment(seed: int, tmp_path: Path, expected: list[float]) -> None:
    """Three blows each: 210 in all."""
    source = random.Random(seed)
    blows = [draw(source) for _ in range(3)]
    survive(tmp_path / "run", blows, expected, asynchronous=bool(seed % 2))

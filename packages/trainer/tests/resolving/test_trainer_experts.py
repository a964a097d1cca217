"""Settings of a mixture of experts, and what a rank will hold of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.trainer.commands.main import run

SETTINGS = """
[run]
name = "text"
steps = 2
global_batch = 4
directory = "{directory}"
[data]
plugin = "jsonl"
path = "{directory}/train.jsonl"
[modules.language]
plugin = "decoder"
ranks = "0-3"
config = {{ hidden = 256, layers = 1, heads = 2, experts = 16, expert_intermediate = 512 }}
"""
EXPERTS = 16 * (3 * 256 * 512 * 16 + 256 * 512 * 4) / 2**20
"""MiB of all experts: sixteen bytes for each number, and the gradient of one of their three weights as it is made."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A settings file of a model nearly all of whose numbers are its experts', over four lanes."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 4)
    path = tmp_path / "text.toml"
    path.write_text(SETTINGS.format(directory=tmp_path))
    return str(path)


def _held(file: str, capsys: pytest.CaptureFixture[str], *overrides: str) -> list[float]:
    assert run(["check", file, *overrides]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "about " in line]
    return [float(line.partition("about ")[2].split()[0]) for line in lines]


@pytest.mark.parametrize(
    ("axes", "experts", "others"),
    [
        (("modules.language.ep=2",), 1 / 2, 1.0),
        (("modules.language.ep=4",), 1 / 4, 1.0),
        (("modules.language.ep=2", "modules.language.etp=2"), 1 / 4, 1.0),
        (("modules.language.ep=2", "modules.language.tp=2"), 1 / 2, 1 / 2),
    ],
)
def test_check_counts_the_experts_that_a_rank_holds(
    file: str, capsys: pytest.CaptureFixture[str], axes: tuple[str, ...], experts: float, others: float
) -> None:
    """Spread over ``ep`` and cut over ``etp``, whatever holds for the rest of the model."""
    (whole, *_), spread = _held(file, capsys), _held(file, capsys, *axes)
    assert len(spread) == 4
    for one in spread:
        assert one == pytest.approx(EXPERTS * experts + (whole - EXPERTS) * others, abs=0.2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modules.language.ep=3", "modules.language: expected ep x etp that divides the 4 ranks of a stage"),
        ("modules.language.config.experts=6", "modules.language.ep: expected a divisor of experts = 6, got 4."),
        (
            "modules.language.config.experts=0",
            "modules.language.config.expert_intermediate: expected 0, since the model",
        ),
        (
            'modules.language.config.router_score="tanh"',
            "modules.language.config.router_score: expected one of 'softmax', 'sigmoid', got 'tanh'.",
        ),
    ],
)
def test_settings_of_experts_are_refused_by_path(
    file: str, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    """Before launch, with what was expected."""
    assert run(["check", file, "modules.language.ep=4", override]) == 2
    assert message in capsys.readouterr().err

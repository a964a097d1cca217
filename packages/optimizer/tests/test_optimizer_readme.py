"""The README's programs run as they stand."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def _run_script(_rank: int, script: str) -> list[float]:
    """Run a program that `torchrun` would start, in a group that exists; return the losses that it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - the README is ours
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed.getvalue())]


def test_optimizer_readme_script(run_ranks: Callable[..., list[Any]]) -> None:
    """A plain model has the same losses with one, two and three lanes, without our trainer."""
    (script,) = re.findall(r"```python\n([^`]*init_process_group.*?)```", README, re.DOTALL)
    for line in ('dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"):
        assert line in script
        script = script.replace(line, "")
    losses = {lanes: run_ranks(lanes, _run_script, script)[0] for lanes in (1, 2, 3)}
    assert len(losses[1]) == 8
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert losses[3] == pytest.approx(losses[1], rel=1e-4)


def test_optimizer_readme_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """Learning rates are those that the comment says."""
    program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[-1]
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102 - the README is ours
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*  # (.*)$", program, re.MULTILINE)

"""Evaluations between steps and of checkpoints, where parameters are spread over lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from cases import Modules
from jobs import make_job
from resuming import check_trajectory, evaluation_loss, run_and_evaluate, run_steps
from tables import world_of
from test_oracle import SP, on
from test_resume import settings_of

from mimo.hooks import ConfigError
from mimo.testing import Pool

LAYOUTS: dict[str, Modules] = {
    "dp4": {"vision": on(0, 3), "language": on(0, 3)},
    "tp2 dp2": {"vision": on(0, 2), "language": on(0, 3, tp=2, **SP)},
    "pp2 dp2": {"vision": on(0, 3, pp=2), "language": on(0, 3, pp=2)},
    "ep2": {"vision": on(0, 1), "language": on(0, 3, tp=2, ep=2)},
}


@attrs.frozen
class How:
    """What is spread, over how many lanes."""

    layout: str
    shard: str
    lanes: int = 0

    def settings(self, directory: Path) -> dict[str, Any]:
        """Return a run of six steps in ``directory``."""
        found = settings_of(LAYOUTS[self.layout], directory)
        found["optimizer"] |= {"plugin": "distributed", "shard": self.shard, "shard_lanes": self.lanes}
        return found


@pytest.mark.parametrize("how", [How("tp2 dp2", "optimizer"), How("pp2 dp2", "gradients"), How("ep2", "full")], ids=str)
def test_evaluation_changes_nothing(how: How, tmp_path: Path, pool: Pool) -> None:
    """After each step it gathers what the next one gathers again: all is the same to the bit."""
    settings = how.settings(tmp_path)
    with_evaluation = pool.run(world_of(settings), run_and_evaluate, settings)
    straight = pool.run(world_of(settings), run_steps, settings, 1, 6, "")
    check_trajectory(with_evaluation, straight, exactly=True)


def test_a_checkpoint_is_evaluated_on_fewer_lanes_than_it_was_trained_on(tmp_path: Path, pool: Pool) -> None:
    """Over how many lanes copies are spread is the training's; elsewhere as many of them as there are."""
    settings = How("dp4", "optimizer", 2).settings(tmp_path)
    alone = {
        **settings,
        "modules": {name: {**keys, "ranks": [0], "dp": 1} for name, keys in settings["modules"].items()},
    }
    four, one = (pool.run(world_of(each), evaluation_loss, each) for each in (settings, alone))
    assert one == pytest.approx(four[:1], rel=1e-6)


@pytest.mark.soak
def test_compiled_layers_evaluate_to_the_same(tmp_path: Path, pool: Pool) -> None:
    """Without gradients they have graphs of their own."""
    settings = settings_of({"vision": on(0, 0), "language": on(0, 0)}, tmp_path)
    compiled = {**settings, "run": {**settings["run"], "compile": True, "compile_backend": "aot_eager"}}
    eager, found = (pool.run(1, evaluation_loss, each) for each in (settings, compiled))
    assert found == pytest.approx(eager, rel=1e-6)


def test_lanes_that_copies_do_not_divide_are_refused(tmp_path: Path) -> None:
    """Before anything is launched, by the setting's path."""
    text = (
        "modules.language.optimizer.shard_lanes: expected a divisor of its 4 data lanes (dp 4 x cp 1), or 0 for all, "
        "got 3. Set optimizer.shard_lanes, or that of modules.language.optimizer, to one that divides them."
    )
    settings = How("dp4", "full").settings(tmp_path)
    settings["modules"]["language"]["optimizer"] = {"shard_lanes": 3}
    with pytest.raises(ConfigError) as error:
        make_job(settings)
    assert str(error.value) == text

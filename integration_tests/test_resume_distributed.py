"""What one optimizer plugin saved, another one goes on with, in the same layout or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from jobs import make_job
from pool import Pool
from resuming import check_trajectory, evaluation_loss, run_and_evaluate, run_and_save, run_steps
from tables import world_of
from test_oracle import SP, Modules, on
from test_resume import settings_of

from mimo.hooks import ConfigError

LAYOUTS: dict[str, Modules] = {
    "dp4": {"vision": on(0, 3), "language": on(0, 3)},
    "dp2": {"vision": on(0, 1), "language": on(0, 1)},
    "tp2 dp2": {"vision": on(0, 2), "language": on(0, 3, tp=2, **SP)},
    "pp2 dp2": {"vision": on(0, 3, pp=2), "language": on(0, 3, pp=2)},
    "ep4": {"vision": on(0, 0), "language": on(0, 3, ep=4)},
    "ep2": {"vision": on(0, 1), "language": on(0, 3, tp=2, ep=2)},
}


@attrs.frozen
class How:
    """A plugin with what it spreads, over how many lanes."""

    layout: str
    shard: str = ""
    lanes: int = 0

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of ``[optimizer]``."""
        if not self.shard:
            return {"plugin": "adamw"}
        return {"plugin": "distributed", "shard": self.shard, "shard_lanes": self.lanes}

    def settings(self, directory: Path) -> dict[str, Any]:
        """Return a run of six steps in ``directory``."""
        found = settings_of(LAYOUTS[self.layout], directory)
        found["optimizer"] |= self.keys
        return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (How("dp4", "optimizer"), How("dp4", "optimizer")),
        (How("pp2 dp2", "full"), How("pp2 dp2", "full")),
        (How("dp4", "gradients", 2), How("dp4", "gradients")),
        (How("tp2 dp2", "optimizer"), How("dp2", "optimizer")),
        (How("ep4", "optimizer"), How("ep2", "full")),
        (How("tp2 dp2", "full"), How("dp4")),
        (How("ep2"), How("ep2", "optimizer")),
        pytest.param(How("dp4", "optimizer"), How("dp2", "full"), marks=pytest.mark.soak),
        pytest.param(How("pp2 dp2"), How("dp4", "gradients", 2), marks=pytest.mark.soak),
        pytest.param(How("pp2 dp2", "gradients"), How("dp2", "optimizer"), marks=pytest.mark.soak),
        pytest.param(How("ep2", "gradients"), How("ep4", "optimizer"), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_six_steps_equal_three_by_one_plugin_and_three_by_another(
    before: How, after: How, tmp_path: Path, pool: Pool
) -> None:
    """The same plugin in the same layout goes on to the bit, another within the first law."""
    first, second = before.settings(tmp_path), after.settings(tmp_path)
    pool.run(world_of(first), run_and_save, first)
    went_on = pool.run(world_of(second), run_steps, second, 4, 6, str(tmp_path))
    straight = pool.run(world_of(second), run_steps, second, 1, 6, "")
    check_trajectory(went_on, straight, exactly=before == after)


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

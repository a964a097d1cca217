"""The oracle where parameters have settings of their own: by pattern and module, and norms that they are clipped by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import Modules, in_turn
from jobs import CPU, make_job
from oracle import Oracle
from resuming import check_trajectory, run_and_save, run_steps
from tables import Table, scheduled, table
from test_oracle import CLEAR_SEEDS, SP, on

from mimo.hooks import StepInfo
from mimo.testing import Pool
from mimo.trainer import Trainer

CLIP = 0.05
"""Below the norms of all clip groups here."""
RULES: Mapping[str, Table] = {
    "patterns": {
        "optimizer": {
            "patterns": {
                "*norm.*": {"weight_decay": 0.0, "lr": 2e-3},
                "language.layers.0.*": {"betas": [0.5, 0.9]},
                "*.bias": {"weight_decay": 0.3},
            }
        },
        "vision": {
            "lr": 5e-4,
            "lr_warmup_steps": 2,
            "patterns": {"projector.mlp.up.*": {"lr": 2e-3, "lr_warmup_steps": 3, "weight_decay": 0.0}},
        },
    },
    "a norm a module": {"optimizer": {"clip_by": "module"}},
    "named clip groups": {
        "optimizer": {
            "patterns": {"*.projector.*": {"clip_group": "ends"}, "language.head.*": {"clip_group": "ends"}},
            "clip_groups": {"ends": CLIP / 5},
        },
        "vision": {"clip_group": "eyes"},
    },
}
THINGS: Mapping[str, Table] = {
    "*.query.*": {"lr": 2e-3},
    "*.key.*": {"lr_warmup_steps": 3},
    "*.value.*": {"lr_schedule": "cosine", "lr_min": 1e-4},
    "*.attention.output.*": {"lr_schedule": "linear", "lr_decay_steps": 2, "lr_min": 2e-4, "lr_warmup_steps": 1},
    "*layers.*.mlp.up.*": {"weight_decay": 0.5},
    "*layers.*.mlp.down.*": {"betas": [0.5, 0.8]},
    "*norm.*": {"eps": 3e-4},
    "*projector.mlp.up.*": {"clip_group": "own"},
    "*embedding.*": {"clip_group": "own"},
    "*projector.mlp.down.*": {"plugin": "cpu-offload", "fraction": 0.5},
    "*head.*": {"plugin": "cpu-offload", "fraction": 0.5},
}
"""What a pattern may have for itself, one thing at a time."""
WHOLE: Table = {
    "plugin": "cpu-offload",
    "fraction": 0.5,
    "lr": 2e-3,
    "lr_schedule": "cosine",
    "lr_min": 2e-4,
    "lr_warmup_steps": 1,
    "lr_stable_steps": 1,
    "lr_decay_steps": 4,
    "weight_decay": 0.5,
    "betas": [0.5, 0.8],
    "eps": 3e-4,
    "clip_group": "own",
}
"""What a module may have for itself, at once."""
OWN: Mapping[str, Mapping[str, Table]] = {
    "patterns": {"optimizer": {"patterns": THINGS}},
    "patterns of a module": {
        "language": {"patterns": {glob: keys for glob, keys in THINGS.items() if "proj" not in glob}}
    },
    "a module": {"vision": WHOLE},
    "the other module": {"language": WHOLE},
}
LAYOUTS: dict[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "overlapping, lanes 3 to 2": {"vision": on(0, 2), "language": on(2, 5, tp=2)},
    "colocated, pipelines in both": {"vision": on(0, 1, pp=2), "language": on(0, 1, pp=2)},
    "vision tp3, language cp2 tp2 sp": {"vision": on(0, 2, tp=3), "language": on(1, 4, cp=2, tp=2, **SP)},
    "language tp2 pp2 dp2": {"vision": on(0, 2), "language": on(0, 7, tp=2, pp=2)},
}


def settings_of(modules: Modules, rules: str, **more: Any) -> Table:
    """Return settings whose optimizers differ by module and by pattern."""
    count = 4 if 24 % (modules["language"]["dp"] * 4) == 0 else 2
    settings = scheduled(table(modules, microbatches=count, **more), "1f1b")
    given = RULES[rules]
    settings["optimizer"] = {**settings["optimizer"], "clip": CLIP, **given["optimizer"]}
    settings["modules"]["vision"] = {**settings["modules"]["vision"], "optimizer": given.get("vision", {})}
    return settings


@pytest.mark.parametrize(("rules", "layout"), in_turn(RULES, list(LAYOUTS)))
def test_each_parameter_is_stepped_as_its_settings_say(rules: str, layout: str, oracle: Oracle) -> None:
    """Losses, gradients and weights are those of torch's AdamW with a group for each parameter, in every layout."""
    assert oracle.check(settings_of(LAYOUTS[layout], rules)) == ""


@pytest.mark.parametrize(("who", "layout"), in_turn(OWN, list(LAYOUTS)))
def test_each_thing_may_differ_at_each_level(who: str, layout: str, oracle: Oracle) -> None:
    """Plugin, rate, schedule, decay, betas and clip group; under another plugin, what was written for all stays."""
    settings = settings_of(LAYOUTS[layout], "a norm a module")
    settings["optimizer"] |= {"betas": [0.8, 0.95], "clip_groups": {"own": CLIP / 5}, **OWN[who].get("optimizer", {})}
    for name, module in settings["modules"].items():
        module["optimizer"] = OWN[who].get(name, {})
    assert oracle.check(settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("rules", "shard"), in_turn(RULES, ["optimizer", "full", "gradients"]))
def test_patterns_and_norms_work_over_pieces_of_parameters(rules: str, shard: str, oracle: Oracle) -> None:
    """A norm counts each piece once, however a module's parameters are spread over its lanes."""
    settings = settings_of(LAYOUTS["language tp2 pp2 dp2"], rules)
    settings["optimizer"] |= {"plugin": "distributed", "shard": shard}
    assert oracle.check(settings) == ""


@pytest.mark.parametrize(("plugin", "layout"), in_turn(["distributed", "adamw"], list(LAYOUTS)[1:3]))
def test_one_module_may_have_several_plugins(plugin: str, layout: str, oracle: Oracle) -> None:
    """Each steps its own parameters, which lie as the module's plugin says; what is written for all is for each."""
    settings = settings_of(LAYOUTS[layout], "a norm a module")
    patterns = {"*.mlp.*": {"plugin": "cpu-offload", "fraction": 0.5}, "*.bias": {"plugin": "adamw"}}
    settings["optimizer"] |= {"plugin": plugin, "patterns": patterns}
    assert oracle.check(settings) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("rules", "seed"), [("patterns", 45), ("a norm a module", 60), ("named clip groups", 85)])
def test_experts_and_tied_embeddings_count_once_in_their_clip_group(rules: str, seed: int, oracle: Oracle) -> None:
    """Experts lie on ranks of their own, and a tied embedding on two stages; from these seeds on choices are clear."""
    language, _ = CLEAR_SEEDS["softmax"]
    modules = {"vision": on(0, 1), "language": on(0, 7, pp=2, ep=2, etp=2)}
    keys = {**language, "tied": rules != "named clip groups"}
    assert oracle.check(oracle.clear(settings_of(modules, rules, language=keys, seed=seed))) == ""


@pytest.mark.parametrize("rules", ["patterns", "named clip groups"])
def test_a_run_resumes_in_another_layout(rules: str, pool: Pool, tmp_path: Path) -> None:
    """State has the names of parameters, whichever rule they follow."""
    settings = settings_of(LAYOUTS["overlapping, lanes 3 to 2"], rules)
    settings["run"] = {**settings["run"], "directory": str(tmp_path / "run"), "steps": 6}
    other = settings_of(LAYOUTS["alone"], rules)
    other["run"] = {**other["run"], "steps": 6}
    pool.run(6, run_and_save, settings)
    went_on = pool.run(1, run_steps, other, 4, 6, str(tmp_path / "run"))
    check_trajectory(went_on, pool.run(1, run_steps, other, 1, 6, ""), exactly=False)


def train_one_step(rank: int, settings: Table) -> StepInfo:
    """Return what a step came to."""
    return Trainer(make_job(settings), rank=rank, device=CPU).train(1)


def test_metrics_tell_norms_of_named_groups_and_zero_gradients(pool: Pool) -> None:
    """The same in every layout; a token that does not come up leaves its row of the embedding at zero."""
    settings = settings_of(LAYOUTS["alone"], "named clip groups")
    other = settings_of(LAYOUTS["overlapping, lanes 3 to 2"], "named clip groups")
    logged = {"logging": {"zero_gradients": True}}
    (alone,) = pool.run(1, train_one_step, {**settings, **logged})
    for info in pool.run(6, train_one_step, {**other, **logged}):
        assert info.group_norms == pytest.approx(alone.group_norms, rel=1e-5)
        assert info.zero_gradients == alone.zero_gradients
    assert alone.group_norms.keys() == {"ends", "eyes"}
    assert alone.zero_gradients.keys() == {"vision", "language"}
    assert alone.zero_gradients["language"] > 0
    (silent,) = pool.run(1, train_one_step, settings)
    assert not silent.zero_gradients

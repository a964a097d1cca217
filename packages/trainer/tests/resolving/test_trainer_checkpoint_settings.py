"""A checkpoint's settings on one process."""

from __future__ import annotations

from typing import Any

from mimo.trainer.config.toml import make_settings
from mimo.trainer.resolving.checkpoint_settings import on_one_process

CONFIG: dict[str, Any] = {
    "run": {
        "name": "r",
        "steps": 2,
        "global_batch": 8,
        "micro_batch": 2,
        "world": 6,
        "evaluation_batch": 0,
        "compile": True,
        "compile_backend": "aot_eager",
    },
    "data": {"plugin": "jsonl"},
    "modules": {
        "vision": {"plugin": "vit", "ranks": "0-1", "dp": 2, "frozen": ["encoder"], "batch_factor": 3},
        "language": {
            "plugin": "decoder",
            "ranks": "2-5",
            "tp": 2,
            "cp": 2,
            "ep": 2,
            "etp": 2,
            "sequence_parallel": True,
            "chunks": 2,
            "recompute": "full",
        },
    },
    "schedule": {"plugin": "1f1b", "unlikely": 3},
    "checkpoint": {"interval": 5, "load": "latest"},
}


def test_every_module_is_whole_on_rank_0() -> None:
    """What is no matter of layout stays."""
    settings = make_settings(on_one_process(CONFIG, "evaluate"))
    assert (settings.run.world, settings.run.compile) == (0, False)
    assert settings.evaluation_batch(1) == 8
    assert settings.checkpoint.load == "none"
    for module in settings.modules.values():
        assert (module.ranks, module.pp, module.dp, module.tp, module.sequence_parallel) == ((0,), 1, 0, 1, False)
        assert module.cp == module.ep == module.etp == module.chunks == module.batch_factor == 1
        assert module.recompute == "none"
    assert settings.modules["vision"].frozen == ("encoder",)
    assert settings.schedule.config == {}


def test_generation_has_batches_of_one() -> None:
    """There is one prompt."""
    settings = make_settings(on_one_process(CONFIG, "generate"))
    assert (settings.run.global_batch, settings.run.micro_batch, settings.evaluation_batch(1)) == (1, 1, 1)


def test_a_step_by_tokens_is_one_microbatch() -> None:
    """So many lanes with so many microbatches each would be many on one; evaluations have as many samples as before."""
    run = {"name": "r", "steps": 2, "batch_tokens": 4096, "micro_tokens": 64, "world": 6, "evaluation_batch": 12}
    table = {**CONFIG, "run": run, "data": {"plugin": "jsonl", "max_tokens": 64, "longer": "drop"}}
    settings = make_settings(on_one_process(table, "evaluate"))
    assert (settings.run.batch_tokens, settings.run.micro_tokens) == (4096, 4096)
    assert (settings.evaluation_batch(1), settings.data.longer) == (12, "drop")
    settings = make_settings(on_one_process(table, "generate"))
    assert (settings.run.batch_tokens, settings.evaluation_batch(1), settings.data.longer) == (0, 1, "cut")


def test_overrides_can_lay_it_out_again() -> None:
    """Without overrides it is one process."""
    settings = make_settings(on_one_process(CONFIG, "evaluate"), ["modules.vision.ranks=0-2"])
    assert settings.modules["vision"].ranks == (0, 1, 2)

"""Settings of a checkpoint for one process, as evaluation and generation use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mimo.checkpoint import read_manifest
from mimo.hooks import CheckpointError
from mimo.trainer.config.renamed import with_new_names
from mimo.trainer.config.settings import LANGUAGE, Settings
from mimo.trainer.config.toml import make_settings
from mimo.trainer.resolving.resolve import Purpose

_LAYOUT = (
    *("ranks", "pp", "dp", "cp", "tp", "ep", "etp", "sequence_parallel"),
    *("chunks", "batch_factor", "prefetch", "recompute", "loss_rows", "round_rows"),
)
_COMPILING = ("compile", "compile_backend")


def settings_of(step_folder: Path, overrides: Iterable[str], purpose: Purpose, *, tp: int = 1, pp: int = 1) -> Settings:
    """Return the settings that a checkpoint was saved with, on one process unless sizes or overrides say otherwise.

    Args:
        step_folder: the checkpoint.
        overrides: settings that differ, as key=value.
        purpose: what for.
        tp: processes that share the tensors of a stage of the language model; those of the first each encode all items.
        pp: stages of the language model, each of ``tp`` processes.

    Raises:
        CheckpointError: the manifest is damaged, or no run has settings in it, as of weights that were imported alone.
        ConfigError: an override is wrong.
    """
    config = with_new_names(read_manifest(step_folder).config)
    if "run" not in config:
        raise CheckpointError(
            str(step_folder),
            expected="a checkpoint with the settings of a run",
            got="one of weights alone",
            fix="Import them with --config FILE, or begin a run with them: mimo train FILE --finetune.",
        )
    table = on_one_process(config, purpose)
    if tp != 1 or pp != 1:
        modules = {name: {**module, "ranks": f"0-{tp - 1}"} for name, module in table["modules"].items()}
        modules[LANGUAGE] = {**modules[LANGUAGE], "ranks": f"0-{tp * pp - 1}", "tp": tp, "pp": pp}
        table = {**table, "modules": modules}
    return make_settings(table, overrides)


def on_one_process(table: Mapping[str, Any], purpose: Purpose) -> Mapping[str, Any]:
    """Return a resolved config with every module whole on rank 0; generation has batches of one sample.

    The schedule goes with the layout that it was chosen for: it may ask for stages and microbatches that aren't there.
    Nothing is compiled: that takes longer than a few forwards do, and a compiler, which may not be here either.
    """
    run = {**{key: value for key, value in table["run"].items() if key not in _COMPILING}, "world": 0}
    if purpose == "generate":
        run |= {"global_batch": 1, "micro_batch": 1, "evaluation_batch": 1, "batch_tokens": 0, "micro_tokens": 0}
        table = {**table, "data": {**table["data"], "longer": "cut"}}
    elif run.get("batch_tokens"):
        run["micro_tokens"] = run["batch_tokens"]  # nothing is trained: no plan of many microbatches is to be made
    modules = {
        name: {**{key: value for key, value in module.items() if key not in _LAYOUT}, "ranks": "0"}
        for name, module in table["modules"].items()
    }
    return {**table, "run": run, "modules": modules, "schedule": {}, "checkpoint": {}, "load": {}, "rerun": {}}

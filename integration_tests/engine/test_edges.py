"""What a user meets at the edges: other number formats, changed batches, names that clash, prompts that don't fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from jobs import CPU, find, make_job
from resuming import run_and_save
from tables import table
from torch import Tensor, nn

from mimo.hooks import Common, ConfigError, Kind, PluginError, StateTree
from mimo.model import ENCODERS, EncoderSpec
from mimo.testing import Pool
from mimo.trainer import Trainer, generate, prompt_of, read_settings, resolve
from mimo.trainer.runtime import LoadSettings, RunState, Source, check_source, save_step, step_folder

ALONE = {"vision": {"ranks": [0], "dp": 1}, "language": {"ranks": [0], "dp": 1}}


class Mean(nn.Module):
    """A third-party encoder: one row an item, of its mean, in another number format than ours."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(1, hidden)
        self.hidden, self.dtype = hidden, dtype

    def forward(self, items: list[dict[str, Tensor]]) -> Tensor:
        """Return [items, hidden]."""
        means = torch.stack([item["pixels"].mean() for item in items]) if items else torch.zeros(0)
        rows: Tensor = self.linear(means[:, None])
        return rows.to(self.dtype)


def run_format(rank: int, modules: dict[str, Any], dtype: torch.dtype) -> float:
    """Return the loss of the first step with an encoder that returns rows of ``dtype``."""

    def find_mean(kind: Kind[Any], name: str, where: str) -> Any:
        found = find(kind, name, where)
        if kind is not ENCODERS:
            return found
        assert isinstance(found, EncoderSpec)
        build = lambda _config, hidden: Mean(hidden, dtype)  # noqa: E731  # of this one case
        return attrs.evolve(
            found, build=build, rows=lambda *_: 1, grid=None, parts={}, stages=None, tensor=None, context=None
        )

    job = resolve(read_settings(table(modules, microbatches=2)), find=find_mean)
    return Trainer(job, rank=rank, device=CPU).train(1).loss


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_any_number_format_cross_the_boundary(dtype: torch.dtype, pool: Pool) -> None:
    """An encoder that computes in float64 or bfloat16 gives the same loss on ranks of its own as on one."""
    (alone,) = pool.run(1, run_format, ALONE, dtype)
    disjoint = {"vision": {"ranks": [0, 1], "dp": 2}, "language": {"ranks": [1, 2, 3], "dp": 3}}
    for loss in pool.run(4, run_format, disjoint, dtype):
        assert loss == pytest.approx(alone, rel=1e-6)


def run_clash(_rank: int, directory: str) -> None:
    """Save beside a part that is called like a module, and one that is called like a part of one."""

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def state(self) -> StateTree:
            return {"count": Common(1)}

        def load(self, tree: StateTree) -> None:
            raise AssertionError(tree)

    settings = table(ALONE)
    settings["run"]["directory"] = directory
    trainer = Trainer(make_job(settings), rank=0, device=CPU)
    text = "expected a name without dots that no module and nothing of ours has"
    for name in ("vision", "vision.more"):
        with pytest.raises(PluginError, match=f"state '{name}': {text}"):
            save_step(trainer, RunState(), [Part(name)], 1)


def test_a_plugin_cannot_take_a_modules_place_in_a_checkpoint(tmp_path: Path, pool: Pool) -> None:
    """State of a lifecycle plugin that is named like a module is refused instead of replacing its weights."""
    pool.run(1, run_clash, str(tmp_path))


def run_long_prompt(_rank: int) -> None:
    """Write on from prompts that are too long, and from none."""
    settings = table(ALONE)
    settings["data"]["max_tokens"] = 6
    job = make_job(settings)
    trainer = Trainer(job, rank=0, device=CPU)
    with pytest.raises(ConfigError, match=r"the prompt: expected at most data\.max_tokens = 6 tokens, .* got more"):
        generate(trainer, prompt_of(job, "w1 w2 w3 w4 w5 w6 w7"), max_tokens=2)
    with pytest.raises(ConfigError, match=r"the prompt: .* got none"):
        generate(trainer, prompt_of(job, ""), max_tokens=2)
    assert len(generate(trainer, prompt_of(job, "w1 w2"), max_tokens=2).split()) <= 2


def test_a_prompt_that_does_not_fit_is_refused(pool: Pool) -> None:
    """It is never silently cut."""
    pool.run(1, run_long_prompt)


def test_a_resumed_run_keeps_its_batch(tmp_path: Path, pool: Pool) -> None:
    """Another global_batch would skip samples or repeat them."""
    settings = table(ALONE)
    settings["run"]["directory"] = str(tmp_path)
    pool.run(1, run_and_save, settings)
    folder = step_folder(tmp_path)
    source = Source.of(folder, LoadSettings())
    assert source.first_step == 4
    check_source(make_job(settings), source)
    settings["run"] |= {"global_batch": 48}
    with pytest.raises(ConfigError, match=r"run\.global_batch: expected 24, as in the run that .* got 48"):
        check_source(make_job(settings), source)

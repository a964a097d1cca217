"""Whole image-text models go in, are trained as the library would in any layout, and come out for it to load."""

from __future__ import annotations

import random
import shutil
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import here
from published_images import FOLDERS
from tables import Table
from whole_models import (
    checkpoint_tensors,
    gradient_differences,
    library_step,
    save,
    tune,
    write_conversations,
    write_whole,
)

from mimo.testing import Pool
from mimo.testing.comparison import tensors_of
from mimo.trainer import read_settings, resolve

QUICK = frozenset({"llava_next", "qwen2_5_vl", "idefics3", "mistral3"})
"""Tiles with rows between them, patches with places, text between rows: what differs most."""
VISION = (
    {"ranks": "0"},
    {"ranks": "0-1"},
    {"ranks": "0-1", "tp": 2},
    {"ranks": "1-3", "tp": 1},
    {"ranks": "0", "recompute": "full"},
)
LANGUAGE = (
    {"ranks": "2-3", "pp": 2},
    {"ranks": "1-2", "tp": 2},
    {"ranks": "0-1", "cp": 2},
    {"ranks": "0-3", "tp": 2, "pp": 2},
    {"ranks": "0-2"},
    {"ranks": "1-2", "tp": 2, "sequence_parallel": True},
)


def in_soak(every: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return parameters, of which all but the quick ones are for the soak."""
    return [pytest.param(one, marks=() if one in quick else pytest.mark.soak) for one in every]


@pytest.fixture(scope="module", params=in_soak(FOLDERS, QUICK))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return one model, imported, and what the library makes of a step with it."""
    return Whole(request.param, tmp_path_factory.mktemp("whole"))


class Whole:
    """A published folder, its import, and the library's step.

    Args:
        name: of one of `FOLDERS`.
        path: a folder for all.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        model = write_whole(name, self.there, num_hidden_layers=2)
        data = write_conversations(path / "data")
        self.printed = here(
            "checkpoint", "import-hf", self.there, "--out", path / "ours", "--settings", path / "my.toml"
        ).printed
        settings = tomllib.loads((path / "my.toml").read_text())
        settings["data"]["path"] = str(data)
        settings["run"] |= {"steps": 1, "micro_batch": 2, "directory": str(path / "run")}
        settings["load"] = {"finetune": str(path / "ours")}
        self.settings: Table = settings
        self.loss, gradients = library_step(model, resolve(read_settings(settings)))
        # Gradients in the place of weights go by the same names.
        shutil.copytree(self.there, path / "gradients", ignore=shutil.ignore_patterns("*.safetensors*"))
        save(gradients, path / "gradients")
        here("checkpoint", "import-hf", path / "gradients", "--out", path / "named")
        self.gradients: Mapping[str, torch.Tensor] = checkpoint_tensors(path / "named")

    @property
    def there(self) -> Path:
        """The published folder."""
        return self.path / "there"

    def spread(self, vision: Mapping[str, Any], language: Mapping[str, Any]) -> Table:
        """Return the settings with the keys of two grids."""
        modules = self.settings["modules"]
        lanes = _lanes(language)
        return {
            **self.settings,
            "run": {**self.settings["run"], "global_batch": 8, "micro_batch": 8 // (4 * lanes) or 1},
            "modules": {"vision": {**modules["vision"], **vision}, "language": {**modules["language"], **language}},
        }


def _lanes(grid: Mapping[str, Any]) -> int:
    first, _, last = grid["ranks"].partition("-")
    size = int(grid.get("tp", 1)) * int(grid.get("pp", 1)) * int(grid.get("cp", 1))
    return (int(last or first) - int(first) + 1) // size


def _world(settings: Table) -> int:
    return 1 + max(int(module["ranks"].rpartition("-")[2]) for module in settings["modules"].values())


def test_one_process_computes_what_the_library_computes(whole: Whole, pool: Pool) -> None:
    """Loss and every gradient of ragged conversations with images, in four microbatches of two samples."""
    assert gradient_differences(whole.loss, whole.gradients, pool.run(1, tune, whole.settings)) == []


@pytest.mark.parametrize("number", in_soak(range(3), {0}))
def test_drawn_layouts_compute_what_the_library_computes(whole: Whole, pool: Pool, number: int) -> None:
    """Of grids that are drawn by the model's name, all in turn."""
    draw = random.Random(f"{whole.name} {number}")
    language = dict(draw.choice([grid for grid in LANGUAGE if _lanes(grid) in {1, 2, 4}]))
    settings = whole.spread(draw.choice(VISION), language)
    found = gradient_differences(whole.loss, whole.gradients, pool.run(_world(settings), tune, settings))
    assert found == [], settings["modules"]


def test_a_whole_model_comes_back_to_the_bit(whole: Whole, tmp_path: Path) -> None:
    """With all files beside it, and the library's class loads it with nothing missing."""
    exported = here("checkpoint", "export-hf", whole.path / "ours", tmp_path / "back")
    assert "vision as " in exported.printed
    before, after = tensors_of(whole.there), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].equal(tensor) for name, tensor in after.items())
    assert {file.name for file in whole.there.iterdir()} == {file.name for file in (tmp_path / "back").iterdir()}

"""A whole image-text model: its published folder, what is imported of it, the library's step, and layouts."""

from __future__ import annotations

import random
import shutil
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bounds import gradient_bound
from commands import here
from oracle import Outcome
from tables import Table
from torch import Tensor
from whole_models import (
    SampleLogits,
    checkpoint_tensors,
    deep_layers,
    gradient_differences,
    library_inputs,
    library_step,
    load,
    save,
    write_conversations,
    write_whole,
)

from mimo.model.testing import try_axes
from mimo.testing.comparison import tensors_of
from mimo.trainer import Job, generate, open_checkpoint, prompt_of, read_settings, resolve

VISION: Sequence[Mapping[str, Any]] = (
    {"ranks": "0"},
    {"ranks": "0-1"},
    {"ranks": "0-1", "tp": 2},
    {"ranks": "1-3", "tp": 1},
    {"ranks": "0", "recompute": "full"},
)
LANGUAGE: Sequence[Mapping[str, Any]] = (
    {"ranks": "2-3", "pp": 2},
    {"ranks": "1-2", "tp": 2},
    {"ranks": "0-1", "cp": 2},
    {"ranks": "0-3", "tp": 2, "pp": 2},
    {"ranks": "1-2", "tp": 2, "sequence_parallel": True},
)
LAYOUTS = 3
"""How many are drawn of each model."""
BOUND = 1e-5
"""Of losses, relative, and of logits, over the largest of a sample."""
CLEAR = 1e-4
"""By how much the largest logit exceeds the next one where rounding can't exchange them."""


class RefusedImportError(Exception):
    """A folder isn't imported; the message says why."""


class Whole:
    """A published folder, its import, and the library's step.

    Args:
        name: of one of `FOLDERS`.
        path: a folder for all.

    Raises:
        RefusedImportError: it isn't imported.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.rides = bool(deep_layers(name))
        model = write_whole(name, self.there)
        data = write_conversations(path / "data")
        words = ("checkpoint", "import-hf", self.there, "--out", path / "ours", "--settings", path / "my.toml")
        ended = here(*words)
        if ended.code:
            raise RefusedImportError(ended.err.strip().removeprefix("mimo: "))
        self.printed = ended.printed
        settings = tomllib.loads((path / "my.toml").read_text())
        settings["data"]["path"] = str(data)
        settings["run"] |= {"steps": 1, "micro_batch": 2, "directory": str(path / "run")}
        settings["load"] = {"finetune": str(path / "ours")}
        self.settings: Table = settings
        job = resolve(read_settings(settings))
        self.bound = gradient_bound(job.language.config)
        self.refused = _refused(job)
        self.loss, self.logits, gradients = library_step(model, job)
        # Gradients in the place of weights go by the same names.
        shutil.copytree(self.there, path / "gradients", ignore=shutil.ignore_patterns("*.safetensors*"))
        save(gradients, path / "gradients")
        here("checkpoint", "import-hf", path / "gradients", "--out", path / "named")
        self.gradients: Mapping[str, Tensor] = checkpoint_tensors(path / "named")

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

    def layouts(self) -> list[tuple[str, Table]]:
        """Return different layouts, drawn by the model's name, in words and as settings; none that its parts refuse.

        The first has stages where rows ride between them.
        """
        is_ours = self.settings["modules"]["language"]["plugin"] == "decoder"
        languages = [grid for grid in LANGUAGE if is_ours or "sequence_parallel" not in grid]
        pairs = [pair for pair in product(VISION, languages) if not any(map(_is_refused, pair, self.refused))]
        draw, drawn = random.Random(self.name), list[tuple[Mapping[str, Any], Mapping[str, Any]]]()
        if self.rides:
            drawn = draw.sample([pair for pair in pairs if pair[1].get("pp", 1) > 1], 1)
        drawn += draw.sample([pair for pair in pairs if pair not in drawn], LAYOUTS - len(drawn))
        return [
            (f"vision {_in_words(vision)}, language {_in_words(language)}", self.spread(vision, language))
            for vision, language in drawn
        ]

    def differences(self, found: Sequence[tuple[Outcome, Sequence[SampleLogits]]]) -> list[str]:
        """Return how a step differs from the library's, by what each rank has found."""
        steps, logits = zip(*found, strict=True)
        wrong = gradient_differences(self.loss, self.gradients, steps, bound=self.bound)
        difference = self.logits_difference(chain.from_iterable(logits))
        return [*wrong, *([] if difference < BOUND else [f"logits differ by {difference:.1e}"])]

    def logits_difference(self, found: Iterable[SampleLogits]) -> float:
        """Return by how much logits differ from the library's, over the largest of a sample; none may be missing."""
        worst = [torch.full((len(logits),), torch.inf) for logits in self.logits]
        for one in found:
            expected = self.logits[one.sample]
            gaps = (one.rows - expected[one.positions]).abs().amax(1) / expected.abs().max()
            before = worst[one.sample][one.positions]
            worst[one.sample][one.positions] = torch.where(before.isinf(), gaps, before.maximum(gaps))
        return float(torch.cat(worst).max())

    def export(self, back: Path) -> Mapping[str, Tensor]:
        """Export what was imported, and return the tensors.

        Raises:
            AssertionError: they, or the files beside them, aren't those of the published folder, or for the library
                something is missing in it.
        """
        exported = here("checkpoint", "export-hf", self.path / "ours", back)
        assert "vision as " in exported.printed
        before, after = tensors_of(self.there), tensors_of(back)
        assert before.keys() == after.keys()
        assert all(before[name].equal(tensor) for name, tensor in after.items())
        assert {file.name for file in self.there.iterdir()} == {file.name for file in back.iterdir()}
        _, loading = load(back)
        assert not any(loading.values()), loading
        return after


def world_of_grids(settings: Table) -> int:
    """Return how many ranks the grids of settings take."""
    return 1 + max(int(module["ranks"].rpartition("-")[2]) for module in settings["modules"].values())


def _refused(job: Job) -> tuple[Collection[str], Collection[str]]:
    """Return the axes along which the encoder can't be split, and the language model."""
    (encoder,) = job.encoders
    hidden = job.row_width(job.language)
    parts = [(encoder.spec, encoder.config, hidden), (job.language.spec, job.language.config, hidden)]
    vision, language = (
        {axis for axis, why in try_axes(spec, config, hidden=hidden).items() if why} for spec, config, hidden in parts
    )
    return vision, language


def _is_refused(grid: Mapping[str, Any], axes: Collection[str]) -> bool:
    return any(grid.get(axis, 1) > 1 for axis in axes)


def _lanes(grid: Mapping[str, Any]) -> int:
    first, _, last = grid["ranks"].partition("-")
    size = int(grid.get("tp", 1)) * int(grid.get("pp", 1)) * int(grid.get("cp", 1))
    return (int(last or first) - int(first) + 1) // size


def _in_words(grid: Mapping[str, Any]) -> str:
    axes = {"dp": _lanes(grid), **{key: one for key, one in grid.items() if key in {"tp", "pp", "cp"}}}
    said = [f"{axis}={size}" for axis, size in axes.items() if size > 1]
    return " ".join([*said, *(key for key in grid if key not in {*axes, "ranks"})]) or "alone"


def greedy_logits(
    rank: int, ours: Path, model: Any, image: Path, text: str, tokens: int
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the logits [V] of each token that is generated after an image, by a checkpoint and by the library.

    The library is shown what it has chosen itself, whole each time, up to the token that ends a text.

    Args:
        rank: 0.
        ours: the checkpoint.
        model: of the library.
        image: a file.
        text: of the prompt, with ``<image>`` in it.
        tokens: most that are generated.
    """
    trainer = open_checkpoint(ours)
    job, recorded = trainer.job, list[Tensor]()
    prompt = prompt_of(job, text, {"image": [image]})
    kind: Any = type(next(one for one in trainer.programs if one.module.name == job.language.name))
    logits_of = kind.logits

    def record(program: Any, hidden: Tensor) -> Tensor:
        found: Tensor = logits_of(program, hidden)
        recorded.append(found[0, : job.tokenizer.vocabulary].clone())
        return found

    with patch.object(kind, "logits", record):
        generate(trainer, prompt, max_tokens=tokens)
    layout, theirs = job.lay_out(prompt, 0), list[Tensor]()
    given = library_inputs(model, job, layout, [raw for _, raw in prompt.items])
    with torch.no_grad():
        while len(theirs) < tokens:
            theirs.append(model(**given).logits[0, -1])
            chosen = theirs[-1].argmax()
            if int(chosen) == job.tokenizer.end:
                break
            given["input_ids"] = torch.cat([given["input_ids"], chosen.view(1, 1)], 1)
            given |= {
                key: torch.cat([one, torch.zeros_like(one[:, :1])], 1)
                for key, one in given.items()
                if key.endswith("token_type_ids")
            }
    return recorded, theirs

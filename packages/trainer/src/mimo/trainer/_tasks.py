"""What each rank does for a command, and how a command starts it: as itself if forked, from plain data otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs
from PIL import Image

from mimo.checkpoint import read_manifest
from mimo.data import load_image
from mimo.hooks import ConfigError
from mimo.trainer._config import make_settings
from mimo.trainer._console import show_evaluation
from mimo.trainer._inference import evaluate, generate, load_model, prompt_of
from mimo.trainer._launch import choose_device, launch, start_method
from mimo.trainer._place import Place, is_joining, with_slurm
from mimo.trainer._resolve import Purpose, resolve
from mimo.trainer._resolved import Job
from mimo.trainer._structure import unstructure
from mimo.trainer._watch import Terms

Entry: TypeAlias = Callable[[Job, Place], None]


@attrs.frozen(kw_only=True)
class Prompt:
    """What `mimo generate` goes on from: images, and a text with placeholders for them (empty: those alone)."""

    images: tuple[Image.Image, ...]
    text: str
    max_tokens: int


def run_job(job: Job, entry: Entry, *, purpose: Purpose, directory: Path | None = None, stops: bool = False) -> int:
    """Run ``entry`` in every rank of a job, and return the exit code.

    Args:
        job: what is run.
        entry: a function, or a `functools.partial` of one, that a fresh interpreter can import.
        purpose: for which the job was resolved.
        directory: run directory, where the reason of a failure is written.
        stops: whether ``entry`` ends by itself after SIGTERM.
    """
    device = choose_device(job.settings.run.device, job.world)
    method = start_method(device)
    task = partial(entry, job)
    if method == "spawn" and not is_joining(with_slurm(os.environ)):
        # A fresh interpreter gets plain data: jobs hold functions of plugins, which need not be picklable.
        task = partial(_resolve_again, unstructure(job.settings), purpose, entry)
    terms = Terms(timeout=job.settings.run.timeout, stops=stops, directory=directory)
    return launch(task, world=job.world, device=device, method=method, terms=terms)


def evaluate_checkpoint(step_folder: Path, job: Job, place: Place) -> None:
    """Evaluate a checkpoint and print the result.

    Raises:
        ConfigError: there is nothing held out to evaluate on.
    """
    info = evaluate(job, place, step_folder, read_manifest(step_folder).step)
    if info is None:
        raise ConfigError(
            "data", expected="held-out samples", got="none", fix="For jsonl data, give data.evaluation_path=FILE."
        )
    if place.rank == 0:
        print(show_evaluation(info))


def generate_text(step_folder: Path, prompt: Prompt, job: Job, place: Place) -> None:
    """Print what a checkpoint writes after a prompt."""
    engine = load_model(job, place, step_folder)
    print(generate(engine, prompt_of(job, prompt.text, prompt.images), max_tokens=prompt.max_tokens))


def read_image(path: Path) -> Image.Image:
    """Return an image of the prompt.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return load_image(path)
    except ValueError as error:
        raise ConfigError("--image", expected="an image that can be read", got=f"{str(path)!r}: {error}") from error


def _resolve_again(table: Mapping[str, Any], purpose: Purpose, entry: Entry, place: Place) -> None:
    entry(resolve(make_settings(table), purpose=purpose), place)

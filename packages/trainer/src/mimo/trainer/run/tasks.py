"""The work of each rank for a command, and how a command starts it: by forking, or from plain data when spawned."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs
from PIL import Image

from mimo.checkpoint import read_manifest
from mimo.data import load_image
from mimo.hooks import ConfigError
from mimo.launch import Device, ProcessInfo, RunLock, choose_device, find_gpus, is_joining, with_slurm
from mimo.launch.runtime import Fault, OnFailure, Terms, launch, start_method
from mimo.trainer.config.structure import unstructure
from mimo.trainer.config.toml import make_settings
from mimo.trainer.decoding.decode import generate
from mimo.trainer.decoding.prompt import prompt_of
from mimo.trainer.decoding.sampling import Sampling
from mimo.trainer.job.job import Job
from mimo.trainer.report.console import show_evaluation, show_text
from mimo.trainer.resolving.resolve import Purpose, resolve
from mimo.trainer.resume.attempt import forget_failure, note_failure
from mimo.trainer.run.inference import evaluate, load_model

Entry: TypeAlias = Callable[[Job, ProcessInfo], object]


@attrs.frozen(kw_only=True)
class GenerateRequest:
    """The prompt and options of `mimo generate`.

    Args:
        items: raw, by modality, in the order of their placeholders.
        text: with a placeholder for each of them; empty: those alone.
        max_tokens: largest number of tokens to generate.
        sampling: how they are chosen.
    """

    items: Mapping[str, Sequence[Any]]
    text: str
    max_tokens: int
    sampling: Sampling


def run_job(
    job: Job,
    entry: Entry,
    *,
    purpose: Purpose,
    enter: Callable[[], RunLock] | None = None,
    stops: bool = False,
    on_failure: OnFailure | None = None,
) -> int:
    """Run ``entry`` in every rank of a job, and return the exit code.

    Args:
        job: what is run.
        entry: a function, or a `functools.partial` of one, that a fresh interpreter can import.
        purpose: for which the job was resolved.
        enter: holds the run directory, where then the reason of a failure is written too; called once, by the
            launcher, or by rank 0 where something else has launched the ranks. None: nothing is written.
        stops: whether ``entry`` ends by itself after SIGTERM.
        on_failure: is handed what ended the job, after the run directory has it.
    """
    environ = with_slurm(os.environ)
    device: Device = "cpu"
    if job.settings.run.device != "cpu":  # else a driver that was asked for GPUs would be in every forked process
        device = choose_device(job.settings.run.device, job.world, gpus=find_gpus(), environ=environ)
    method = start_method(device)
    task = partial(entry, job)
    if method == "spawn" and not is_joining(environ):
        # A fresh interpreter gets plain data: jobs hold functions of plugins, which need not be picklable.
        task = partial(_resolve_again, unstructure(job.settings), purpose, entry)
    terms = Terms(timeout=job.settings.run.timeout, stops=stops, on_failure=on_failure)
    if enter is not None:
        terms = attrs.evolve(
            terms,
            on_failure=partial(_note_failure, job.directory, on_failure),
            on_start=partial(forget_failure, job.directory),
        )
    how = partial(launch, task, world=job.world, device=device, method=method)
    if enter is None or is_joining(environ):
        return how(terms=attrs.evolve(terms, enter=enter))
    with enter() as lock:
        return how(terms=attrs.evolve(terms, lock=lock))


def evaluate_checkpoint(step_folder: Path, job: Job, process: ProcessInfo) -> None:
    """Evaluate a checkpoint and print the result.

    Raises:
        ConfigError: there is nothing held out to evaluate on.
    """
    info = evaluate(job, process, step_folder, read_manifest(step_folder).step)
    if info is None:
        raise ConfigError(
            "data", expected="held-out samples", got="none", fix="For jsonl data, give data.evaluation_path=FILE."
        )
    if process.rank == 0:
        print(show_evaluation(info))


def generate_text(step_folder: Path, request: GenerateRequest, job: Job, process: ProcessInfo) -> None:
    """Print what a checkpoint writes after a prompt, as it is written; the first rank does."""
    trainer = load_model(job, process, step_folder)
    shows = process.rank == 0
    process.heartbeat.enter("generation")
    with warnings.catch_warnings():
        if not shows:  # what an encoder says of an item
            warnings.simplefilter("ignore")
        generate(
            trainer,
            prompt_of(job, request.text, request.items),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            on_text=show_text if shows else lambda _piece: None,
        )
    process.heartbeat.enter("")
    if shows:
        show_text("\n")


def read_items(
    images: Sequence[Path], clips: Sequence[Path], others: Sequence[str]
) -> Mapping[str, Sequence[Image.Image | Path]]:
    """Return the items of a prompt by modality: images decoded, all else as the path of its file.

    Args:
        images: files.
        clips: files.
        others: ``MODALITY=FILE`` each.

    Raises:
        ConfigError: an image cannot be read, or one of the others is written otherwise.
    """
    items: dict[str, list[Image.Image | Path]] = {}
    for path in images:
        items.setdefault("image", []).append(_read_image(path))
    for path in clips:
        items.setdefault("audio", []).append(path)
    for text in others:
        modality, found, file = text.partition("=")
        if not (modality and found and file):
            raise ConfigError("--item", expected="MODALITY=FILE", got=repr(text))
        items.setdefault(modality, []).append(Path(file))
    return items


def _read_image(path: Path) -> Image.Image:
    try:
        return load_image(path)
    except ValueError as error:
        raise ConfigError("--image", expected="an image that can be read", got=f"{str(path)!r}: {error}") from error


def _note_failure(directory: Path, on_failure: OnFailure | None, fault: Fault) -> None:
    with contextlib.suppress(OSError):  # a full disk, which may be the fault itself
        note_failure(directory, fault)
    if on_failure is not None:
        on_failure(fault)


def _resolve_again(table: Mapping[str, Any], purpose: Purpose, entry: Entry, process: ProcessInfo) -> object:
    return entry(resolve(make_settings(table), purpose=purpose), process)

"""The work of each rank for `mimo generate`: one prompt, printed as it is continued, or a file of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from PIL import Image

from mimo.data import load_image
from mimo.hooks import ConfigError
from mimo.launch import ProcessInfo
from mimo.trainer.decoding.decode import answer_questions
from mimo.trainer.decoding.made_files import MadeFiles
from mimo.trainer.decoding.prompt import lay_out_prompt, prompt_of
from mimo.trainer.decoding.prompt_file import AnswerLines, PromptFile, new_file
from mimo.trainer.decoding.running import Question
from mimo.trainer.decoding.sampling import Sampling
from mimo.trainer.job.job import Job
from mimo.trainer.report.console import show_text
from mimo.trainer.run.inference import load_model


@attrs.frozen(kw_only=True)
class GenerateRequest:
    """The prompt and options of `mimo generate`.

    Args:
        items: raw, by modality, in the order of their placeholders.
        text: with a placeholder for each of them; empty: those alone.
        max_tokens: largest number of tokens to generate.
        sampling: how they are chosen.
        as_json: whether the answer is printed as a line of JSON instead of its text as it comes.
        made: folder for what is made beside text; None: one in that of the run.
    """

    items: Mapping[str, Sequence[Any]]
    text: str
    max_tokens: int
    sampling: Sampling
    as_json: bool
    made: Path | None = None


@attrs.frozen(kw_only=True)
class FileRequest:
    """The file of prompts and options of `mimo generate --prompts`.

    Args:
        prompts: the file.
        out: the file of answers, None for none.
        max_tokens: largest number of tokens to generate after each.
        batch: how many are continued at once.
        sampling: how tokens are chosen.
        as_json: whether the answers are printed.
        made: see `GenerateRequest`.
    """

    prompts: Path
    out: Path | None
    max_tokens: int
    batch: int
    sampling: Sampling
    as_json: bool
    made: Path | None = None


def generate_text(step_folder: Path, request: GenerateRequest, job: Job, process: ProcessInfo) -> None:
    """Print what a checkpoint writes after a prompt, as it is written or as JSON; the first rank does."""
    trainer = load_model(job, process, step_folder)
    shows = process.rank == 0
    with _generating(process):
        prompt = prompt_of(job, request.text, request.items)
        question = Question(number=0, dataset=prompt, layout=lay_out_prompt(job, prompt))
        (answer,) = answer_questions(
            trainer,
            iter([question]),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            on_text=lambda _running, piece: show_text(piece if shows and not request.as_json else ""),
        )
    if not shows:
        return
    files = MadeFiles.of(job, step_folder, request.made) if job.generators else None
    if request.as_json:
        AnswerLines(show_text, lambda number: number + 1, files).add(answer)
    else:
        show_text("\n")
        for file in files.add(answer) if files is not None else ():
            show_text(f"{file}\n")


def answer_file(step_folder: Path, request: FileRequest, job: Job, process: ProcessInfo) -> None:
    """Write what a checkpoint writes after each prompt of a file; the first rank does."""
    prompts = PromptFile.of(job, request.prompts)
    trainer = load_model(job, process, step_folder)
    with contextlib.ExitStack() as stack:
        writers: list[Callable[[str], None]] = []
        if process.rank == 0:
            writers += [stack.enter_context(new_file(request.out))] if request.out is not None else []
            writers += [show_text] if request.as_json else []
        files = MadeFiles.of(job, step_folder, request.made) if job.generators and writers else None
        lines = [AnswerLines(write, prompts.lines.number, files) for write in writers]
        with _generating(process):
            for answer in answer_questions(
                trainer,
                prompts.questions(),
                max_tokens=request.max_tokens,
                batch=request.batch,
                sampling=request.sampling,
            ):
                for each in lines:
                    each.add(answer)


@contextlib.contextmanager
def _generating(process: ProcessInfo) -> Iterator[None]:
    """Say what the rank does, and let the first one alone warn."""
    process.heartbeat.enter("generation")
    with warnings.catch_warnings():
        if process.rank:  # what an encoder says of an item
            warnings.simplefilter("ignore")
        yield
    process.heartbeat.enter("")


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

"""``mimo generate``: print the text that a checkpoint generates from a prompt, or answer a file of prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mimo.hooks import ConfigError

_BATCH = 8


def generate(
    checkpoint: Path,
    /,
    *,
    image: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    audio: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    item: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    text: Annotated[str, Parameter(show_default=False)] = "",
    message: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    prompts: Annotated[Path | None, Parameter(show_default=False)] = None,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    batch: Annotated[int | None, Parameter(show_default=False)] = None,
    made: Annotated[Path | None, Parameter(show_default=False)] = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: Annotated[int | None, Parameter(show_default=False)] = None,
    tp: int = 1,
    pp: int = 1,
) -> int:
    """Print what a checkpoint writes after images, sounds and text, piece by piece as it is written.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        image: images of the prompt, in the order of their placeholders.
        audio: clips of the prompt, likewise.
        item: items of other modalities, likewise, as MODALITY=FILE.
        text: the prompt, with a placeholder such as <image> for each image; left out, the items alone.
        message: instead of a text what is said in a conversation: by the user, or by user, assistant and user in turn.
        prompts: instead of these a jsonl file of prompts, as the jsonl dataset has samples.
        out: a new file for the answers to it, a line of JSON each.
        batch: how many prompts of the file are continued at once; 8 if left out.
        made: a new folder for pictures and whatever else the model makes; left out, a new one in that of the run.
        json: prints each answer as a line of JSON, and nothing else.
        max_tokens: most tokens to write.
        temperature: divides the logits before a token is drawn; 0 for the likeliest one.
        top_p: draws among the likeliest tokens that together have this probability; 1 for all.
        top_k: draws among so many of the likeliest tokens; 0 for all.
        min_p: draws among tokens at least this share as likely as the likeliest; 0 for all.
        repetition_penalty: above 1 makes tokens that were there before less likely; 1 for none.
        seed: of the draws, and of the noise that items are made from; left out, that of the run.
        tp: processes over which each stage of the language model is split.
        pp: stages of the language model; with several prompts they work on different ones at once.
    """
    import attrs

    from mimo.launch import with_slurm
    from mimo.trainer.decoding.made_files import check_folder
    from mimo.trainer.decoding.prompt import chat_text, lay_out_prompt, prompt_of
    from mimo.trainer.decoding.prompt_file import PromptFile
    from mimo.trainer.decoding.sampling import Sampling, nothing_drawn
    from mimo.trainer.job.generation_layout import check_layout
    from mimo.trainer.resolving.checkpoint_settings import settings_of
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_world
    from mimo.trainer.resume.resume_point import step_folder
    from mimo.trainer.run.generation import FileRequest, GenerateRequest, answer_file, generate_text, read_items
    from mimo.trainer.run.tasks import run_job

    counts = {"max-tokens": max_tokens, "batch": _BATCH if batch is None else batch, "tp": tp, "pp": pp}
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"--{name}", expected="1 or more", got=repr(value))
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed or 0,
    )
    given = {"--image": image, "--audio": audio, "--item": item, "--text": text, "--message": message}
    _check_choice([name for name, value in given.items() if value], prompts, out, batch=batch, json=json)
    items = read_items(image, audio, item)
    folder = step_folder(checkpoint)
    job = resolve(settings_of(folder, (), "generate", tp=tp, pp=pp), purpose="generate")
    check_layout(job)
    if seed is not None and not temperature and not job.generators:
        raise nothing_drawn("--seed")
    if made is not None:
        check_folder(made, makes=[module.modality for module in job.generators])
    if seed is None:
        sampling = attrs.evolve(sampling, seed=job.settings.run.seed)
    if prompts is None:
        text = chat_text(job, message, items) if message else text
        lay_out_prompt(job, prompt_of(job, text, items))
        one = GenerateRequest(items=items, text=text, max_tokens=max_tokens, sampling=sampling, as_json=json, made=made)
        entry = partial(generate_text, folder, one)
    else:
        for _ in PromptFile.of(job, prompts).questions():  # all are looked at before anything is launched
            pass
        many = FileRequest(
            prompts=prompts,
            out=out,
            max_tokens=max_tokens,
            batch=batch or _BATCH,
            sampling=sampling,
            as_json=json,
            made=made,
        )
        entry = partial(answer_file, folder, many)
    check_world(job.world, with_slurm(os.environ))
    return run_job(job, entry, purpose="generate")


def _check_choice(
    given: Sequence[str], prompts: Path | None, out: Path | None, *, batch: int | None, json: bool
) -> None:
    """Refuse options that don't go together.

    Args:
        given: options of a single prompt.
        prompts: a file of prompts.
        out: a file for their answers.
        batch: how many of them are continued at once, if said.
        json: whether answers are printed.
    """
    from mimo.trainer.decoding.prompt_file import check_out

    if prompts is None:
        if not given:
            raise ConfigError(
                "--text", expected="a prompt", got="nothing", fix="Give --text, --message, an item, or --prompts."
            )
        if {"--text", "--message"} <= set(given):
            raise ConfigError("--message", expected="either --text or --message", got="both")
        for name, value in (("--out", out), ("--batch", batch)):
            if value is not None:
                raise ConfigError(name, expected="--prompts beside it", got="none", fix="Give a file of prompts.")
    elif given:
        raise ConfigError("--prompts", expected="either a file of prompts or one prompt", got=f"{given[0]} too")
    elif out is not None:
        check_out(out)
    elif not json:
        raise ConfigError(
            "--prompts", expected="--out FILE beside it, or --json", got="neither", fix="Say where answers go."
        )

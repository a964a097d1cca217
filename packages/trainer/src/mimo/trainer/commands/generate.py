"""``mimo generate``: print the text that a checkpoint generates from a prompt."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mimo.hooks import ConfigError


def generate(
    checkpoint: Path,
    /,
    *,
    image: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    audio: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    item: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    text: Annotated[str, Parameter(show_default=False)] = "",
    message: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: Annotated[int | None, Parameter(show_default=False)] = None,
    tp: int = 1,
) -> int:
    """Print what a checkpoint writes after images, sounds and text, piece by piece as it is written.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        image: images of the prompt, in the order of their placeholders.
        audio: clips of the prompt, likewise.
        item: items of other modalities, likewise, as MODALITY=FILE.
        text: the prompt, with a placeholder such as <image> for each image; left out, the items alone.
        message: instead of a text what is said in a conversation: by the user, or by user, assistant and user in turn.
        max_tokens: most tokens to write.
        temperature: divides the logits before a token is drawn; 0 for the likeliest one.
        top_p: draws among the likeliest tokens that together have this probability; 1 for all.
        top_k: draws among so many of the likeliest tokens; 0 for all.
        min_p: draws among tokens at least this share as likely as the likeliest; 0 for all.
        repetition_penalty: makes tokens less likely that were there before, above 1; 1 for none.
        seed: of the draws; left out, that of the run.
        tp: processes over which the language model is split.
    """
    import attrs

    from mimo.launch import with_slurm
    from mimo.trainer.decoding.prompt import chat_text, lay_out_prompt, prompt_of
    from mimo.trainer.decoding.sampling import Sampling, nothing_drawn
    from mimo.trainer.resolving.checkpoint_settings import settings_of
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_world
    from mimo.trainer.resume.resume_point import step_folder
    from mimo.trainer.run.tasks import GenerateRequest, generate_text, read_items, run_job

    for name, value in (("max-tokens", max_tokens), ("tp", tp)):
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
    if seed is not None and not temperature:
        raise nothing_drawn("--seed")
    items = read_items(image, audio, item)
    if not items and not text and not message:
        raise ConfigError("--text", expected="a prompt", got="nothing", fix="Give --text, --message, or an item.")
    if text and message:
        raise ConfigError("--message", expected="either --text or --message", got="both")
    folder = step_folder(checkpoint)
    job = resolve(settings_of(folder, (), "generate", tp=tp), purpose="generate")
    text = chat_text(job, message, items) if message else text
    lay_out_prompt(job, prompt_of(job, text, items))
    check_world(job.world, with_slurm(os.environ))
    if seed is None:
        sampling = attrs.evolve(sampling, seed=job.settings.run.seed)
    request = GenerateRequest(items=items, text=text, max_tokens=max_tokens, sampling=sampling)
    return run_job(job, partial(generate_text, folder, request), purpose="generate")

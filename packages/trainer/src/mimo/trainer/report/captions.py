"""The picture of what the model wrote for held-out images."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from mimo.trainer.job.job import Job
from mimo.trainer.report.pictures import CAPTIONS_PICTURE, can_draw, caption_grid
from mimo.trainer.step.programs import Written

SHOWN = 30


def save_captions(job: Job, written: Sequence[Written]) -> None:
    """Draw the first held-out samples that begin with an image, with the caption of each, into the run directory.

    A caption is the argmax at each label given the true tokens before it, up to the end: where it is right, it is what
    greedy writing gives.
    """
    assert job.evaluation is not None
    images: list[Image.Image] = []
    captions: list[str] = []
    right: list[bool] = []
    for sample in written:
        if len(images) == SHOWN:
            break
        raw = job.evaluation.raw(sample.sample, 0) if job.evaluation.infos(sample.sample) else None
        if isinstance(raw, Image.Image):
            end = sample.ids.index(job.tokenizer.end) if job.tokenizer.end in sample.ids else len(sample.ids)
            images.append(raw)
            captions.append(job.tokenizer.decode(sample.ids[:end]))
            right.append(sample.right)
    if images and can_draw():
        caption_grid(job.directory / CAPTIONS_PICTURE, images, captions, right)

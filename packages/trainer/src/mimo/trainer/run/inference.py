"""Evaluation of a checkpoint in any layout, and its weights loaded for generation."""

from __future__ import annotations

from pathlib import Path

import torch

from mimo.hooks import EvaluationInfo
from mimo.launch import ProcessInfo
from mimo.model import LanguageModelSpec
from mimo.trainer.job.job import Job
from mimo.trainer.resume.chain import links_of, load_links
from mimo.trainer.step.trainer import Trainer


def load_model(job: Job, place: ProcessInfo, checkpoint: Path) -> Trainer:
    """Assemble this rank and load the weights, and nothing else, of a step folder.

    They may lack the multi-token prediction layers, which only training uses.
    """
    place.progress.enter("loading the weights")
    trainer = Trainer(
        job, rank=place.rank, device=torch.device(place.device), progress=place.progress, objects=place.objects
    )
    assert isinstance(job.language.spec, LanguageModelSpec)
    mtp = job.language.spec.parts.get("next_tokens", ())
    may_lack = [f"{job.language.name}.{prefix}.*" for prefix in mtp]
    load_links(links_of(checkpoint), trainer.model_state(), rename={}, may_lack=may_lack, group=trainer.objects)
    place.progress.enter("")
    return trainer


def evaluate(job: Job, place: ProcessInfo, checkpoint: Path, step: int) -> EvaluationInfo | None:
    """Evaluate a step folder's weights on the held-out samples; None where the data has none."""
    trainer = load_model(job, place, checkpoint)
    place.progress.enter("evaluation")
    return trainer.evaluate(step)

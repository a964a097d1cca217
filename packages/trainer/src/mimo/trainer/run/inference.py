"""Evaluation of a checkpoint in any layout, and its weights loaded for generation."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch

from mimo.hooks import EvaluationInfo
from mimo.launch import ProcessInfo
from mimo.model import LanguageModelSpec
from mimo.trainer.decoding.answer_settings import AnswerSettings
from mimo.trainer.decoding.scoring import score_answers
from mimo.trainer.job.job import Job
from mimo.trainer.resume.chain import links_of, load_links
from mimo.trainer.step.trainer import Trainer


def load_model(job: Job, process: ProcessInfo, checkpoint: Path) -> Trainer:
    """Assemble this rank and load the weights, and nothing else, of a step folder.

    They may lack the multi-token prediction layers, which only training uses.
    """
    process.heartbeat.enter("loading the weights")
    trainer = Trainer(
        job, rank=process.rank, device=torch.device(process.device), progress=process.heartbeat, objects=process.objects
    )
    assert isinstance(job.language.spec, LanguageModelSpec)
    mtp = job.language.spec.parts.get("next_tokens", ())
    may_lack = [f"{job.language.name}.{prefix}.*" for prefix in mtp]
    load_links(links_of(checkpoint), trainer.model_state(), rename={}, may_lack=may_lack, group=trainer.objects)
    process.heartbeat.enter("")
    return trainer


def evaluate(
    job: Job, process: ProcessInfo, checkpoint: Path, step: int, answers: AnswerSettings | None = None
) -> EvaluationInfo | None:
    """Evaluate a step folder's weights on the held-out samples; None where the data has none.

    Args:
        job: the whole.
        process: this rank.
        checkpoint: the step folder.
        step: whose weights it has.
        answers: how answers are generated and scored; None, or without metrics: none are.
    """
    trainer = load_model(job, process, checkpoint)
    scores: dict[str, float] = {}
    if answers is not None and answers.metrics and job.evaluation is not None:
        process.heartbeat.enter("generation")
        scores = score_answers(trainer, job.evaluation, answers)
    process.heartbeat.enter("evaluation")
    info = trainer.evaluate(step)
    return None if info is None else attrs.evolve(info, answers=scores)

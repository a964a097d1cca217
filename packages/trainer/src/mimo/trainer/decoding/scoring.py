"""Scores of generated answers: the last answer of each held-out sample is generated anew and compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from mimo.data import NO_LABEL, AnswerMetricSpec, Dataset, SampleLayout
from mimo.hooks import ConfigError, PluginError
from mimo.trainer.decoding.answer_settings import AnswerSettings
from mimo.trainer.decoding.decode import answer_questions
from mimo.trainer.decoding.running import Question
from mimo.trainer.job.job import Job
from mimo.trainer.step.trainer import Trainer


def score_answers(trainer: Trainer, dataset: Dataset, settings: AnswerSettings) -> dict[str, float]:
    """Return the mean score of the likeliest answers, by metric; collective.

    Args:
        trainer: see `mimo.trainer.decoding.decode.generate`.
        dataset: the held-out samples, of which weights say what the assistant says.
        settings: how.

    Raises:
        ConfigError: the trainer is laid out otherwise, or no sample has an answer.
        PluginError: a metric returns no finite number.
    """
    specs, job = settings.specs(), trainer.job
    references: dict[int, str] = {}
    questions = _questions(job, dataset, references)
    totals, count = dict.fromkeys((spec.name for spec in specs), 0.0), 0
    for answer in answer_questions(trainer, questions, max_tokens=settings.max_tokens, batch=settings.batch):
        reference = references.pop(answer.number)
        for spec in specs:
            totals[spec.name] += _score(spec, answer.text, reference)
        count += 1
    if not count:
        raise ConfigError(
            "--answers",
            expected="held-out samples with answers, as conversations have them",
            got=f"none in {len(dataset)} samples",
            fix="Evaluate without it, or give data.evaluation_path a file of conversations.",
        )
    return {name: total / count for name, total in totals.items()}


def last_answer(layout: SampleLayout) -> tuple[SampleLayout, Sequence[int]] | None:
    """Return a sample up to its last answer, and the answer's ids; None for one without.

    An answer is what is learned from in a row.
    """
    if layout.weights is None or not layout.targets.any():
        return None
    learned = np.flatnonzero(layout.targets)  # positions, whose next token is the answer's
    stop = int(learned[-1]) + 2
    gaps = np.flatnonzero(np.diff(learned) > 1)
    start = int(learned[gaps[-1] + 1] if len(gaps) else learned[0]) + 1
    tokens = layout.tokens[:start]
    asked = attrs.evolve(
        layout,
        tokens=tokens,
        labels=np.full(start, NO_LABEL, dtype=np.int64),
        items=tuple(item for item in layout.items if item.start < start),
        weights=None,
    )
    return asked, layout.tokens[start:stop].tolist()


def _questions(job: Job, dataset: Dataset, references: dict[int, str]) -> Iterator[Question]:
    """Yield what is asked, and put the true answers by its number into ``references``."""
    for sample in range(len(dataset)):
        found = last_answer(job.lay_out(dataset, sample))
        if found is not None:
            layout, ids = found
            references[sample] = job.tokenizer.decode([token for token in ids if token != job.tokenizer.end])
            yield Question(number=sample, dataset=dataset, layout=layout)


def _score(spec: AnswerMetricSpec, answer: str, reference: str) -> float:
    score = float(spec.score(answer, reference))
    if not np.isfinite(score):
        got = f"{score} of {answer!r} and {reference!r}"
        raise PluginError(f"metric of answers {spec.name!r}", expected="a finite number of two texts", got=got)
    return score

"""Hooks of the kinds that this package owns: datasets, tokenizers and metrics of answers."""

from __future__ import annotations

from mimo.data.samples import AnswerMetricSpec, DatasetSpec, TokenizerSpec
from mimo.hooks import hookspec


@hookspec
def mimo_register_datasets() -> list[DatasetSpec]:  # type: ignore[empty-body]
    """Return the datasets of this plugin (entry-point group ``mimo.datasets``)."""


@hookspec
def mimo_register_tokenizers() -> list[TokenizerSpec]:  # type: ignore[empty-body]
    """Return the tokenizers of this plugin (entry-point group ``mimo.tokenizers``)."""


@hookspec
def mimo_register_answer_metrics() -> list[AnswerMetricSpec]:  # type: ignore[empty-body]
    """Return the metrics of generated answers of this plugin (entry-point group ``mimo.answer_metrics``)."""

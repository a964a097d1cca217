"""Hooks of the kinds that this package owns: datasets and tokenizers."""

from __future__ import annotations

from mimo.data.samples import DatasetSpec, TokenizerSpec
from mimo.hooks import hookspec


@hookspec
def mimo_register_datasets() -> list[DatasetSpec]:  # type: ignore[empty-body]
    """Return the datasets of this plugin (entry-point group ``mimo.datasets``)."""


@hookspec
def mimo_register_tokenizers() -> list[TokenizerSpec]:  # type: ignore[empty-body]
    """Return the tokenizers of this plugin (entry-point group ``mimo.tokenizers``)."""

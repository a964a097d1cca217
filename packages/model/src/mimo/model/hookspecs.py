"""Hooks of the kinds that this package owns: encoders, language models and generators."""

from __future__ import annotations

from mimo.hooks import hookspec
from mimo.model.spec import EncoderSpec, GeneratorSpec, LanguageModelSpec


@hookspec
def mimo_register_encoders() -> list[EncoderSpec]:  # type: ignore[empty-body]
    """Return the encoders of this plugin (entry-point group ``mimo.encoders``)."""


@hookspec
def mimo_register_language_models() -> list[LanguageModelSpec]:  # type: ignore[empty-body]
    """Return the language models of this plugin (entry-point group ``mimo.language_models``)."""


@hookspec
def mimo_register_generators() -> list[GeneratorSpec]:  # type: ignore[empty-body]
    """Return the generators of this plugin (entry-point group ``mimo.generators``)."""

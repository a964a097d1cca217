"""The plugin that registers the tokenizers shipped with this package."""

from __future__ import annotations

from mimo.data.samples import TokenizerSpec
from mimo.data.text import byte_tokenizer, tokenizer_file, word_tokenizer
from mimo.hooks import hookimpl


@hookimpl
def mimo_register_tokenizers() -> list[TokenizerSpec]:
    """Return ``word``, ``byte`` and ``file``."""
    return [word_tokenizer.SPEC, byte_tokenizer.SPEC, tokenizer_file.SPEC]

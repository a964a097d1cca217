"""The plugin that registers the tokenizers shipped with this package."""

from __future__ import annotations

from mimo.data import _byte, _file, _word
from mimo.data._specs import TokenizerSpec
from mimo.hooks import hookimpl


@hookimpl
def mimo_register_tokenizers() -> list[TokenizerSpec]:
    """Return ``word``, ``byte`` and ``file``."""
    return [_word.SPEC, _byte.SPEC, _file.SPEC]

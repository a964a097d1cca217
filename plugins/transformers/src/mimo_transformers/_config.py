"""Settings of ``hf-decoder``: a model type, and the keys of its ``config.json`` as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo_transformers._library import config_of


@attrs.frozen(kw_only=True)
class HfDecoderConfig:
    """A language model of `transformers`.

    Args:
        model_type: of its ``config.json``: ``olmo2``, ``gemma3_text``.
        vocabulary: number of token ids, 0 for that of the tokenizer.
        values: its other keys; what is left out is as in the library.
        null: keys of which the value is none there, which a settings file can't say.
    """

    model_type: str
    vocabulary: int = 0
    null: tuple[str, ...] = ()
    values: Mapping[str, Any] = attrs.field(factory=dict)

    def library(self) -> Any:
        """Return the library's config."""
        values = {**self.values, **dict.fromkeys(self.null)}
        if self.vocabulary:
            values["vocab_size"] = self.vocabulary
        return config_of(self.model_type, values)

    @property
    def hidden(self) -> int:
        """Width of a row."""
        return int(self.library().hidden_size)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.library().num_hidden_layers)

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are one parameter."""
        return bool(self.library().tie_word_embeddings)

    norm_eps = 0.0
    next_tokens = 0
    next_tokens_loss = 0.0

"""Settings of ``hf-decoder``: a model type, and the keys of its ``config.json`` as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mimo.hooks import at_least, check_at_most
from mimo.model import MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from mimo_transformers.family.library import config_of

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_WHERE = "modules.language.config"


@attrs.frozen(kw_only=True)
class HfDecoderConfig:
    """A language model of `transformers`.

    Args:
        model_type: of its ``config.json``: ``olmo2``, ``gemma3_text``.
        vocabulary: number of token ids, 0 for that of the tokenizer.
        values: its other keys; what is left out is as in the library.
        null: keys of which the value is null there, which a settings file can't say; ``rope_parameters.full_attention``
            inside of another.
    """

    model_type: str
    vocabulary: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    null: tuple[str, ...] = ()
    values: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Refuse what is too large."""
        check_at_most(self, {"vocabulary": MAX_VOCABULARY}, where=_WHERE)

    def library(self) -> Any:
        """Return the library's config."""
        values = dict(self.values)
        for path in self.null:
            *tables, key = path.split(".")
            inside = values
            for name in tables:
                inside[name] = inside = dict(inside.get(name) or {})
            inside[key] = None
        if self.vocabulary:
            values["vocab_size"] = self.vocabulary
        return config_of(self.model_type, values)

    @property
    def hidden(self) -> int:
        """Width of a row."""
        library = self.library()
        check_at_most(library, {"hidden_size": MAX_WIDTH}, where=f"{_WHERE}.values")
        return int(library.hidden_size)

    @property
    def layers(self) -> int:
        """Number of layers."""
        library = self.library()
        check_at_most(library, {"num_hidden_layers": MAX_LAYERS}, where=f"{_WHERE}.values")
        return int(library.num_hidden_layers)

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are one parameter."""
        return bool(self.library().tie_word_embeddings)

    @property
    def heads(self) -> Mapping[str, int]:
        """Counts of heads, by the keys that set them; attention of one process has the same."""
        library = self.library()
        counts = {key: getattr(library, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
        return {f"values.{key}": count for key, count in counts.items() if count}

    @property
    def experts(self) -> int:
        """Number of experts of a layer that has some, 0 for none."""
        library = self.library()
        for key in _EXPERTS:
            if isinstance(getattr(library, key, None), int):
                check_at_most(library, {key: MAX_HEADS}, where=f"{_WHERE}.values")
                return int(getattr(library, key))
        return 0

    norm_eps = 0.0
    next_tokens = 0
    next_tokens_loss = 0.0

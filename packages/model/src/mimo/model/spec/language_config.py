"""What the parts of a language model read of its config, and what the stages of all of them agree on. Free of torch.

Any object with these attributes serves; `mimo.model.DecoderConfig` has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from mimo.model.spec.stage import Stage

AXES = ("time", "down", "across")
"""Of the positions of a grid's rows, in the order of ``mrope_section``."""
STAGE_PARTS: Mapping[str, Sequence[str]] = {
    "embedding": ("embedding", "embedding_drop"),
    "layers": ("layers",),
    "head": ("norm", "head"),
    "next_tokens": ("next_tokens",),
}
"""Parts of a `mimo.model.runtime.LanguageStage` that a user can freeze, each with the prefixes of its parameters."""


class StageConfig(Protocol):
    """What `mimo.model.runtime.LanguageStage` reads of a config."""

    @property
    def vocabulary(self) -> int:
        """Ids that it reads and writes."""

    @property
    def hidden(self) -> int:
        """Width of a row."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def norm_eps(self) -> float:
        """Added to mean squares before the root."""

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are one parameter."""

    @property
    def next_tokens(self) -> int:
        """How many tokens after the next each row learns to predict besides."""

    @property
    def next_tokens_loss(self) -> float:
        """Coefficient of their mean loss."""


class AttentionConfig(Protocol):
    """What `mimo.model.runtime.Attention` reads of a config."""

    @property
    def hidden(self) -> int:
        """Width of a row."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def key_value_heads(self) -> int:
        """Key-value heads, a divisor of ``heads``."""

    @property
    def head_width(self) -> int:
        """Width of a head."""

    @property
    def biased_inputs(self) -> bool:
        """Whether query, key and value have biases."""

    @property
    def attention_bias(self) -> bool:
        """Whether the output has a bias."""

    @property
    def query_key_norm(self) -> bool:
        """Whether each head's query and key are normed."""

    @property
    def norm_eps(self) -> float:
        """Added to mean squares before the root."""


class RotaryConfig(Protocol):
    """What `mimo.model.runtime.Rotation` reads of a config."""

    @property
    def head_width(self) -> int:
        """Width of a head, even."""

    @property
    def rope_theta(self) -> float:
        """Base of the wavelengths."""

    @property
    def rope_scaling(self) -> Literal["none", "linear", "llama3"]:
        """How wavelengths are stretched."""

    @property
    def rope_factor(self) -> float:
        """By how much they are stretched."""

    @property
    def rope_low_factor(self) -> float:
        """``llama3`` stretches in full from wavelengths of ``rope_original_tokens`` over this."""

    @property
    def rope_high_factor(self) -> float:
        """``llama3`` leaves those shorter than ``rope_original_tokens`` over this."""

    @property
    def rope_original_tokens(self) -> int:
        """Length of the samples that the model began with."""

    @property
    def mrope_section(self) -> tuple[int, ...]:
        """How many turned pairs of a head follow each of `AXES`; nothing for one position."""

    @property
    def mrope_interleaved(self) -> bool:
        """Whether these pairs take turns, instead of lying together by axis."""


class MlpConfig(Protocol):
    """What `mimo.model.runtime.Mlp` reads of a config."""

    @property
    def hidden(self) -> int:
        """Width of a row."""

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""

    @property
    def mlp_bias(self) -> bool:
        """Whether gate, up and down have biases."""


class RouterLosses(Protocol):
    """What `mimo.model.runtime.add_router_losses` reads of a config."""

    @property
    def balance_loss(self) -> float:
        """Coefficient of the loss on unequal loads within a sample; 0 for none."""

    @property
    def z_loss(self) -> float:
        """Coefficient of the loss on large logits of routers; 0 for none."""


class MoeConfig(MlpConfig, RouterLosses, Protocol):
    """What `mimo.model.runtime.Moe` reads of a config."""

    @property
    def intermediate(self) -> int:
        """Width inside an expert where ``expert_intermediate`` is 0."""

    @property
    def experts(self) -> int:
        """How many there are."""

    @property
    def experts_per_token(self) -> int:
        """How many of them each row goes through."""

    @property
    def expert_intermediate(self) -> int:
        """Width inside an expert, 0 for ``intermediate``."""

    @property
    def shared_intermediate(self) -> int:
        """Width inside the expert that every row goes through, 0 for none."""

    @property
    def router_score(self) -> Literal["softmax", "sigmoid"]:
        """How a router's logits become scores."""

    @property
    def router_normalize(self) -> bool:
        """Whether the scores of the chosen experts are divided by their sum."""

    @property
    def router_scale(self) -> float:
        """Multiplies the sum of the chosen experts."""

    @property
    def router_bias(self) -> bool:
        """Whether there is a bias on the scores, for choosing only."""

    @property
    def expert_bias_rate(self) -> float:
        """By how much such a bias moves each step towards equal loads; 0 for none."""


def ends_share(config: StageConfig) -> bool:
    """Tell whether the last stage of one of our language models reads the embedding that stage 0 owns."""
    return config.tied or config.next_tokens > 0


def has_embedding(config: StageConfig, stage: Stage) -> bool:
    """Tell whether a stage of one of our language models holds the embedding."""
    return stage.is_first or (stage.is_last and ends_share(config))


def stage_parts(config: StageConfig, stage: Stage) -> frozenset[str]:
    """Return the names of the parts that a stage of one of our language models holds, of `STAGE_PARTS`."""
    parts = {"layers"}
    if has_embedding(config, stage):
        parts.add("embedding")
    if stage.is_last:
        parts.add("head")
    if stage.is_last and config.next_tokens:
        parts.add("next_tokens")
    return frozenset(parts)


def load_name(path: str) -> str:
    """Return under what name a `AuxLosses` counts the rows that chose each expert of the layer at a path."""
    return f"{path}.load"

"""The settings of the language model ``hybrid``. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import attrs

from mimo.hooks import ConfigError, at_least, check_at_most
from mimo.model.decoder import DecoderConfig
from mimo.model.spec import MAX_HEADS, MAX_LAYERS, MAX_LEARNED_ROWS, MAX_ROWS, MAX_WIDTH

MAMBA, EXPERTS, ATTENTION, MLP = "ME*-"
"""Letters of a pattern."""
_NAMES = {MAMBA: "Mamba-2", EXPERTS: "mixture of experts", ATTENTION: "attention", MLP: "dense feed-forward"}
_WHERE = "modules.language.config"
_READ_BY: Mapping[str, str] = {
    "heads": ATTENTION,
    "kv_heads": ATTENTION,
    "head_dim": ATTENTION,
    "attention_bias": ATTENTION,
    "intermediate": MLP + EXPERTS,
    "activation": MLP + EXPERTS,
    "mlp_bias": MLP + EXPERTS,
    "experts": EXPERTS,
    "experts_per_token": EXPERTS,
    "expert_intermediate": EXPERTS,
    "shared_intermediate": EXPERTS,
    "router_score": EXPERTS,
    "router_normalize": EXPERTS,
    "router_scale": EXPERTS,
    "router_bias": EXPERTS,
    "expert_bias_rate": EXPERTS,
    "balance_loss": EXPERTS,
    "z_loss": EXPERTS,
    "mamba_heads": MAMBA,
    "mamba_head_dim": MAMBA,
    "mamba_groups": MAMBA,
    "mamba_state": MAMBA,
    "mamba_taps": MAMBA,
    "mamba_chunk": MAMBA,
    "mamba_bias": MAMBA,
    "mamba_conv_bias": MAMBA,
    "mamba_step_low": MAMBA,
    "mamba_step_high": MAMBA,
}
"""In which layers of the pattern each setting is read; those left out, in all."""


_LIMITS: Mapping[str, int] = {
    "mamba_heads": MAX_HEADS,
    "mamba_head_dim": MAX_WIDTH,
    "mamba_groups": MAX_HEADS,
    "mamba_state": MAX_WIDTH,
    "mamba_taps": MAX_LEARNED_ROWS,
    "mamba_chunk": MAX_ROWS,
}
"""Beside those of `DecoderConfig`."""


@attrs.frozen(kw_only=True)
class HybridConfig:
    """Settings of the hybrid, ``modules.language.config``. Those that `DecoderConfig` has too mean the same.

    Args:
        vocabulary: ids that it reads and writes, 0 for the tokenizer's number.
        hidden: width of a row.
        pattern: a letter for each layer, ``MEMEM*EMEM``: ``M`` Mamba-2, ``E`` a mixture of experts, ``*`` attention,
            which knows no positions, ``-`` a dense feed-forward part. All other keys are of some of these only.
        norm_eps: added to mean squares before the root.
        tied: whether input and output embeddings are one parameter.
        heads: query heads.
        kv_heads: key-value heads, a divisor of ``heads``; 0 for as many.
        head_dim: width of a head, even; 0 for ``hidden / heads``.
        attention_bias: whether query, key, value and output have biases.
        intermediate: width inside a dense feed-forward part, and of experts without a width of their own.
        activation: what happens inside of it, ``swiglu`` (a gate with SiLU) or ``relu2`` (squared ReLU, no gate).
        mlp_bias: whether dense layers and the shared expert have biases.
        experts: of each mixture.
        experts_per_token: how many of them each row goes through.
        expert_intermediate: width inside an expert, 0 for ``intermediate``.
        shared_intermediate: width inside an expert that every row goes through beside those that it chose, 0 for none.
        router_score: how a router's logits become scores, ``softmax`` over all experts or the ``sigmoid`` of each.
        router_normalize: whether the scores of the chosen experts are divided by their sum.
        router_scale: multiplies what the chosen experts add up to.
        router_bias: whether there is a bias on the scores, for choosing only, which nothing trains.
        expert_bias_rate: by how much such a bias moves each step towards equal loads; with it there is one.
        balance_loss: coefficient of the loss on unequal loads within a sample; 0 for none.
        z_loss: coefficient of the loss on large logits of routers; 0 for none.
        mamba_heads: heads of a Mamba-2 layer.
        mamba_head_dim: columns of each.
        mamba_groups: of heads that share where their states are written and read, and of columns that are normed
            together; a divisor of ``mamba_heads``.
        mamba_state: columns of the state that each column of a head has.
        mamba_taps: rows that the convolution before it looks at.
        mamba_chunk: rows that are multiplied at once; no other number comes of another.
        mamba_bias: whether the layer's input and output products have biases.
        mamba_conv_bias: whether the convolution has.
        mamba_step_low: no step in time is shorter.
        mamba_step_high: none is longer.
        next_tokens: how many tokens after the next each row learns to predict besides, by a few layers more for each
            (DeepSeek-V3, arXiv:2412.19437, section 2.2). Generation doesn't use them.
        next_tokens_loss: coefficient of their mean loss.
        next_tokens_pattern: a letter for each of these layers, of those that ``pattern`` has; empty for ``*`` or else
            ``M``, then ``E`` or else ``-``, as far as it has them.

    Raises:
        ConfigError: a value is out of range or doesn't go with another.
    """

    vocabulary: int = 0
    hidden: int = 256
    pattern: str = "M-M*"
    norm_eps: float = 1e-5
    tied: bool = False
    heads: int = 8
    kv_heads: int = 0
    head_dim: int = 0
    attention_bias: bool = False
    intermediate: int = 1024
    activation: Literal["swiglu", "relu2"] = "swiglu"
    mlp_bias: bool = False
    experts: int = 0
    experts_per_token: int = 2
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalize: bool = True
    router_scale: float = 1.0
    router_bias: bool = False
    expert_bias_rate: float = 0.0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    mamba_heads: int = attrs.field(default=8, validator=at_least(1, where=_WHERE))
    mamba_head_dim: int = attrs.field(default=64, validator=at_least(1, where=_WHERE))
    mamba_groups: int = attrs.field(default=1, validator=at_least(1, where=_WHERE))
    mamba_state: int = attrs.field(default=128, validator=at_least(1, where=_WHERE))
    mamba_taps: int = attrs.field(default=4, validator=at_least(1, where=_WHERE))
    mamba_chunk: int = attrs.field(default=128, validator=at_least(1, where=_WHERE))
    mamba_bias: bool = False
    mamba_conv_bias: bool = True
    mamba_step_low: float = 0.0
    mamba_step_high: float = math.inf
    next_tokens: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    next_tokens_loss: float = 0.1
    next_tokens_pattern: str = ""

    def __attrs_post_init__(self) -> None:
        """Refuse what is too large, a pattern of other letters, and what doesn't go together."""
        check_at_most(self, _LIMITS, where=_WHERE)
        for key, pattern in (("pattern", self.pattern), ("next_tokens_pattern", self.next_tokens_pattern)):
            if len(pattern) >= MAX_LAYERS:
                raise ConfigError(f"{_WHERE}.{key}", expected=f"fewer than {MAX_LAYERS} layers", got=f"{len(pattern)}")
        if not self.pattern or set(self.pattern) - set(_NAMES):
            known = ", ".join(f"{letter} ({name})" for letter, name in _NAMES.items())
            raise ConfigError(f"{_WHERE}.pattern", expected=f"a letter for each layer: {known}", got=repr(self.pattern))
        for field in attrs.fields(HybridConfig):
            value, readers = getattr(self, field.name), _READ_BY.get(field.name, self.pattern)
            if value != field.default and not set(readers) & set(self.pattern):
                raise ConfigError(
                    f"{_WHERE}.{field.name}",
                    expected=f"{field.default!r}, since the pattern has no {' or '.join(readers)}",
                    got=repr(value),
                    fix="Leave it out.",
                )
        if EXPERTS in self.pattern and not self.experts:
            raise ConfigError(
                f"{_WHERE}.experts",
                expected=f"how many each {EXPERTS} of the pattern has",
                got=repr(self.experts),
                fix=f"Set it, or write {MLP} for a dense layer.",
            )
        if self.mamba_heads % self.mamba_groups:
            raise ConfigError(
                f"{_WHERE}.mamba_groups",
                expected=f"a divisor of mamba_heads = {self.mamba_heads}",
                got=repr(self.mamba_groups),
            )
        if not 0 <= self.mamba_step_low < self.mamba_step_high:
            raise ConfigError(
                f"{_WHERE}.mamba_step_low",
                expected=f"0 or more, and less than mamba_step_high = {self.mamba_step_high}",
                got=repr(self.mamba_step_low),
            )
        self._check_next_tokens()
        _ = self.decoder  # which refuses what it would refuse there

    def _check_next_tokens(self) -> None:
        if set(self.next_tokens_pattern) - set(self.pattern):
            raise ConfigError(
                f"{_WHERE}.next_tokens_pattern",
                expected=f"letters of the pattern {self.pattern!r}",
                got=repr(self.next_tokens_pattern),
            )
        if self.next_tokens_pattern and not self.next_tokens:
            raise ConfigError(
                f"{_WHERE}.next_tokens_pattern",
                expected="nothing, since next_tokens is 0",
                got=repr(self.next_tokens_pattern),
                fix="Leave it out, or set next_tokens.",
            )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.pattern)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Global indices of the layers that have experts."""
        return tuple(index for index, letter in enumerate(self.pattern) if letter == EXPERTS)

    @property
    def next_pattern(self) -> str:
        """A letter for each layer of an MTP module, resolved."""
        kinds = (ATTENTION + MAMBA, EXPERTS + MLP)
        fitting = ([letter for letter in some if letter in self.pattern] for some in kinds)
        return self.next_tokens_pattern or "".join(letters[0] for letters in fitting if letters)

    @property
    def expert_paths(self) -> tuple[str, ...]:
        """Paths of the layers that have experts, those of multi-token prediction included."""
        own = [place for place, letter in enumerate(self.next_pattern) if letter == EXPERTS]
        mtp_paths = [f"next_tokens.{number}.layers.{place}" for number in range(self.next_tokens) for place in own]
        return (*(f"layers.{layer}" for layer in self.expert_layers), *mtp_paths)

    @property
    def decoder(self) -> DecoderConfig:
        """The settings of the parts that a decoder has too: attention, feed-forward, experts."""
        given = {name: getattr(self, name) for name, readers in _READ_BY.items() if readers != MAMBA}
        if ATTENTION not in self.pattern:
            given |= {"heads": 1, "head_dim": 2}
        dense = int(MLP in self.pattern and self.experts > 0)
        return DecoderConfig(
            vocabulary=self.vocabulary,
            hidden=self.hidden,
            norm_eps=self.norm_eps,
            tied=self.tied,
            layers=self.layers + 1,
            dense_layers=dense,
            next_tokens=self.next_tokens,
            next_tokens_loss=self.next_tokens_loss,
            **given,
        )

    @property
    def mamba_width(self) -> int:
        """Columns of all heads of a Mamba-2 layer."""
        return self.mamba_heads * self.mamba_head_dim

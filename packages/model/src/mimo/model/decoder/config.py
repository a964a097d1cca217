"""The settings of the language model ``decoder``. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import attrs

from mimo.hooks import ConfigError, above_zero, at_least, check_at_most, from_zero, is_rate
from mimo.model.spec import AXES, MAX_HEADS, MAX_LAYERS, MAX_ROWS, MAX_VOCABULARY, MAX_WIDTH

_WHERE = "modules.language.config"
_MAX_NEXT_TOKENS = 64


_LIMITS: Mapping[str, int] = {
    "vocabulary": MAX_VOCABULARY,
    "hidden": MAX_WIDTH,
    "layers": MAX_LAYERS,
    "heads": MAX_HEADS,
    "kv_heads": MAX_HEADS,
    "head_dim": MAX_WIDTH,
    "intermediate": MAX_WIDTH,
    "sliding_window": MAX_ROWS,
    "rope_original_tokens": MAX_ROWS,
    "experts": MAX_HEADS,
    "experts_per_token": MAX_HEADS,
    "expert_intermediate": MAX_WIDTH,
    "shared_intermediate": MAX_WIDTH,
    "dense_layers": MAX_LAYERS,
    "next_tokens": _MAX_NEXT_TOKENS,
}
_OF_MIXTURES = frozenset(
    {
        "experts_per_token",
        "expert_intermediate",
        "shared_intermediate",
        "dense_layers",
        "router_score",
        "router_normalize",
        "router_scale",
        "router_bias",
        "expert_bias_rate",
        "balance_loss",
        "z_loss",
    }
)
_OF_SCALING: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "linear": frozenset({"rope_factor"}),
    "llama3": frozenset({"rope_factor", "rope_low_factor", "rope_high_factor", "rope_original_tokens"}),
}


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """Settings of the decoder, ``modules.language.config``.

    Args:
        vocabulary: ids that it reads and writes, 0 for the tokenizer's number.
        hidden: width of a row.
        layers: number of layers.
        heads: query heads.
        kv_heads: key-value heads, a divisor of ``heads``; 0 for as many.
        head_dim: width of a head, even; 0 for ``hidden / heads``.
        intermediate: width inside the feed-forward part of a dense layer, and of experts without a width of their own.
        activation: what happens inside of it, ``swiglu`` (a gate with SiLU) or ``relu2`` (squared ReLU, no gate).
        sliding_window: rows of its sample that each row sees at most, itself and those just before it; 0 for all.
        rope_theta: base of the rotary positions' wavelengths.
        rope_scaling: how wavelengths are stretched for samples longer than those that a model began with: ``linear``
            stretches all by ``rope_factor`` (Chen et al. 2023, arXiv:2306.15595), ``llama3`` only those long beside
            ``rope_original_tokens`` (Llama 3.1, arXiv:2407.21783; its ``rope_scaling``).
        rope_factor: by how much.
        rope_low_factor: ``llama3`` stretches in full from wavelengths of ``rope_original_tokens`` over this.
        rope_high_factor: and leaves those shorter than ``rope_original_tokens`` over this; between them it blends.
        rope_original_tokens: length of the samples that the model began with.
        mrope_section: how many of the turned pairs of a head follow a row's position in time, down and across (Wang et
            al. 2024, arXiv:2409.12191, section 2.1), for encoders that tell the grids of their items; nothing for
            one position.
        mrope_interleaved: whether these pairs take turns, as in Qwen3-VL: of every three the first follows time, the
            others down and across until they have theirs, and all that remain follow time.
        deepstack: how many first layers add rows that encoders deliver beside those of the placeholders, each row of
            ``hidden`` columns followed by so many others (Meng et al. 2024, arXiv:2406.04334; as in Qwen3-VL).
        norm_eps: added to mean squares before the root.
        query_key_norm: whether each head's query and key are normed before they are turned (Henry et al. 2020,
            arXiv:2010.04245, with the root mean square as in Qwen 3).
        attention_bias: whether query, key, value and output have biases.
        qkv_bias: whether query, key and value have biases, and the output none.
        mlp_bias: whether gate, up and down have biases, in dense layers and the shared expert.
        tied: whether input and output embeddings are one parameter.
        experts: of each layer's mixture, 0 for dense layers; all keys below are of mixtures only.
        experts_per_token: how many of them each row goes through.
        expert_intermediate: width inside an expert, 0 for ``intermediate``.
        shared_intermediate: width inside an expert that every row goes through beside those that it chose, 0 for none.
        dense_layers: so many first layers stay dense.
        router_score: how a router's logits become scores, ``softmax`` over all experts or the ``sigmoid`` of each.
        router_normalize: whether the scores of the chosen experts are divided by their sum.
        router_scale: multiplies what the chosen experts add up to.
        router_bias: whether there is a bias on the scores, for choosing only, which nothing trains.
        expert_bias_rate: by how much such a bias moves each step towards equal loads (DeepSeek-V3, arXiv:2412.19437,
            section 2.1.2); with it there is one.
        balance_loss: coefficient of the loss on unequal loads within a sample (the same, equations 17 to 20); 0 for
            none.
        z_loss: coefficient of the loss on large logits of routers (Zoph et al. 2022, arXiv:2202.08906, section 3.3);
            0 for none.
        next_tokens: how many tokens after the next each row learns to predict besides, by a layer more for each, a
            mixture where the last layer is one (DeepSeek-V3, arXiv:2412.19437, section 2.2). Generation doesn't use
            them.
        next_tokens_loss: coefficient of their mean loss.
        hidden_dropout: the rate at which features of what attention and the feed-forward part add to rows are dropped
            in training (Vaswani et al. 2017, section 5.4).
        embedding_dropout: likewise of the rows that enter the first layer, those of encoders among them.

    Raises:
        ConfigError: a value is out of range or doesn't go with another.
    """

    vocabulary: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    hidden: int = attrs.field(default=256, validator=at_least(1, where=_WHERE))
    layers: int = attrs.field(default=4, validator=at_least(1, where=_WHERE))
    heads: int = attrs.field(default=8, validator=at_least(1, where=_WHERE))
    kv_heads: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    head_dim: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    intermediate: int = attrs.field(default=1024, validator=at_least(1, where=_WHERE))
    activation: Literal["swiglu", "relu2"] = "swiglu"
    sliding_window: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    rope_theta: float = attrs.field(default=10000.0, validator=above_zero(where=_WHERE))
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    rope_factor: float = attrs.field(default=1.0, validator=above_zero(where=_WHERE))
    rope_low_factor: float = attrs.field(default=1.0, validator=above_zero(where=_WHERE))
    rope_high_factor: float = attrs.field(default=4.0, validator=above_zero(where=_WHERE))
    rope_original_tokens: int = attrs.field(default=8192, validator=at_least(1, where=_WHERE))
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    deepstack: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    norm_eps: float = attrs.field(default=1e-5, validator=above_zero(where=_WHERE))
    query_key_norm: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    experts: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    experts_per_token: int = attrs.field(default=2, validator=at_least(1, where=_WHERE))
    expert_intermediate: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    shared_intermediate: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    dense_layers: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalize: bool = True
    router_scale: float = attrs.field(default=1.0, validator=above_zero(where=_WHERE))
    router_bias: bool = False
    expert_bias_rate: float = attrs.field(default=0.0, validator=from_zero(where=_WHERE))
    balance_loss: float = attrs.field(default=0.0, validator=from_zero(where=_WHERE))
    z_loss: float = attrs.field(default=0.0, validator=from_zero(where=_WHERE))
    next_tokens: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    next_tokens_loss: float = attrs.field(default=0.1, validator=above_zero(where=_WHERE))
    hidden_dropout: float = attrs.field(default=0.0, validator=is_rate(where=_WHERE))
    embedding_dropout: float = attrs.field(default=0.0, validator=is_rate(where=_WHERE))

    def __attrs_post_init__(self) -> None:
        """Refuse what is too large, and what doesn't go together."""
        check_at_most(self, _LIMITS, where=_WHERE)
        self._check_heads()
        self._check_positions()
        if self.deepstack > self.layers:
            raise ConfigError(
                f"{_WHERE}.deepstack", expected=f"at most layers = {self.layers}", got=repr(self.deepstack)
            )
        if self.experts:
            self._check_experts()
        else:
            self._refuse(_OF_MIXTURES, "the model has no experts", "set experts")
        if not self.next_tokens:
            self._refuse(["next_tokens_loss"], "next_tokens is 0", "set next_tokens")

    def _refuse(self, names: Iterable[str], reason: str, fix: str) -> None:
        """Refuse those of the named settings that are set, though nothing would read them."""
        for field in attrs.fields(DecoderConfig):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise ConfigError(
                    f"{_WHERE}.{field.name}",
                    expected=f"{field.default!r}, since {reason}",
                    got=repr(value),
                    fix=f"Leave it out, or {fix}.",
                )

    def _check_positions(self) -> None:
        read = _OF_SCALING[self.rope_scaling]
        others = _OF_SCALING["llama3"] - read
        self._refuse(others, f"rope_scaling is {self.rope_scaling!r}", "set rope_scaling")
        if "rope_high_factor" in read and self.rope_high_factor <= self.rope_low_factor:
            raise ConfigError(
                f"{_WHERE}.rope_high_factor",
                expected=f"more than rope_low_factor = {self.rope_low_factor}",
                got=repr(self.rope_high_factor),
            )
        pairs, section = self.head_width // 2, self.mrope_section
        if section and (len(section) != len(AXES) or min(section) < 0 or sum(section) != pairs):
            raise ConfigError(
                f"{_WHERE}.mrope_section",
                expected=f"a number of turned pairs for each of {', '.join(AXES)}, together the {pairs} of a head",
                got=repr(list(section)),
            )
        if not section:
            self._refuse(["mrope_interleaved"], "mrope_section is empty", "set mrope_section")
        elif self.mrope_interleaved and any(
            number > (pairs - axis + 2) // 3 for axis, number in enumerate(section) if axis
        ):
            raise ConfigError(
                f"{_WHERE}.mrope_section",
                expected=f"at most {(pairs + 1) // 3} pairs down and {pairs // 3} across, every third of the {pairs} of"
                " a head, as mrope_interleaved says",
                got=repr(list(section)),
            )

    def _check_heads(self) -> None:
        if self.attention_bias and self.qkv_bias:
            raise ConfigError(
                f"{_WHERE}.qkv_bias",
                expected="false beside attention_bias, which gives query, key, value and output their biases",
                got="true",
                fix="Leave one of the two out.",
            )
        if self.heads % self.key_value_heads:
            raise ConfigError(
                f"{_WHERE}.kv_heads",
                expected=f"a divisor of heads = {self.heads}",
                got=repr(self.kv_heads),
                fix="Each key-value head serves equally many query heads; set it to 0 for as many as heads.",
            )
        if self.head_dim == 0 and self.hidden % self.heads:
            raise ConfigError(
                f"{_WHERE}.hidden",
                expected=f"a multiple of heads = {self.heads}, or head_dim set",
                got=repr(self.hidden),
            )
        if self.head_width % 2:
            where, got = ("head_dim", self.head_dim) if self.head_dim else ("hidden", self.hidden)
            raise ConfigError(
                f"{_WHERE}.{where}",
                expected="heads of an even width, since rotary positions turn pairs",
                got=f"{got}, so a width of {self.head_width}",
            )

    def _check_experts(self) -> None:
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"{_WHERE}.experts_per_token",
                expected=f"at most experts = {self.experts}",
                got=repr(self.experts_per_token),
            )
        if self.experts_per_token == 1 and self.router_normalize:
            raise ConfigError(
                f"{_WHERE}.router_normalize",
                expected="false where experts_per_token = 1",
                got="true",
                fix="A single score divided by itself is always 1, and would teach the router nothing.",
            )
        if self.dense_layers >= self.layers:
            raise ConfigError(
                f"{_WHERE}.dense_layers",
                expected=f"fewer than layers = {self.layers}, since the others have experts",
                got=repr(self.dense_layers),
                fix="Set experts to 0 for a dense model.",
            )
        default = attrs.fields(DecoderConfig).intermediate.default
        if self.intermediate != default and self.expert_intermediate and not self.dense_layers:
            raise ConfigError(
                f"{_WHERE}.intermediate",
                expected="nothing, since there are no dense layers, and experts have expert_intermediate",
                got=repr(self.intermediate),
                fix="Leave it out.",
            )
        if self.mlp_bias and not (self.dense_layers or self.shared_intermediate):
            raise ConfigError(
                f"{_WHERE}.mlp_bias",
                expected="false, since experts have no biases, and there are neither dense layers nor a shared expert",
                got="true",
                fix="Leave it out.",
            )

    @property
    def expert_layers(self) -> range:
        """Global indices of the layers that have experts."""
        return range(self.dense_layers, self.layers) if self.experts else range(0)

    @property
    def expert_paths(self) -> tuple[str, ...]:
        """Paths of the layers that have experts, those of multi-token prediction included."""
        mtp_paths = [f"next_tokens.{place}.layers.0" for place in range(self.next_tokens if self.experts else 0)]
        return (*(f"layers.{layer}" for layer in self.expert_layers), *mtp_paths)

    @property
    def gated(self) -> bool:
        """Whether feed-forward parts have a gate."""
        return self.activation == "swiglu"

    @property
    def biased_inputs(self) -> bool:
        """Whether query, key and value have biases."""
        return self.attention_bias or self.qkv_bias

    @property
    def key_value_heads(self) -> int:
        """Key-value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.hidden // self.heads

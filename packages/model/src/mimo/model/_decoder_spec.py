"""The built-in language model ``decoder``: its settings, and how it registers. Free of torch until it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from mimo.hooks import ConfigError, hookimpl
from mimo.model._specs import LanguageModelSpec, Stage, TensorSupport

if TYPE_CHECKING:
    from torch import nn

    from mimo.model.runtime import Split, TensorAxis

_WHERE = "modules.language.config"


def _at_least(low: int) -> Callable[[DecoderConfig, attrs.Attribute[int], int], None]:
    def check(_config: DecoderConfig, attribute: attrs.Attribute[int], value: int) -> None:
        if value < low:
            raise ConfigError(f"{_WHERE}.{attribute.name}", expected=f"a whole number from {low}", got=repr(value))

    return check


def _above_zero(_config: DecoderConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{_WHERE}.{attribute.name}", expected="a number above 0", got=repr(value))


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
        intermediate: width inside the feed-forward part.
        rope_theta: base of the rotary positions' wavelengths.
        norm_eps: added to mean squares before the root.
        attention_bias: whether query, key, value and output have biases.
        mlp_bias: whether gate, up and down have biases.
        tied: whether input and output embeddings are one parameter.

    Raises:
        ConfigError: a value is out of range or doesn't go with another.
    """

    vocabulary: int = attrs.field(default=0, validator=_at_least(0))
    hidden: int = attrs.field(default=256, validator=_at_least(1))
    layers: int = attrs.field(default=4, validator=_at_least(1))
    heads: int = attrs.field(default=8, validator=_at_least(1))
    kv_heads: int = attrs.field(default=0, validator=_at_least(0))
    head_dim: int = attrs.field(default=0, validator=_at_least(0))
    intermediate: int = attrs.field(default=1024, validator=_at_least(1))
    rope_theta: float = attrs.field(default=10000.0, validator=_above_zero)
    norm_eps: float = attrs.field(default=1e-5, validator=_above_zero)
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse heads that don't go together."""
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

    @property
    def key_value_heads(self) -> int:
        """Key-value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim or self.hidden // self.heads


def _build(config: DecoderConfig, stage: Stage) -> nn.Module:
    from mimo.model._decoder import Decoder

    if config.vocabulary == 0:
        raise ConfigError(f"{_WHERE}.vocabulary", expected="a number of ids, or a tokenizer to take it from", got="0")
    return Decoder(config, stage)


def _plan(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo.model._tensor_plan import split_decoder

    return split_decoder(module, axis)


def _stage_parts(config: DecoderConfig, stage: Stage) -> frozenset[str]:
    parts = {"layers"}
    if stage.is_first or (stage.is_last and config.tied):
        parts.add("embedding")
    if stage.is_last:
        parts.add("head")
    return frozenset(parts)


DECODER = LanguageModelSpec(
    name="decoder",
    config=DecoderConfig,
    hidden=lambda config: config.hidden,
    layers=lambda config: config.layers,
    vocabulary=lambda config: config.vocabulary,
    build=_build,
    tied=lambda config: config.tied,
    parts={"embedding": ("embedding",), "layers": ("layers",), "head": ("norm", "head")},
    stage_parts=_stage_parts,
    tensor=TensorSupport(divisible=lambda config: {"heads": config.heads}, plan=_plan, splits_rows=True),
)


@hookimpl
def mimo_register_language_models() -> list[LanguageModelSpec]:
    """Register ``decoder``."""
    return [DECODER]

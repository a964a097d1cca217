"""The built-in language model ``decoder``: its settings, and how it registers. Free of torch until it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from mimo.hooks import ConfigError, hookimpl
from mimo.model._specs import ContextSupport, ExpertSupport, LanguageModelSpec, Stage, TensorSupport, Told

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mimo.model._work import Work
    from mimo.model.runtime import ContextAxis, ExpertAxis, Split, TensorAxis
    from mimo.topology import Recompute

_WHERE = "modules.language.config"


def _at_least(low: int) -> Callable[[DecoderConfig, attrs.Attribute[int], int], None]:
    def check(_config: DecoderConfig, attribute: attrs.Attribute[int], value: int) -> None:
        if value < low:
            raise ConfigError(f"{_WHERE}.{attribute.name}", expected=f"a whole number from {low}", got=repr(value))

    return check


def _not_negative(_config: DecoderConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if not value >= 0:
        raise ConfigError(f"{_WHERE}.{attribute.name}", expected="0 or more", got=repr(value))


def _above_zero(_config: DecoderConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{_WHERE}.{attribute.name}", expected="a number above 0", got=repr(value))


_OF_MIXTURES = frozenset(
    {
        "experts_per_token",
        "expert_intermediate",
        "shared_intermediate",
        "dense_layers",
        "router_score",
        "router_normalize",
        "router_scale",
        "expert_bias_rate",
        "balance_loss",
        "z_loss",
    }
)


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
        rope_theta: base of the rotary positions' wavelengths.
        norm_eps: added to mean squares before the root.
        attention_bias: whether query, key, value and output have biases.
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
        expert_bias_rate: by how much a bias on the scores, for choosing only, moves each step towards equal loads
            (DeepSeek-V3, arXiv:2412.19437, section 2.1.2); 0 for no bias.
        balance_loss: coefficient of the loss on unequal loads within a sample (the same, equations 17 to 20); 0 for
            none.
        z_loss: coefficient of the loss on large logits of routers (Zoph et al. 2022, arXiv:2202.08906, section 3.3);
            0 for none.

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
    experts: int = attrs.field(default=0, validator=_at_least(0))
    experts_per_token: int = attrs.field(default=2, validator=_at_least(1))
    expert_intermediate: int = attrs.field(default=0, validator=_at_least(0))
    shared_intermediate: int = attrs.field(default=0, validator=_at_least(0))
    dense_layers: int = attrs.field(default=0, validator=_at_least(0))
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalize: bool = True
    router_scale: float = attrs.field(default=1.0, validator=_above_zero)
    expert_bias_rate: float = attrs.field(default=0.0, validator=_not_negative)
    balance_loss: float = attrs.field(default=0.0, validator=_not_negative)
    z_loss: float = attrs.field(default=0.0, validator=_not_negative)

    def __attrs_post_init__(self) -> None:
        """Refuse heads and experts that don't go together."""
        self._check_heads()
        if self.experts:
            self._check_experts()
            return
        for field in attrs.fields(DecoderConfig):
            value = getattr(self, field.name)
            if field.name in _OF_MIXTURES and value != field.default:
                raise ConfigError(
                    f"{_WHERE}.{field.name}",
                    expected=f"{field.default!r}, since the model has no experts",
                    got=repr(value),
                    fix="Leave it out, or set experts.",
                )

    def _check_heads(self) -> None:
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


def _expert_plan(module: nn.Module, axis: ExpertAxis) -> Mapping[str, Split]:
    from mimo.model._expert_plan import split_experts

    return split_experts(module, axis)


def _after_step(module: nn.Module, counts: Mapping[str, Tensor]) -> None:
    from mimo.model._expert_plan import follow_loads

    follow_loads(module, counts)


def _tells(config: DecoderConfig) -> Told:
    losses = {"balance": config.balance_loss, "z": config.z_loss}
    return Told(
        losses=tuple(name for name, coefficient in losses.items() if coefficient),
        counts={load_name(layer): config.experts for layer in config.expert_layers},
    )


def load_name(layer: int) -> str:
    """Return under what name a `Ledger` counts the rows that chose each expert of a layer."""
    return f"layers.{layer}.load"


def _flops(
    config: DecoderConfig, stage: Stage, recompute: Recompute, lengths: Sequence[int], labels: int
) -> Mapping[str, Work]:
    from mimo.model._decoder_work import decoder_work

    return decoder_work(config, stage, recompute, lengths, labels)


def _attach(module: nn.Module, context: ContextAxis) -> None:
    from mimo.model._decoder import Decoder

    assert isinstance(module, Decoder)
    module.context = context


def _layers(module: nn.Module) -> list[Callable[..., Any]]:
    from mimo.model._decoder import Decoder

    assert isinstance(module, Decoder)
    return [layer.forward for layer in module.layers.values()]


def _cheap(module: nn.Module) -> list[Callable[..., Any]]:
    """Return what keeps much and is cheap to compute again (Korthikanti et al. 2022, arXiv:2205.05198, section 5).

    Attention between its products (as there), and likewise the feed-forward parts between theirs, those of experts
    too. No product is repeated; neither is routing, nor a message of experts.
    """
    from mimo.model._decoder import Attention
    from mimo.model._experts import Experts
    from mimo.model._mlp import Mlp

    return [part.finish for part in module.modules() if isinstance(part, Attention | Experts | Mlp)]


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
    context=ContextSupport(attach=_attach),
    experts=ExpertSupport(count=lambda config: config.experts, plan=_expert_plan, after_step=_after_step),
    tells=_tells,
    recompute={"full": _layers, "selective": _cheap},
    flops=_flops,
)


@hookimpl
def mimo_register_language_models() -> list[LanguageModelSpec]:
    """Register ``decoder``."""
    return [DECODER]

"""The encoder ``vit``: its settings, how many rows an image becomes, and how it registers. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mimo.hooks import ConfigError, hookimpl
from mimo.model import ContextSupport, EncoderSpec, EncoderStages, Stage, TensorSupport, Work

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mimo.model.runtime import ContextAxis, Split, TensorAxis

# A config doesn't know which module it belongs to, so its errors name the setting from there on.
_WHERE = "config"


def _at_least(low: int) -> Callable[[VitConfig, attrs.Attribute[int], int], None]:
    def check(_config: VitConfig, attribute: attrs.Attribute[int], value: int) -> None:
        if value < low:
            raise ConfigError(f"{_WHERE}.{attribute.name}", expected=f"a whole number from {low}", got=repr(value))

    return check


@attrs.frozen(kw_only=True)
class VitConfig:
    """Settings of the encoder, ``modules.<name>.config``.

    Args:
        patch: side of a patch in pixels; an image is resized to the nearest whole number of them.
        channels: 1 for grey images, 3 for colour.
        width: width of a row inside the encoder, a multiple of 4 and of ``heads``.
        layers: number of layers.
        heads: attention heads.
        intermediate: width inside the feed-forward part.
        max_patches: patches of one image at most; a larger image is shrunk, its aspect kept.
        projector: width inside the projector, 0 for the language model's.

    Raises:
        ConfigError: a value is out of range or doesn't go with another.
    """

    patch: int = attrs.field(default=16, validator=_at_least(1))
    channels: int = 3
    width: int = attrs.field(default=256, validator=_at_least(1))
    layers: int = attrs.field(default=4, validator=_at_least(1))
    heads: int = attrs.field(default=4, validator=_at_least(1))
    intermediate: int = attrs.field(default=1024, validator=_at_least(1))
    max_patches: int = attrs.field(default=1024, validator=_at_least(1))
    projector: int = attrs.field(default=0, validator=_at_least(0))

    def __attrs_post_init__(self) -> None:
        """Refuse what doesn't go together."""
        if self.channels not in (1, 3):
            raise ConfigError(f"{_WHERE}.channels", expected="1 (grey) or 3 (colour)", got=repr(self.channels))
        multiple = math.lcm(4, self.heads)
        if self.width % multiple:
            raise ConfigError(
                f"{_WHERE}.width",
                expected=f"a multiple of {multiple}, for {self.heads} heads and positions in four parts",
                got=repr(self.width),
            )


def grid_of(config: VitConfig, size: tuple[int, ...]) -> tuple[int, int]:
    """Return how many patches an image of ``size`` = (height, width) pixels has down and across.

    In whole numbers only, so that every rank on any machine finds the same.
    """
    height, width = size
    down, across = (max(1, (side + config.patch // 2) // config.patch) for side in (height, width))
    if down * across <= config.max_patches:
        return down, across
    down = min(config.max_patches, max(1, math.isqrt(config.max_patches * height // width)))
    across = min(config.max_patches // down, max(1, math.isqrt(config.max_patches * width // height)))
    return down, across


def _measure(raw: Any) -> tuple[int, ...]:
    return (raw.height, raw.width)


def _rows(config: VitConfig, size: tuple[int, ...]) -> int:
    return math.prod(grid_of(config, size))


def _prepare(config: VitConfig, raw: Any) -> Mapping[str, Tensor]:
    from mimo_encoder_vision._images import to_pixels

    return {"pixels": to_pixels(raw, grid=grid_of(config, _measure(raw)), patch=config.patch, channels=config.channels)}


def _build(config: VitConfig, hidden: int) -> nn.Module:
    from mimo_encoder_vision._encoder import VisionTransformer

    return VisionTransformer(config, hidden)


def _cut(module: nn.Module, stage: Stage) -> nn.Module:
    from mimo_encoder_vision._encoder import VisionTransformer

    assert isinstance(module, VisionTransformer)
    return module.cut(stage)


def _plan(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo_encoder_vision._tensor_plan import split_encoder

    return split_encoder(module, axis)


def _attach(module: nn.Module, context: ContextAxis) -> None:
    from mimo_encoder_vision._encoder import VisionTransformer

    assert isinstance(module, VisionTransformer)
    module.context = context


def _flops(
    config: VitConfig, hidden: int, stage: Stage, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, Work]:
    from mimo_encoder_vision._work import encoder_work

    return encoder_work(config, hidden, stage, recompute, sizes)


def _layers(module: nn.Module) -> list[Callable[..., Any]]:
    from mimo_encoder_vision._encoder import VisionTransformer

    assert isinstance(module, VisionTransformer)
    return [layer.forward for layer in module.layers.values()]


def _cheap(module: nn.Module) -> list[Callable[..., Any]]:
    """Return what of the layers keeps much and is cheap to compute again: what lies between their products."""
    from mimo_encoder_vision._encoder import Attention, Mlp, VisionTransformer

    assert isinstance(module, VisionTransformer)
    return [part.finish for part in module.layers.modules() if isinstance(part, Attention | Mlp)]


VIT = EncoderSpec(
    name="vit",
    config=VitConfig,
    measure=_measure,
    rows=_rows,
    prepare=_prepare,
    build=_build,
    parts={"encoder": ("patch", "layers", "norm"), "projector": ("projector",)},
    tensor=TensorSupport(divisible=lambda config: {"heads": config.heads}, plan=_plan, splits_rows=True),
    context=ContextSupport(attach=_attach),
    stages=EncoderStages(
        layers=lambda config: config.layers,
        message_rows=_rows,
        width=lambda config: config.width,
        cut=_cut,
        parts=lambda _config, stage: frozenset({"encoder", "projector"} if stage.is_last else {"encoder"}),
    ),
    recompute={"full": _layers, "selective": _cheap},
    flops=_flops,
)


@hookimpl
def mimo_register_encoders() -> list[EncoderSpec]:
    """Register ``vit``."""
    return [VIT]

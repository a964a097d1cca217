"""The encoder ``hf-encoder``: how many rows an image becomes, and what it can do. Free of torch until one is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mimo.hooks import hookimpl
from mimo.model import EncoderSeam, EncoderSpec, OpCost, Side, Stage, TensorSupport, projected_grid, projected_rows
from mimo_transformers._encoders import PARTS, layers, measure
from mimo_transformers.family import HfEncoderConfig
from mimo_transformers.weights import RECORD, TOWERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mimo.model.runtime import Split, TensorAxis


def _rows(config: HfEncoderConfig, _size: tuple[int, ...]) -> int:
    from mimo_transformers.tower.encoder import rows_of

    return projected_rows(config.projector, rows_of(config).grid, class_tokens=config.class_tokens)


def _grid(config: HfEncoderConfig, _size: tuple[int, ...]) -> tuple[int, int, int] | None:
    from mimo_transformers.tower.encoder import rows_of

    return projected_grid(config.projector, [rows_of(config).grid], class_tokens=config.class_tokens)


def _tower_rows(config: HfEncoderConfig, _size: tuple[int, ...]) -> int:
    from mimo_transformers.tower.encoder import rows_of

    return rows_of(config).count


def _width(config: HfEncoderConfig) -> int:
    from mimo_transformers.tower.encoder import rows_of

    return rows_of(config).width


def _prepare(config: HfEncoderConfig, raw: Any) -> Mapping[str, Tensor]:
    from mimo.model.runtime import covering, picture_pixels, resized
    from mimo_transformers.tower.encoder import rows_of

    rows = rows_of(config)
    side, converted = rows.side, raw.convert("L" if rows.channels == 1 else "RGB")
    if config.crop:
        image = covering(converted, side, resample=config.resample)
    else:
        image = resized(converted, side, side, resample=config.resample)
    return {"pixels": picture_pixels([image], mean=config.mean, std=config.std)[0]}


def _blank(size: tuple[int, ...]) -> Any:
    """Return a black picture of so many pixels down and across."""
    from PIL import Image

    height, width = size
    return Image.new("L", (width, height))


def _build(config: HfEncoderConfig, hidden: int) -> nn.Module:
    from mimo_transformers.tower.trial import build_encoder

    return build_encoder(config, hidden)


def _divisible(config: HfEncoderConfig) -> Mapping[str, int]:
    from mimo_transformers.tower.trial import plan_of

    plan_of(config)
    return config.heads


def _split(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo_transformers.tower.encoder import HfEncoder
    from mimo_transformers.tower.trial import tensor_splits

    assert isinstance(module, HfEncoder)
    return tensor_splits(module, axis)


def _divide(module: nn.Module, side: Side) -> nn.Module:
    from mimo_transformers.tower.encoder import HfEncoder

    assert isinstance(module, HfEncoder)
    module.divide(side)
    return module


def _flops(
    config: HfEncoderConfig, hidden: int, _stage: Stage, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, OpCost]:
    from mimo_transformers.cost.encoders import encoder_cost

    return encoder_cost(config, hidden, recompute, sizes)


HF_ENCODER = EncoderSpec(
    name="hf-encoder",
    config=HfEncoderConfig,
    measure=measure,
    rows=_rows,
    grid=_grid,
    prepare=_prepare,
    build=_build,
    blank=_blank,
    parts=PARTS,
    tensor=TensorSupport(divisible=_divisible, plan=_split),
    seam=EncoderSeam(rows=_tower_rows, width=_width, cut=_divide),
    recompute={"full": layers},
    flops=_flops,
    hf_any=TOWERS,
    hf_record=RECORD,
)


@hookimpl
def mimo_register_encoders() -> list[EncoderSpec]:
    """Register ``hf-encoder``."""
    return [HF_ENCODER]

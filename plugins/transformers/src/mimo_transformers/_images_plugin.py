"""The encoder ``hf-images``: the half of a published image-text model that makes rows of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mimo.hooks import hookimpl
from mimo.model import EncoderSpec, OpCost, Stage, TensorSupport
from mimo_transformers._encoders import PARTS, layers, measure
from mimo_transformers.weights import IMAGES, RECORD
from mimo_transformers.whole.config import HfImagesConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mimo.model.runtime import Split, TensorAxis


def _pattern(config: HfImagesConfig, size: tuple[int, ...]) -> Sequence[str | int]:
    height, width = size
    return config.processing.pattern((height, width))


def _rows(config: HfImagesConfig, size: tuple[int, ...]) -> int:
    height, width = size
    return config.processing.rows((height, width))


def _grid(config: HfImagesConfig, size: tuple[int, ...]) -> tuple[int, int, int] | None:
    height, width = size
    return config.processing.grid((height, width))


def _prepare(config: HfImagesConfig, raw: Any) -> Mapping[str, Tensor]:
    from mimo_transformers.whole.encoder import prepared

    return prepared(config, raw)


def _blank(size: tuple[int, ...]) -> Any:
    from mimo_transformers.whole.encoder import blank

    return blank(size)


def _build(config: HfImagesConfig, hidden: int) -> nn.Module:
    from mimo_transformers.whole.trial import build_images

    return build_images(config, hidden)


def _divisible(config: HfImagesConfig) -> Mapping[str, int]:
    from mimo_transformers.whole.trial import plan_of

    plan_of(config)
    return config.heads


def _split(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo_transformers.whole.encoder import HfImages
    from mimo_transformers.whole.trial import tensor_splits

    assert isinstance(module, HfImages)
    return tensor_splits(module, axis)


def _flops(
    config: HfImagesConfig, hidden: int, _stage: Stage, recompute: str, sizes: Sequence[tuple[int, ...]]
) -> Mapping[str, OpCost]:
    from mimo_transformers.cost.encoders import images_cost

    return images_cost(config, hidden, recompute, sizes)


HF_IMAGES = EncoderSpec(
    name="hf-images",
    config=HfImagesConfig,
    measure=measure,
    rows=_rows,
    grid=_grid,
    pattern=_pattern,
    prepare=_prepare,
    build=_build,
    blank=_blank,
    parts=PARTS,
    tensor=TensorSupport(divisible=_divisible, plan=_split),
    recompute={"full": layers},
    flops=_flops,
    hf_any=IMAGES,
    hf_record=RECORD,
)


@hookimpl
def mimo_register_encoders() -> list[EncoderSpec]:
    """Register ``hf-images``."""
    return [HF_IMAGES]

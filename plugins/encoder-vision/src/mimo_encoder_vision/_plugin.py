"""The encoders ``vit``, ``siglip`` and ``clip``: one transformer with three classes of settings. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo.hooks import hookimpl
from mimo.model import (
    EncoderSpec,
    HfFamily,
    packed_context,
    packed_recompute,
    packed_seam,
    packed_stages,
    packed_tensor,
    projector_divisible,
)
from mimo_encoder_vision._config import ClipConfig, SiglipConfig, VisionConfig, VitConfig
from mimo_encoder_vision._grids import packed_rows_of, row_grid_of, rows_of
from mimo_encoder_vision._hf import CLIP_FAMILY, SIGLIP2_FAMILY, SIGLIP_FAMILY
from mimo_encoder_vision._work import encoder_work

if TYPE_CHECKING:
    from torch import Tensor, nn


def _prepare(config: VisionConfig, raw: Any) -> Mapping[str, Tensor]:
    from mimo_encoder_vision._images import to_pixels

    return {"pixels": to_pixels(config, raw)}


def _blank(size: tuple[int, ...]) -> Any:
    """Return a black picture of so many pixels down and across."""
    from PIL import Image

    height, width = size
    return Image.new("L", (width, height))


def _build(config: VisionConfig, hidden: int) -> nn.Module:
    from mimo_encoder_vision._encoder import VisionTransformer

    return VisionTransformer(config, hidden)


def _spec(name: str, config: type[VisionConfig], *families: HfFamily) -> EncoderSpec:
    encoder = ("patch", "class_tokens", "positions", "pre_norm", "layers", "norm")
    return EncoderSpec(
        name=name,
        config=config,
        measure=lambda raw: (raw.height, raw.width),
        rows=rows_of,
        grid=row_grid_of,
        prepare=_prepare,
        build=_build,
        blank=_blank,
        parts={"encoder": encoder, "projector": ("projector",)},
        tensor=packed_tensor(lambda config: {"heads": config.heads, **projector_divisible(config.projector)}),
        context=packed_context(),
        stages=packed_stages(packed_rows_of),
        seam=packed_seam(packed_rows_of),
        recompute=packed_recompute(),
        flops=encoder_work,
        hf=families,
        hf_record=Path(__file__).with_name("parity.json"),
    )


VIT = _spec("vit", VitConfig)
SIGLIP = _spec("siglip", SiglipConfig, SIGLIP_FAMILY, SIGLIP2_FAMILY)
CLIP = _spec("clip", ClipConfig, CLIP_FAMILY)


@hookimpl
def mimo_register_encoders() -> list[EncoderSpec]:
    """Register all three."""
    return [VIT, SIGLIP, CLIP]

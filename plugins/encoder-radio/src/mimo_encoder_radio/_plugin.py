"""The encoder ``radio``: how many rows an image becomes, and how it registers. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo.hooks import hookimpl
from mimo.model import (
    EncoderSpec,
    packed_context,
    packed_recompute,
    packed_seam,
    packed_stages,
    packed_tensor,
    projected_grid,
    projected_rows,
    projector_divisible,
)
from mimo_encoder_radio._config import RadioConfig
from mimo_encoder_radio._grids import grids_of
from mimo_encoder_radio._hf import RADIO_HF
from mimo_encoder_radio._work import radio_work

if TYPE_CHECKING:
    from torch import Tensor, nn


def _measure(raw: Any) -> tuple[int, ...]:
    return (raw.height, raw.width)


def _rows(config: RadioConfig, size: tuple[int, ...]) -> int:
    class_rows = len(config.keep)
    return sum(projected_rows(config.projector, grid, class_tokens=class_rows) for grid in grids_of(config, size))


def _grid(config: RadioConfig, size: tuple[int, ...]) -> tuple[int, int, int] | None:
    return projected_grid(config.projector, grids_of(config, size), class_tokens=len(config.keep))


def _message_rows(config: RadioConfig, size: tuple[int, ...]) -> int:
    return sum(config.prefix + math.prod(grid) for grid in grids_of(config, size))


def _prepare(config: RadioConfig, raw: Any) -> Mapping[str, Tensor]:
    from mimo_encoder_radio._images import to_pixels

    return {"pixels": to_pixels(config, raw)}


def _blank(size: tuple[int, ...]) -> Any:
    """Return a black picture of so many pixels down and across."""
    from PIL import Image

    height, width = size
    return Image.new("L", (width, height))


def _build(config: RadioConfig, hidden: int) -> nn.Module:
    from mimo_encoder_radio._encoder import Radio

    return Radio(config, hidden)


RADIO = EncoderSpec(
    name="radio",
    config=RadioConfig,
    measure=_measure,
    rows=_rows,
    prepare=_prepare,
    build=_build,
    blank=_blank,
    grid=_grid,
    parts={"encoder": ("patch", "positions", "prefix", "layers"), "projector": ("projector",)},
    tensor=packed_tensor(lambda config: {"heads": config.heads, **projector_divisible(config.projector)}),
    context=packed_context(),
    stages=packed_stages(_message_rows),
    seam=packed_seam(_message_rows),
    recompute=packed_recompute(),
    flops=radio_work,
    hf=(RADIO_HF,),
    hf_record=Path(__file__).with_name("parity.json"),
)


@hookimpl
def mimo_register_encoders() -> list[EncoderSpec]:
    """Register ``radio``."""
    return [RADIO]

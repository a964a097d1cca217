"""The encoder ``whisper`` and how it registers. Free of torch."""

from __future__ import annotations

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
    projector_divisible,
)
from mimo_encoder_audio._config import WhisperConfig, delivered_rows, encoded_rows
from mimo_encoder_audio._hf import WHISPER_HF
from mimo_encoder_audio._work import encoder_work

if TYPE_CHECKING:
    from torch import Tensor, nn


def _measure(raw: Any) -> tuple[int, ...]:
    from mimo_encoder_audio._clips import clip_size

    return clip_size(raw)


def _prepare(config: WhisperConfig, raw: Any) -> Mapping[str, Tensor]:
    from mimo_encoder_audio._prepare import prepare_clip

    return prepare_clip(config, raw)


def _build(config: WhisperConfig, hidden: int) -> nn.Module:
    from mimo_encoder_audio._encoder import AudioTransformer

    return AudioTransformer(config, hidden)


def _examples(_config: WhisperConfig) -> list[Any]:
    """Return two rising tones and a short one, of unlike lengths."""
    import numpy as np

    return [(np.sin(np.arange(count, dtype=np.float32) ** 1.5 / 50), 16_000) for count in (8000, 1600, 5120)]


def _blank(size: tuple[int, ...]) -> Any:
    """Return silence of so many frames, and their rate."""
    import numpy as np

    frames, rate = size
    return np.zeros(frames, dtype=np.float32), rate


WHISPER = EncoderSpec(
    name="whisper",
    config=WhisperConfig,
    measure=_measure,
    rows=delivered_rows,
    prepare=_prepare,
    build=_build,
    modality="audio",
    parts={"encoder": ("conv1", "conv2", "positions", "embedding_drop", "layers", "norm"), "projector": ("projector",)},
    tensor=packed_tensor(lambda config: {"heads": config.heads, **projector_divisible(config.projector)}),
    context=packed_context(),
    stages=packed_stages(encoded_rows),
    seam=packed_seam(encoded_rows),
    recompute=packed_recompute(),
    flops=encoder_work,
    hf=(WHISPER_HF,),
    hf_record=Path(__file__).with_name("parity.json"),
    examples=_examples,
    blank=_blank,
)


@hookimpl
def mimo_register_encoders() -> list[EncoderSpec]:
    """Register ``whisper``."""
    return [WHISPER]

"""From a raw clip to what the first convolution reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mimo_encoder_audio._clips import clip_size, read_clip, resampled
from mimo_encoder_audio._config import HOP, RATE, ROW, WhisperConfig, encoded_rows, samples_of
from mimo_encoder_audio._mel import log_mel


def prepare_clip(config: WhisperConfig, raw: Any) -> Mapping[str, Tensor]:
    """Return ``mel`` [2 R + 2, M]: the frames of a clip's R rows, and one more before and behind, for the convolution.

    They are those of the clip with silence up to the window's end, of which only what is read is computed. Before the
    clip and behind the window there are zeros.

    Raises:
        ValueError: the clip can't be read, or is too long.
    """
    size = clip_size(raw)
    samples, rows = samples_of(config, size), encoded_rows(config, size)
    _, rate = size
    # A second more than the window of a clip that is cut: resampling looks ahead.
    wave = resampled(
        read_clip(raw, frames=-(-config.window * rate // RATE) + rate), rate=rate, to=RATE, samples=samples
    )
    # Three frames of silence: the peak may lie in one that no row reads but that still sees the clip's end.
    silence = min(rows * ROW + 3 * HOP, config.window) - samples
    mel = log_mel(functional.pad(torch.from_numpy(wave), (0, silence)), mels=config.mels)[:, : 2 * rows + 1]
    return {"mel": functional.pad(mel, (1, 2 * rows + 1 - mel.shape[1])).T.contiguous()}

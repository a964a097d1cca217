"""Log-mel spectra against those of the published feature extractor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from mimo_encoder_audio import WHISPER, WhisperConfig
from mimo_encoder_audio._config import Silence, encoded_rows
from mimo_encoder_audio._mel import mel_filters

RATE = 16_000


def _clip(samples: int) -> NDArray[np.float32]:
    """Return noise under a tone that rises, loudest at the end."""
    time = np.arange(samples) / RATE
    noise = np.random.default_rng(samples).standard_normal(samples) * 0.01
    loudness = 0.5 * time / max(time[-1], 1e-9)
    return np.asarray(noise + np.sin(2 * np.pi * (100 + 300 * time) * time) * loudness, dtype=np.float32)


@pytest.mark.parametrize("mels", [1, 40, 80, 128])
def test_filters_are_the_published_ones(mels: int) -> None:
    """Slaney's scale and areas, to rounding."""
    wanted = mel_filter_bank(
        num_frequency_bins=201,
        num_mel_filters=mels,
        min_frequency=0.0,
        max_frequency=8000.0,
        sampling_rate=RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    torch.testing.assert_close(mel_filters(mels), torch.from_numpy(wanted.T).float(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("silence", ["skip", "hear"])
@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("samples", [1, 200, 1600, 3200, 50_123, 479_999, 480_000])
def test_spectra_are_the_published_ones(samples: int, mels: int, silence: Silence) -> None:
    """Within 1e-4, from one sample to the whole window, with zeros before the clip and behind the window."""
    clip = _clip(samples)
    config = WhisperConfig(mels=mels, silence=silence)
    rows = encoded_rows(config, (samples, RATE))
    found = WHISPER.prepare(config, (clip, RATE))["mel"]
    assert found.shape == (2 * rows + 2, mels)
    wanted = WhisperFeatureExtractor(feature_size=mels)(clip, sampling_rate=RATE, return_tensors="np").input_features[0]
    padded = np.pad(wanted, ((0, 0), (1, 1)))[:, : 2 * rows + 2]
    np.testing.assert_allclose(found.numpy().T, padded, atol=1e-4, rtol=0)


def test_silence_is_a_clip_too() -> None:
    """Zeros have the spectrum that the published extractor gives them."""
    clip = np.zeros(1000, dtype=np.float32)
    wanted = WhisperFeatureExtractor()(clip, sampling_rate=RATE, return_tensors="np").input_features[0]
    found = WHISPER.prepare(WhisperConfig(), (clip, RATE))["mel"][1:]
    np.testing.assert_allclose(found.numpy().T, wanted[:, : len(found)], atol=1e-4, rtol=0)

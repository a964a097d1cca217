"""Log-mel spectra by the formula of Whisper's feature extractor (Radford et al. 2022, arXiv:2212.04356, section 2.2).

Shapes: S samples, M mel bands, F frames of 10 ms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mimo.model.runtime import to_device
from mimo_encoder_audio._config import HOP, RATE

_FFT = 400  # samples that a frame sees, 25 ms
_LINEAR = 200 / 3  # Hz a mel below the corner; above it each mel is a constant factor
_CORNER = 1000.0  # Hz
_FACTOR = math.log(6.4) / 27
_FLOOR = 1e-10  # of power, before the logarithm
_RANGE = 8.0  # decades below the loudest that are distinguished


def mel_filters(mels: int) -> Tensor:
    """Return the weights [M, 201] of mel bands over the frequencies from 0 to 8,000 Hz.

    Triangles that overlap by half on Slaney's mel scale, each of area 1 (Slaney 1998, Auditory Toolbox, technical
    report 1998-010).
    """
    top = _CORNER / _LINEAR + math.log(RATE / 2 / _CORNER) / _FACTOR
    places = torch.linspace(0, top, mels + 2, dtype=torch.float64)
    knee = _CORNER / _LINEAR
    edges = torch.where(places < knee, places * _LINEAR, _CORNER * ((places - knee) * _FACTOR).exp())  # [M + 2] Hz
    frequencies = torch.linspace(0, RATE / 2, _FFT // 2 + 1, dtype=torch.float64)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low)).float()


def log_mel(wave: Tensor, *, mels: int) -> Tensor:
    """Return the log-mel spectrum [M, S / 160] of samples [S], mirrored at both ends; at most 8 decades below its peak.

    Raises:
        RuntimeError: S is 200 or less.
    """
    window = torch.hann_window(_FFT, device=wave.device)
    spectrum = torch.stft(wave, _FFT, HOP, window=window, return_complex=True)[:, :-1]
    levels = (to_device(mel_filters(mels), wave.device) @ spectrum.abs().square()).clamp(min=_FLOOR).log10()
    return (levels.maximum(levels.max() - _RANGE) + 4) / 4

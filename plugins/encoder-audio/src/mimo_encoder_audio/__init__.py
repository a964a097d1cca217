"""Whisper's audio encoder for clips of any length up to its window, against mimo's public encoder interface only."""

from mimo_encoder_audio._config import WhisperConfig
from mimo_encoder_audio._plugin import WHISPER

__all__ = ["WHISPER", "WhisperConfig"]

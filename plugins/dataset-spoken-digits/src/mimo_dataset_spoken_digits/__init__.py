"""Digits spoken by espeak-ng, with voices held out, alone or each beside a handwritten digit."""

from mimo_dataset_spoken_digits._plugin import WORDS, SpokenDigitsConfig

__all__ = ["WORDS", "SpokenDigitsConfig"]

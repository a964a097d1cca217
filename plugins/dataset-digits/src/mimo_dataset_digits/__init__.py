"""The handwritten digits of scikit-learn as captioned images."""

from mimo_dataset_digits._plugin import WORDS, DigitsConfig

__all__ = ["WORDS", "DigitsConfig"]

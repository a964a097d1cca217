"""The handwritten digits of scikit-learn as captioned images."""

from mimo_dataset_digits._plugin import WORDS, DigitsConfig, load_split

__all__ = ["WORDS", "DigitsConfig", "load_split"]

"""The handwritten digits of scikit-learn as captioned images."""

from mimo_dataset_digits._plugin import WORDS, DigitsConfig, DigitsDataset, cut_split, load_split, open_split

__all__ = ["WORDS", "DigitsConfig", "DigitsDataset", "cut_split", "load_split", "open_split"]

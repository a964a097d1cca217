"""The dataset ``carried-digits``: that of scikit-learn, from the file that `carry.py` makes.

`day.py` registers it as any plugin is.
"""

from __future__ import annotations

from pathlib import Path

import attrs
from safetensors.numpy import load_file

from mimo.data import DatasetSpec, SplitName, Tokenizer
from mimo.hooks import hookimpl
from mimo_dataset_digits import DigitsDataset, cut_split, open_split


@attrs.frozen(kw_only=True)
class CarriedDigitsConfig:
    """Settings of ``data.plugin = "carried-digits"``.

    Args:
        file: of safetensors: ``images`` [1797, 8, 8] and ``digits`` [1797], see `carry.write_digits`.
        held_out: share of the images kept for evaluation.
    """

    file: str
    held_out: float = 0.2


def open_carried(config: CarriedDigitsConfig, tokenizer: Tokenizer, split: SplitName) -> DigitsDataset:
    """Return one split."""
    read = load_file(Path(config.file))
    return open_split(cut_split(read["images"], read["digits"], config.held_out, split), tokenizer)


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``carried-digits``."""
    return [DatasetSpec(name="carried-digits", config=CarriedDigitsConfig, open=open_carried)]

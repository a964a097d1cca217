"""Weights with what LoRA adds to them, read in any pieces from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mimo.checkpoint import Stream, write_checkpoint
from mimo.hooks import CheckpointError
from mimo.trainer._merge import open_merged

LORA = {"rank": 2, "alpha": 5.0, "targets": ["*"]}
SHAPES: Mapping[str, tuple[int, ...]] = {
    "m.one.weight": (5, 3),
    "m.one.lora.down": (2, 3),
    "m.one.lora.up": (5, 2),
    "m.many.weight": (3, 4, 5),
    "m.many.lora.down": (3, 2, 5),
    "m.many.lora.up": (3, 4, 2),
    "m.other.weight": (2, 3),
    "optimizer.m.one.lora.up.exp_avg": (5, 2),
}


def write(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint of an adapted module."""
    streams = {
        name: Stream(dtype=one.dtype, shape=tuple(one.shape), chunks=partial(iter, [one.flatten()]))
        for name, one in tensors.items()
    }
    config = {"modules": {"m": {"lora": LORA}}}
    return write_checkpoint(folder, streams, config=config, topology={"m": {}}, common={})


def test_any_elements_hold_the_sum(tmp_path: Path) -> None:
    """Of a matrix and of those of experts, from anywhere to anywhere; the rest is as it is, and no state is there."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    wanted = {"m.other.weight": tensors["m.other.weight"]}
    for linear in ("m.one", "m.many"):
        product = tensors[f"{linear}.lora.up"] @ tensors[f"{linear}.lora.down"]
        wanted[f"{linear}.weight"] = tensors[f"{linear}.weight"] + 2.5 * product
    with open_merged(write(tmp_path, tensors)) as merged:
        assert merged.tensors.keys() == wanted.keys()
        for name, whole in wanted.items():
            for begin in range(whole.numel()):
                for end in range(begin + 1, whole.numel() + 1):
                    found = torch.cat([chunk.clone() for chunk in merged.elements(name, begin, end)])
                    torch.testing.assert_close(found, whole.flatten()[begin:end])


@pytest.mark.parametrize("lacking", ["m.one.weight", "m.one.lora.down"])
def test_what_is_there_in_part_is_refused(tmp_path: Path, lacking: str) -> None:
    """By the names of what is missing."""
    folder = write(tmp_path, {name: torch.zeros(shape) for name, shape in SHAPES.items() if name != lacking})
    text = f"expected all that belongs to m.one, got none of {lacking}"
    with pytest.raises(CheckpointError, match=text), open_merged(folder):
        pass

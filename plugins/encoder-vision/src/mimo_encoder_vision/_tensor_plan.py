"""How the encoder lies over tensor ranks: heads and the middle of each `Mlp` are cut, the rest is copied.

What is copied has equal gradients where every rank holds all rows; where rows are split too (sequence parallelism,
Korthikanti et al. 2022, arXiv:2205.05198) each rank's gradient is a part of the sum.
"""

from __future__ import annotations

from torch import nn

from mimo.model.runtime import Linear, Split, TensorAxis
from mimo_encoder_vision._encoder import Attention, Mlp, VisionTransformer


def split_encoder(module: nn.Module, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to the parts that use it, and return how their parameters are split."""
    assert isinstance(module, VisionTransformer)
    module.axis = axis
    copied = Split(summed=axis.splits_rows)
    splits = {path: copied for path, _ in module.named_parameters()}
    for path, part in module.named_modules():
        if isinstance(part, Attention):
            part.axis = axis
            split = {"query": part.query, "key": part.key, "value": part.value}
            splits |= _products(path, columns=split, rows={"output": part.output})
        elif isinstance(part, Mlp):
            part.axis = axis
            splits |= _products(path, columns={"up": part.up}, rows={"down": part.down})
    return splits


def _products(path: str, *, columns: dict[str, Linear], rows: dict[str, Linear]) -> dict[str, Split]:
    """Outputs of column-parallel products are cut, with their biases; inputs of row-parallel ones."""
    splits = {f"{path}.{name}.weight": Split(0) for name in columns}
    splits |= {f"{path}.{name}.bias": Split(0) for name, linear in columns.items() if linear.bias is not None}
    return splits | {f"{path}.{name}.weight": Split(1) for name in rows}

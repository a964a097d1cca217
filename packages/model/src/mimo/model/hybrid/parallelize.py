"""How the hybrid's Mamba-2 layers lie over tensor ranks.

Heads are cut, and groups with them where tensor ranks divide these. Otherwise every rank holds the weights of all
groups, computes those that its heads belong to, and the gradients are summed, as with key-value heads.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mimo.model.hybrid.mamba import Mamba
from mimo.model.language import ROWS, column, row, split_stage
from mimo.model.parallel import Split, TensorAxis


def split_hybrid(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    """Hand ``axis`` to the parts of a `Hybrid` stage that use it, and return how its parameters are split."""
    splits = split_stage(module, axis)
    for path, part in module.named_modules():
        if isinstance(part, Mamba):
            splits |= _mamba(path, part, axis)
    return splits


def _mamba(path: str, part: Mamba, axis: TensorAxis) -> dict[str, Split]:
    groups = len(part.groups)
    part.axis = part.norm.axis = axis
    part.heads = axis.span(len(part.heads))
    splits = {f"{path}.{name}": Split(ROWS) for name in ("rate_log", "step_bias", "skip", "norm.weight")}
    for name, linear in (("gate", part.gate), ("input", part.input), ("step", part.step)):
        splits |= dict(column(f"{path}.{name}", linear))
    splits |= {f"{path}.input_conv.{name}": Split(ROWS) for name, _ in part.input_conv.named_parameters()}
    splits |= dict(row(f"{path}.output", part.output, Split(summed=axis.splits_rows)))
    shared = Split(ROWS)
    if groups % axis.size == 0:
        part.groups = axis.span(groups)
    else:
        shared = Split(summed=True)
        part.groups = range(part.heads[0] // part.heads_each, part.heads[-1] // part.heads_each + 1)
        here = slice(part.groups.start * part.state, part.groups.stop * part.state)
        part.write.outputs = part.read.outputs = here
        part.write_conv.columns = part.read_conv.columns = here
    for name in ("write", "read", "write_conv", "read_conv"):
        splits |= {f"{path}.{name}.{leaf}": shared for leaf, _ in getattr(part, name).named_parameters()}
    return splits

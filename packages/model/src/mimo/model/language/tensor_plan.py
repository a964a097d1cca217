"""How language models lie over tensor ranks.

Query heads, the intermediate width and the vocabulary are cut; what works on whole rows is copied. Key-value heads
are cut where tensor ranks divide them; otherwise every rank holds all their weights, computes the heads that its query
heads look at, and the gradients are summed (Shoeybi et al. 2019, arXiv:1909.08053; for sequence parallelism
Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from mimo.model.language.attention import Attention
from mimo.model.language.mlp import Mlp
from mimo.model.language.mtp import MtpModule
from mimo.model.language.stage import LanguageStage
from mimo.model.layers import Linear, RMSNorm, Router
from mimo.model.parallel import Split, TensorAxis

ROWS = 0
"""Dim of a weight that makes outputs: cut for column-parallel products and for the vocabulary."""
COLUMNS = 1
"""Dim of a weight that takes inputs: cut for row-parallel products."""


def split_stage(module: nn.Module, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to the parts of a stage that use it, and return how its parameters are split."""
    assert isinstance(module, LanguageStage)
    module.axis = axis
    # Under sequence parallelism a rank sees only its slice of the rows outside of enter .. leave.
    whole_rows = Split(summed=axis.splits_rows)
    splits: dict[str, Split] = {}
    for path, part in module.named_modules():
        if isinstance(part, RMSNorm):
            splits.setdefault(f"{path}.weight", whole_rows)  # attention, met before its parts, has planned its own
        elif isinstance(part, Attention):
            part.axis = axis
            splits |= _attention(path, part, axis, whole_rows)
        elif isinstance(part, Mlp):
            part.axis = axis
            for name, linear in (("gate", part.gate), ("up", part.up)):
                splits |= {} if linear is None else dict(column(f"{path}.{name}", linear))
            splits |= dict(row(f"{path}.down", part.down, whole_rows))
        elif isinstance(part, MtpModule):
            part.axis = axis
            splits |= dict(row(f"{path}.project", part.project, whole_rows))
        elif isinstance(part, Router):
            splits[f"{path}.weight"] = Split(summed=axis.size > 1)  # tensor ranks route rows of their own
    if hasattr(module, "embedding"):
        module.embedding.axis = axis
        splits["embedding.weight"] = Split(ROWS)
    if hasattr(module, "head"):
        splits["head.weight"] = Split(ROWS)
    return splits


def _attention(path: str, part: Attention, axis: TensorAxis, whole_rows: Split) -> dict[str, Split]:
    heads, kv_heads = part.heads, part.kv_heads
    splits = dict(column(f"{path}.query", part.query)) | dict(row(f"{path}.output", part.output, whole_rows))
    if part.query_norm is not None:  # one scale for all heads, of which each tensor rank has its own
        splits |= {f"{path}.{name}.weight": Split(summed=axis.size > 1) for name in ("query_norm", "key_norm")}
    if kv_heads % axis.size == 0:
        return splits | dict(column(f"{path}.key", part.key)) | dict(column(f"{path}.value", part.value))
    group = heads // kv_heads
    seen = [head // group for head in axis.span(heads)]
    first, last = seen[0], seen[-1]
    for name, linear in (("key", part.key), ("value", part.value)):
        linear.outputs = slice(first * part.head_width, (last + 1) * part.head_width)
        splits |= {f"{path}.{name}.{leaf}": Split(summed=True) for leaf, _ in linear.named_parameters()}
    each, rest = divmod(len(seen), last - first + 1)
    if rest or seen != [first + head // each for head in range(len(seen))]:
        part.shared = tuple(head - first for head in seen)
    return splits


def column(path: str, linear: Linear) -> Iterator[tuple[str, Split]]:
    """Yield how the parameters of a product lie whose outputs are cut."""
    yield f"{path}.weight", Split(ROWS)
    if linear.bias is not None:
        yield f"{path}.bias", Split(ROWS)


def row(path: str, linear: Linear, whole_rows: Split) -> Iterator[tuple[str, Split]]:
    """Yield how the parameters of a product lie whose inputs are cut; ``whole_rows`` as rows outside of it do."""
    yield f"{path}.weight", Split(COLUMNS)
    if linear.bias is not None:
        yield f"{path}.bias", whole_rows  # added once, after the product has left the axis

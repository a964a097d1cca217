"""Which parts of a family's layers mix rows by themselves, found on a small model: no family is named anywhere.

What a part was given in a forward is given to it again with other rows of one sample. If rows of the other samples
change in what it returns, it mixes them. Attention that the library's interface leads to ours doesn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from mimo.model.runtime import LanguageBatch, create_on
from mimo_transformers.family import base_path_of, new_network
from mimo_transformers.model.attention import PackedRows, hold_rows, register_attention
from mimo_transformers.model.drops import replace_drops
from mimo_transformers.model.layers import (
    BridgedLayer,
    bridge_layers,
    change_tensors,
    mix_in,
    run_per_sample,
    tensors_in,
)
from mimo_transformers.model.parts import find_parts, run_base
from mimo_transformers.model.small import affordable, batch_of, draw_ids, small_config, stir, trying

_CHANGED = 1
"""Number of the sample that gets other rows."""
_TOLERANCE = 1e-6

_Calls: TypeAlias = Mapping[nn.Module, tuple[Any, Any]]
"""Positional and keyword arguments of parts."""


@attrs.frozen(kw_only=True)
class Mixing:
    """What mixes rows in a family.

    Args:
        parts: the library's classes of what must run on one sample after the other.
        weights: linears in them of which nothing but the weight is used, by the class of what holds them and their
            name there.
    """

    parts: frozenset[type[nn.Module]] = frozenset()
    weights: frozenset[tuple[type[nn.Module], str]] = frozenset()


@cache
def mixing(description: str) -> Mixing:
    """Return what mixes rows in a family that was `described`; nothing, where a small model can't be run."""
    register_attention()
    with trying(), suppress(Exception):  # whatever it is, building or the trial says it
        config = small_config(description)
        library = config.library()
        with create_on("meta"):
            path = find_parts(new_network(library)).layers
        network = stir(affordable(lambda: new_network(library)))
        replace_drops(network)  # chance would look like mixing
        layers = network.get_submodule(base_path_of(network)).get_submodule(path)
        return _mixing(network, layers, batch_of(draw_ids(config)))
    return Mixing()


def _mixing(network: Any, layers: Any, batch: LanguageBatch) -> Mixing:
    originals = {part: type(part) for part in layers.modules()}
    rows = PackedRows.of(batch)
    calls = _calls(network, layers, rows, batch)
    found: set[type[nn.Module]] = set()
    for layer in layers:
        if not _mixes(layer, calls, rows):
            continue
        for part in reversed(list(layer.modules())):  # what lies inside comes first
            original, before = originals[part], part.__class__
            if original not in found and not _mixes(part, calls, rows):
                continue
            part.__class__ = original
            run_per_sample(part)
            if part is layer:
                mix_in(part, BridgedLayer)
            if _mixes(part, calls, rows) is False:
                found.add(original)
            else:  # what it lies in does more than it, or is given rows in another form
                part.__class__ = before
    weights = frozenset(
        (originals[holder], name)
        for part in originals
        if originals[part] in found
        for holder in part.modules()
        for name, child in holder.named_children()
        if type(child) is nn.Linear and child not in calls
    )
    return Mixing(parts=frozenset(found), weights=weights)


def _calls(network: Any, layers: Any, rows: PackedRows, batch: LanguageBatch) -> _Calls:
    """Return what the first call of each part of layers was given."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def record(part: nn.Module, given: Any, named: Any) -> None:
        if part not in calls:
            calls[part] = change_tensors((given, named), lambda tensor: tensor.clone())

    bridge_layers(layers, ())
    hooks = [part.register_forward_pre_hook(record, with_kwargs=True) for part in layers.modules()]
    base, x = network.get_submodule(base_path_of(network)), network.get_input_embeddings()(batch.tokens.unsqueeze(0))
    run_base(base, layers, x, rows)
    for hook in hooks:
        hook.remove()
    return calls


def _mixes(part: nn.Module, calls: _Calls, rows: PackedRows) -> bool | None:
    """Tell whether what a part returns of other samples depends on rows of one; None if that is unknown."""
    if part not in calls:
        return None
    start = sum(rows.lengths[:_CHANGED])
    changed, count = slice(start, start + rows.lengths[_CHANGED]), len(rows.positions)

    def change(tensor: Tensor) -> Tensor:
        tensor, dim = tensor.clone(), _rows_dim(tensor, count)
        if dim is not None and tensor.is_floating_point():
            there = tensor.movedim(dim, 0)[changed]
            there += torch.randn_like(there)
        return tensor

    results = []
    for act in (lambda tensor: tensor.clone(), change):
        given, named = change_tensors(calls[part], act)
        try:
            with hold_rows(part, rows):
                results.append(tensors_in(part.forward(*given, **named)))
        except Exception:  # noqa: BLE001 - whatever a part of the library does with rows of its own
            return None
    before, after = results
    differences = list(_differences(before, after, changed, count))
    return any(differences) if differences else None


def _differences(before: Iterable[Tensor], after: Iterable[Tensor], changed: slice, count: int) -> Iterable[bool]:
    """Yield for each tensor of rows whether those but for the changed ones differ."""
    others = torch.ones(count, dtype=torch.bool)
    others[changed] = False
    for pair in zip(before, after, strict=True):
        if (dim := _rows_dim(pair[0], count)) is not None:
            one, other = (tensor.movedim(dim, 0).double() for tensor in pair)
            yield bool((one[others] - other[others]).abs().max() > _TOLERANCE * one.abs().max())


def _rows_dim(tensor: Tensor, count: int) -> int | None:
    """Return which dim of a tensor counts rows, if one does: the first, or the one behind a first of 1."""
    if tensor.shape[:1] == (count,):
        return 0
    return 1 if tensor.shape[:2] == (1, count) else None

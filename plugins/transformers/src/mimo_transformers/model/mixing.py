"""Which parts of a family's layers mix rows by themselves, found on a small model: no family is named anywhere.

What a part was given in a forward is given to it again with other rows of one sample. If rows of the other samples
change in what it returns, it mixes them. Attention that the library's interface leads to ours doesn't.

Likewise which parts read numbers: those that can't run on tensors that have shapes and no values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from inspect import signature
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from mimo.model.runtime import DecodeCache, LanguageBatch, create_on
from mimo_transformers.family import base_path_of, new_network
from mimo_transformers.model.attention import CallRecord, PackedRows, hold_rows, register_attention
from mimo_transformers.model.drops import replace_drops
from mimo_transformers.model.experts import is_experts
from mimo_transformers.model.layers import LAYER_ROWS, BridgedLayer, bridge_layers
from mimo_transformers.model.parts import find_parts, run_base
from mimo_transformers.model.per_sample import change_tensors, mix_in, run_per_sample, tensors_in
from mimo_transformers.model.small import affordable, batch_of, draw_ids, small_config, stir, trying

_CHANGED = 1
"""Number of the sample that gets other rows."""
_TOLERANCE = 1e-6
_OF_CACHES = ("cache_params", "past_key_values")
"""Arguments by which the library gives its parts what it saves of samples."""
_LAST_PIECES = (1, 2)
"""Rows that come of every sample at last, in two forwards; a short one has none before."""
_NEAR = 1e-5
"""Relative; the library sums otherwise where it goes from row to row."""

_Calls: TypeAlias = Mapping[nn.Module, tuple[Any, Any]]
"""Positional and keyword arguments of parts."""
_Results: TypeAlias = Mapping[nn.Module, Any]
"""What parts returned."""


@attrs.frozen(kw_only=True)
class Mixing:
    """What mixes rows in a family.

    Args:
        parts: the library's classes of what must run on one sample after the other; of each the argument of its
            forward by which it is given the states of samples that are continued, or nothing where that can't be.
        weights: linears in them of which nothing but the weight is used, by the class of what holds them and their
            name there.
        reading: the library's classes of what returns tensors alone, and on the way to them reads numbers.
    """

    parts: Mapping[type[nn.Module], str] = attrs.field(factory=dict)
    weights: frozenset[tuple[type[nn.Module], str]] = frozenset()
    reading: frozenset[type[nn.Module]] = frozenset()


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
    calls, results = _calls(network, layers, rows, batch)
    reading = frozenset(originals[part] for part in _reading(layers, calls, results, rows))
    found: dict[type[nn.Module], str] = {}
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
                found[original] = _takes_states(part, original, calls, rows)
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
    return Mixing(parts=found, weights=weights, reading=reading)


def _calls(network: Any, layers: Any, rows: PackedRows, batch: LanguageBatch) -> tuple[_Calls, _Results]:
    """Return what the first call of each part of layers was given, and what it returned."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}
    results: dict[nn.Module, Any] = {}

    def record(part: nn.Module, given: Any, named: Any) -> None:
        if part not in calls:
            calls[part] = change_tensors((given, named), lambda tensor: tensor.clone())

    def record_result(part: nn.Module, _given: Any, result: Any) -> None:
        results.setdefault(part, result)

    bridge_layers(layers, {})
    hooks = [part.register_forward_pre_hook(record, with_kwargs=True) for part in layers.modules()]
    hooks += [part.register_forward_hook(record_result) for part in layers.modules()]
    base, x = network.get_submodule(base_path_of(network)), network.get_input_embeddings()(batch.tokens.unsqueeze(0))
    run_base(base, layers, x, rows)
    for hook in hooks:
        hook.remove()
    return calls, results


def _reading(layers: Any, calls: _Calls, results: _Results, rows: PackedRows) -> list[nn.Module]:
    """Return the innermost parts that read numbers and return tensors alone.

    What returns the numbers is none: what it lies in would have them in its graph.
    """
    found = list[nn.Module]()
    known = {part: results[part] for part in layers.modules() if is_experts(part) and part in results}  # ours run
    for layer in layers:
        if not _reads(layer, calls, rows, known):
            continue
        for part in reversed(list(layer.modules())):  # what lies inside comes first
            if part in results and not _has_numbers(results[part]) and _reads(part, calls, rows, known):
                found.append(part)
                known[part] = results[part]
    return found


def _reads(part: nn.Module, calls: _Calls, rows: PackedRows, known: _Results) -> bool:
    """Tell whether a part reads numbers of tensors, beside parts inside of it whose results are known."""
    if part not in calls or part in known:
        return False
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given, named = change_tensors(calls[part], mode.from_tensor)
    uncomputed = attrs.evolve(rows, record=CallRecord())
    if LAYER_ROWS in named:
        named[LAYER_ROWS] = uncomputed
    for one, result in known.items():
        vars(one)["forward"] = partial(_returned, change_tensors(result, mode.from_tensor))
    try:
        with mode, hold_rows(part, uncomputed):
            part.forward(*given, **named)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return True
    except Exception:  # noqa: BLE001 - whatever a part of the library does with such tensors
        return False
    finally:
        for one in known:
            del vars(one)["forward"]
    return False


def _returned(result: Any, *_given: Any, **_named: Any) -> Any:
    return result


def _has_numbers(value: Any) -> bool:
    """Tell whether there are numbers inside of tuples, lists and tables."""
    if isinstance(value, dict):
        value = list(value.values())
    return any(map(_has_numbers, value)) if isinstance(value, list | tuple) else isinstance(value, int | float)


def _takes_states(part: nn.Module, original: type[nn.Module], calls: _Calls, rows: PackedRows) -> str:
    """Return the argument by which a part, made `PerSample`, can be given its states; nothing if by none.

    Samples that come piece by piece must make the same rows: single ones of several, more behind them, a late one.
    """
    parameters = signature(original.forward).parameters
    for name in (one for one in _OF_CACHES if one in parameters):
        with suppress(Exception), hold_rows(part, rows):  # whatever it does with a cache that isn't the library's
            given, named = change_tensors(calls[part], lambda tensor: tensor.clone())
            whole = tensors_in(part.forward(*given, **named))
            vars(part)["takes_states"] = name
            pieces = _in_pieces(part, calls, rows)
            if all(_are_close(one, other) for one, other in zip(pieces, whole, strict=True)):
                return name
        vars(part)["takes_states"] = ""
    return ""


def _in_pieces(part: nn.Module, calls: _Calls, rows: PackedRows) -> list[Tensor]:
    """Return the rows that a part makes of its call where samples come piece by piece."""
    cache, samples = DecodeCache(), torch.arange(len(rows.positions)).split(list(rows.lengths))
    places, found = list[Tensor](), list[list[Tensor]]()
    first = tuple(length - sum(_LAST_PIECES) for length in rows.lengths)
    for lengths in (first, *((count,) * len(samples) for count in _LAST_PIECES)):
        cache.begin(lengths, rows.positions.device)
        new = zip(samples, cache.step.before, lengths, strict=True)
        place = torch.cat([one[before : before + count] for one, before, count in new])
        given, named = change_tensors(calls[part], partial(_rows_at, place))
        piece = attrs.evolve(rows, lengths=lengths, positions=rows.positions[place], cache=cache)
        with hold_rows(part, piece):
            found.append(tensors_in(part.forward(*given, **named)))
        cache.end()
        places.append(place)
    order = torch.cat(places).argsort()
    return [torch.cat(pieces, 1)[:, order] for pieces in zip(*found, strict=True)]


def _rows_at(place: Tensor, tensor: Tensor) -> Tensor:
    return tensor[:, place]


def _are_close(one: Tensor, other: Tensor) -> bool:
    return bool((one.double() - other.double()).abs().max() <= _NEAR * other.double().abs().max())


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

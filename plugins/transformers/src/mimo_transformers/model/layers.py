"""What the library's layers are here: each hands the packed rows on to all of its parts, whatever its forward passes.

A part that mixes rows by itself, as a scan, a short convolution or linear attention does, runs on one sample after the
other. Shapes: T rows, L of one sample, H hidden; the library puts a dim of 1 before rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mimo.model.runtime import DrawKeys, LayerCache
from mimo_transformers.model.attention import PackedRows, hold_rows, refusal, rows_of

_NEXT = "_mimo_next_rows"
"""Attribute of a layer: the rows of the forward that is about to call it."""
LAYER_ROWS = "mimo_rows"
"""Keyword argument of a layer's forward that carries them; recomputing gives it again."""
_PATH = "_mimo_path"
"""Attribute of a part that runs on one sample after the other: a name for what it saves of a sample."""
_ROWS_DIM = 1
_SAVED_DIMS = 3


class BridgedLayer(nn.Module):
    """Mixed into the class of a layer of the library: its parts know the packed rows while it runs."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Run it on the rows of the forward that calls it."""
        return super().__call__(*given, **{LAYER_ROWS: vars(self)[_NEXT], **named})

    def forward(self, *given: Any, mimo_rows: PackedRows, **named: Any) -> Any:
        """Return what the library's layer does."""
        with hold_rows(self, mimo_rows):
            return super().forward(*given, **named)


class LayerStandIn(BridgedLayer):
    """Mixed into the class of a layer that another stage holds: it keeps its plain attributes, and computes nothing.

    Attributes:
        resumes: whether the rows of the stage before take the place of its input: it is the last layer before ours.
        finishes: whether its input is the result of this stage: it is the first layer after ours.
        returns: how long a tuple the library's layer returns, 0 for none.
    """

    resumes: bool
    finishes: bool
    returns: int

    def forward(self, *given: Any, mimo_rows: PackedRows, **named: Any) -> Any:
        """Return the rows [1, T, H] that come in, or those of the stage before."""
        hidden: Tensor = given[0] if given else next(one for one in named.values() if isinstance(one, Tensor))
        if self.resumes:
            assert mimo_rows.resumed is not None
            hidden = mimo_rows.resumed.unsqueeze(0)
        if self.finishes:
            mimo_rows.result = hidden.squeeze(0)
        return (hidden, *[None] * (self.returns - 1)) if self.returns else hidden


class PerSample(nn.Module):
    """Mixed into the class of a part of a layer that mixes rows by itself: it runs on one sample after the other.

    Attributes:
        draw_keys: by which its parts draw at random.
    """

    draw_keys: DrawKeys

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return what the library's part makes of each sample, one behind the other; None for what isn't of rows.

        Of samples that are continued it runs on all rows again, which are saved for that.

        Raises:
            PluginError: it takes a tensor that isn't of rows, [1, T, …].
        """
        rows = rows_of(self)
        count = len(rows.positions)
        sizes = own = rows.sizes
        tensors = tensors_in((given, named))
        for tensor in tensors:
            if not _are_rows(tensor, count):
                got = f"one of the shape {tuple(tensor.shape)} for {count} rows"
                raise refusal(self, "tensors of rows [1, T, …] for what mixes rows", got)
        if rows.cache is not None:
            saved = rows.cache.layer(rows.call_of(vars(self)[_PATH]))
            sizes = rows.cache.step.sizes
            tensors = [_continued(saved, str(place), one, sizes) for place, one in enumerate(tensors)]
        found, keys, first = [], self.draw_keys, 0
        for size, pieces in zip(
            sizes, zip(*(one.split(sizes, _ROWS_DIM) for one in tensors), strict=True), strict=True
        ):
            one_given, one_named = _with_tensors((given, named), pieces)
            with hold_rows(self, rows.alone(size)), keys.at(keys.some(slice(first, first + size))):
                found.append(super().forward(*one_given, **one_named))
            first += size
        return self._joined(found, sizes, own)

    def _joined(self, found: Sequence[Any], sizes: Sequence[int], own: Sequence[int]) -> Any:
        """Return results of samples behind one another, of each its ``own`` rows, the last ones."""
        joined = []
        for leaves in zip(*map(tensors_in, found), strict=True):
            are_rows = all(_are_rows(leaf, size) for leaf, size in zip(leaves, sizes, strict=True))
            new = [leaf[:, -count:] for leaf, count in zip(leaves, own, strict=True)] if are_rows else []
            joined.append(torch.cat(new, _ROWS_DIM) if are_rows else None)
        return _with_tensors(found[0], joined)


def _continued(saved: LayerCache, name: str, new: Tensor, sizes: Sequence[int]) -> Tensor:
    """Save rows [1, T, …], and return all that came of their samples, so many of each, behind one another."""
    found = saved.extend(name, new.reshape(new.shape[_ROWS_DIM], 1, -1))
    if found.dim() > _SAVED_DIMS:  # of single rows with all places: [C, 1, L, D]
        found = torch.cat([places[0, :size] for places, size in zip(found, sizes, strict=True)])
    return found.reshape(1, -1, *new.shape[_ROWS_DIM + 1 :])


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors inside of tuples, lists and tables, in order."""
    found: list[Tensor] = []
    change_tensors(value, found.append)
    return found


def change_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return tuples, lists and tables with each tensor in them changed, in order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: change_tensors(one, change) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(change_tensors(one, change) for one in value)
    return value


def _with_tensors(value: Any, others: Iterable[Tensor | None]) -> Any:
    """Return tuples, lists and tables with others in the place of their tensors, in order."""
    left = iter(others)
    return change_tensors(value, lambda _tensor: next(left))


def _are_rows(tensor: Tensor, count: int) -> bool:
    return tuple(tensor.shape[: _ROWS_DIM + 1]) == (1, count)


class Passing(nn.Module):
    """In the place of a module that another stage holds: returns rows as they come, and zeros where there are none."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, x: Tensor, *_given: Any, **_named: Any) -> Tensor:
        """Return ``x`` [1, T, H]; zeros for ids [1, T]."""
        return x if x.is_floating_point() else torch.zeros(*x.shape, self.hidden, device=x.device)


def bridge_layers(layers: Iterable[nn.Module], mixers: Collection[type[nn.Module]]) -> None:
    """Make layers of the library `BridgedLayer`, and what mixes rows in them `PerSample`.

    Args:
        layers: in order.
        mixers: classes of what does.
    """
    for index, layer in enumerate(layers):
        for path, part in layer.named_modules():
            if type(part) in mixers:
                run_per_sample(part)
                vars(part)[_PATH] = f"{index}.{path}"
        mix_in(layer, BridgedLayer)


def run_per_sample(part: nn.Module) -> None:
    """Make a part of a layer `PerSample`."""
    mix_in(part, PerSample)
    vars(part)["draw_keys"] = DrawKeys()


def stand_in(layer: nn.Module, *, resumes: bool, finishes: bool, returns: int) -> None:
    """Make a layer of the library a `LayerStandIn`, without parameters or parts."""
    mix_in(layer, LayerStandIn)
    vars(layer).update(_parameters={}, _buffers={}, _modules={}, resumes=resumes, finishes=finishes, returns=returns)


def mix_in(part: nn.Module, first: type[nn.Module]) -> None:
    """Put a class before that of a module."""
    original = type(part)
    part.__class__ = type(original.__name__, (first, original), {})


@contextmanager
def about_to_run(layers: Iterable[nn.Module], rows: PackedRows) -> Iterator[None]:
    """Have layers run on these rows if they are called within."""
    for layer in layers:
        vars(layer)[_NEXT] = rows
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)[_NEXT] = None

"""Parts of the library's layers that mix rows by themselves, as a scan, a short convolution or linear attention does.

Each runs on one sample after the other. Of samples that arrive piece by piece it saves its states, where it can be
given them, or else the rows that it was given, and runs on all of them again.
Shapes: T rows, L of one sample; the library puts a dim of 1 before rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from mimo.model.runtime import DrawKeys, LayerCache, SequenceRun
from mimo_transformers.model.attention import hold_rows, refusal, rows_of

_PATH = "_mimo_path"
"""Attribute of a part: a name for what it saves of a sample."""
_ROWS_DIM = 1
_SAVED_DIMS = 3


@attrs.define(eq=False)
class SavedStates:
    """What a part saves of the sequences of a run, as parts of the library ask their cache for it.

    Their names and arguments are those of `transformers.Cache`. Shapes: C sequences, F features of a convolution, K
    rows that it sees.

    Args:
        saved: by the part, of all sequences.
        run: those that the part runs on.
    """

    saved: LayerCache
    run: SequenceRun

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last rows that a convolution saw, [C, F, K], to be changed in place; None before any."""
        return self._known(f"convolution {layer_idx}.{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the states of a scan, [C, …], to be changed in place; None before any."""
        return self._known(f"scan {layer_idx}.{state_idx}")

    def update_conv_state(self, rows: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int) -> Tensor:
        """Save the last of new rows [C, F, L], and return those before and them, [C, F, K + L]."""
        last = self._states(f"convolution {layer_idx}.{state_idx}", (rows.shape[1], conv_kernel_size), rows)
        seen = torch.cat((last, rows), -1)
        last.copy_(seen[..., -conv_kernel_size:])
        return seen

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Save states [C, …], and return them."""
        return self._states(f"scan {layer_idx}.{state_idx}", states.shape[1:], states).copy_(states)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the states of MiniMax's linear attention, [C, …]; None before any."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, states: Tensor) -> None:
        """Save them."""
        self.update_recurrent_state(states, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002 - as the library asks
        """Return whether all that came is saved, not the last alone: no."""
        return False

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Return whether a convolution has seen rows."""
        return self.get_conv_state(layer_idx, state_idx) is not None

    @property
    def layers(self) -> Mapping[int, SimpleNamespace]:
        """By number what a layer saves, as older parts look it up, which ask for a single state of each kind."""
        return _Layers(self)

    def _known(self, name: str) -> Tensor | None:
        found, before = self.saved.tensors.get(name), self.saved.cache.step.before[self.run.sequences]
        return None if found is None or not any(before) else self._states(name, found.shape[1:], found)

    def _states(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.saved.state(name, shape, like)[self.run.sequences]


class _Layers(dict[int, SimpleNamespace]):
    def __init__(self, states: SavedStates) -> None:
        super().__init__()
        self._states = states

    def __missing__(self, layer_idx: int) -> SimpleNamespace:
        states = self._states
        return SimpleNamespace(
            conv_states=[states.get_conv_state(layer_idx)],
            recurrent_states=[states.get_recurrent_state(layer_idx)],
            record_past=False,
        )


class PerSample(nn.Module):
    """Mixed into the class of a part of a layer that mixes rows by itself: it runs on one sample after the other.

    Attributes:
        draw_keys: by which its parts draw at random.
        takes_states: the argument of the library's forward that is given `SavedStates`; nothing where it can't be.
    """

    draw_keys: DrawKeys
    takes_states: str
    stays_eager = "it runs on one sample after the other"

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return what the library's part makes of each sample, one behind the other; None for what isn't of rows.

        Raises:
            PluginError: it takes a tensor that isn't of rows, [1, T, …].
        """
        rows = rows_of(self)
        count = len(rows.positions)
        sizes = own = rows.sizes
        tensors = tensors_in((given, named))
        for tensor in tensors:
            if not _are_rows(tensor, 1, count):
                got = f"one of the shape {tuple(tensor.shape)} for {count} rows"
                raise refusal(self, "tensors of rows [1, T, …] for what mixes rows", got)
        if rows.cache is not None:
            saved = rows.cache.layer(rows.call_of(vars(self)[_PATH]))
            if self.takes_states:
                return self._continue(saved, given, named)
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
        return _joined(found, [(1, size) for size in sizes], own)

    def _continue(self, saved: LayerCache, given: Any, named: Any) -> Any:
        """Return what the library's part makes of new rows, by the states that it saves."""
        rows, tensors, found = rows_of(self), tensors_in((given, named)), []
        runs = list(_single_behind_others(saved))
        for run in runs:
            pieces = [one[0, run.span].unflatten(0, (run.count, run.rows)) for one in tensors]
            one_given, one_named = _with_tensors((given, named), pieces)
            with hold_rows(self, rows.alone(run.rows)):
                found.append(super().forward(*one_given, **{**one_named, self.takes_states: SavedStates(saved, run)}))
        return _joined(found, [(run.count, run.rows) for run in runs], [run.rows for run in runs])


def _single_behind_others(saved: LayerCache) -> Iterator[SequenceRun]:
    """Yield the sequences that have new rows; where others came before them, row by row.

    The library's scans of Mamba begin at no other state than none, but for a single row.
    """
    for run in saved.runs:
        if run.rows == 1 or not saved.cache.step.before[run.first]:
            yield run
        else:
            yield from (SequenceRun(run.first, 1, row, 1) for row in range(run.span.start, run.span.stop))


def _joined(found: Sequence[Any], shapes: Sequence[tuple[int, int]], own: Sequence[int]) -> Any:
    """Return results behind one another as rows [1, T, …]; None for what isn't of rows.

    Args:
        found: of samples, several of one length or one.
        shapes: of each result's rows.
        own: how many of a sample's rows are wanted, the last ones.
    """
    joined = []
    for leaves in zip(*map(tensors_in, found), strict=True):
        are_rows = all(_are_rows(leaf, *shape) for leaf, shape in zip(leaves, shapes, strict=True))
        new = [leaf[:, -count:].flatten(0, 1) for leaf, count in zip(leaves, own, strict=True)] if are_rows else []
        joined.append(torch.cat(new).unsqueeze(0) if are_rows else None)
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


def _are_rows(tensor: Tensor, samples: int, count: int) -> bool:
    return tuple(tensor.shape[: _ROWS_DIM + 1]) == (samples, count)


def run_per_sample(part: nn.Module, *, path: str = "", takes_states: str = "") -> None:
    """Make a part of a layer `PerSample`.

    Args:
        part: of the library.
        path: a name for it among all layers.
        takes_states: the argument of its forward that is given `SavedStates`; nothing where it can't be.
    """
    mix_in(part, PerSample)
    vars(part).update({"draw_keys": DrawKeys(), "takes_states": takes_states, _PATH: path})


def mix_in(part: nn.Module, first: type[nn.Module]) -> None:
    """Put a class before that of a module."""
    part.__class__ = _mixed(cast("Any", first), cast("Any", type(part)))


@cache
def _mixed(first: type[Any], original: type[Any]) -> type[nn.Module]:
    """Return one class for all layers, as compiled ones share their graph by it."""
    return type(original.__name__, (first, original), {})

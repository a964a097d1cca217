"""Measures the bytes that passes save for their backwards: every storage that operations allocate, while it lives.

It counts whatever holds a tensor: autograd, recomputation and deferred weight gradients. Storages that existed
before, of parameters and gradients above all, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mimo.schedule import Action
from mimo.schedule.runtime import Record
from mimo.topology import StageId


@attrs.frozen
class SavedBytes:
    """Bytes that a pass holds: from its forward on, more during its backward, and from that to its weight part."""

    activations: int = 0
    recomputed: int = 0
    weight_inputs: int = 0


class SavedBytesMode(TorchDispatchMode):
    """Counts the live storages by the action that allocated them, while an executor fills a `Record`.

    Args:
        actions: of this rank, in order.
        record: of the run; its number of actions that are done is the index of the current action.
    """

    def __init__(self, actions: Sequence[Action], record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self._actions = actions
        self._record = record
        self._alive: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._before: dict[int, dict[int, int]] = {}
        self._peaks: dict[int, dict[int, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and note the storages that it allocated."""
        index = self._record.done
        if index not in self._before:
            self._before[index] = self._by_maker()
        result = function(*args, **(kwargs or {}))
        existing = {storage._cdata for storage in _storages((args, kwargs))}  # noqa: SLF001 -- as StorageWeakRef.cdata
        for storage in _storages(result):
            reference = StorageWeakRef(storage)
            if reference.cdata not in existing:
                self._alive.setdefault(reference.cdata, (reference, index, storage.nbytes()))
        if index < len(self._actions) and self._actions[index].kind in ("backward", "input-gradient"):
            now = self._by_maker()
            if sum(now.values()) > sum(self._peaks.get(index, {}).values()):
                self._peaks[index] = now
        return result

    def by_pass(self) -> Mapping[tuple[StageId, tuple[int, ...]], SavedBytes]:
        """Return the bytes of each pass of each stage, by the stage and the microbatches of the pass."""
        saved: dict[tuple[StageId, tuple[int, ...]], SavedBytes] = {}
        for index, action in enumerate(self._actions):
            key = (action.stage_id, action.microbatches)
            makers = self._makers(action)
            if action.kind in ("backward", "input-gradient"):
                before = _sum(self._before.get(index, {}), makers)
                peak = _sum(self._peaks.get(index, {}), makers | {index})
                saved[key] = SavedBytes(activations=before, recomputed=max(peak - before, 0))
            elif action.kind == "weight-gradient" and key in saved:
                saved[key] = attrs.evolve(saved[key], weight_inputs=_sum(self._before.get(index, {}), makers))
        return saved

    def _makers(self, action: Action) -> set[int]:
        """Return the actions that allocate what a pass holds: receives, forward, and first part of the backward."""
        return {
            index
            for index, other in enumerate(self._actions)
            if other.stage_id == action.stage_id
            and other.kind in ("forward", "receive", "input-gradient")
            and other.microbatches
            and set(other.microbatches) <= set(action.microbatches)
        }

    def _by_maker(self) -> dict[int, int]:
        """Return the live bytes by the action that allocated them, and drop dead storages."""
        found: dict[int, int] = {}
        for key, (reference, maker, size) in list(self._alive.items()):
            if reference.expired():
                del self._alive[key]
            else:
                found[maker] = found.get(maker, 0) + size
        return found


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of plain tensors; a distributed one's is that of the plain one inside it."""
    return [value.untyped_storage() for value in tree_leaves(values) if type(value) in (Tensor, nn.Parameter)]


def _sum(by_maker: Mapping[int, int], makers: set[int]) -> int:
    return sum(size for maker, size in by_maker.items() if maker in makers)

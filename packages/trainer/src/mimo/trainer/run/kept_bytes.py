"""How many bytes a step keeps, seen from below: every storage that its operations make, for as long as it lives.

Whatever keeps a tensor is counted so, autograd, checkpoints and weight gradients that are put off alike. What lay
there before, parameters and gradients above all, is not.
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
class Kept:
    """Bytes that a pass keeps: from its forward on, more while its backward runs, and from that to its weight part."""

    activations: int = 0
    recomputed: int = 0
    weight_inputs: int = 0


class KeptBytes(TorchDispatchMode):
    """Within it, a run that takes down a `Record` has what is alive counted, by the action that made it.

    Args:
        actions: of this rank, in order.
        record: what the run takes down; how many moments it has tells which action is being done.
    """

    def __init__(self, actions: Sequence[Action], record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self._actions = actions
        self._record = record
        self._alive: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._before: dict[int, dict[int, int]] = {}
        self._most: dict[int, dict[int, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do an operation, and take note of the storages that it made."""
        index = len(self._record.moments)
        if index not in self._before:
            self._before[index] = self._by_maker()
        found = function(*args, **(kwargs or {}))
        there = {storage._cdata for storage in _storages((args, kwargs))}  # noqa: SLF001 -- as StorageWeakRef.cdata
        for storage in _storages(found):
            reference = StorageWeakRef(storage)
            if reference.cdata not in there:
                self._alive.setdefault(reference.cdata, (reference, index, storage.nbytes()))
        if index < len(self._actions) and self._actions[index].kind in ("backward", "input-gradient"):
            now = self._by_maker()
            if sum(now.values()) > sum(self._most.get(index, {}).values()):
                self._most[index] = now
        return found

    def found(self) -> Mapping[tuple[StageId, tuple[int, ...]], Kept]:
        """Return what each pass of each stage keeps, by the stage and the microbatches of the pass."""
        kept: dict[tuple[StageId, tuple[int, ...]], Kept] = {}
        for index, action in enumerate(self._actions):
            key = (action.stage_id, action.microbatches)
            makers = self._makers(action)
            if action.kind in ("backward", "input-gradient"):
                before = _sum(self._before.get(index, {}), makers)
                most = _sum(self._most.get(index, {}), makers | {index})
                kept[key] = Kept(activations=before, recomputed=max(most - before, 0))
            elif action.kind == "weight-gradient" and key in kept:
                kept[key] = attrs.evolve(kept[key], weight_inputs=_sum(self._before.get(index, {}), makers))
        return kept

    def _makers(self, action: Action) -> set[int]:
        """Return the actions that made what a pass keeps: its receives, forward and first part of its backward."""
        return {
            index
            for index, other in enumerate(self._actions)
            if other.stage_id == action.stage_id
            and other.kind in ("forward", "receive", "input-gradient")
            and other.microbatches
            and set(other.microbatches) <= set(action.microbatches)
        }

    def _by_maker(self) -> dict[int, int]:
        """Return the bytes that are alive, by the action that made them; the dead are forgotten."""
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

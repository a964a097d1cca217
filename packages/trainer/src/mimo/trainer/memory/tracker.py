"""Measures what a rank holds at its peak, by kind and module: every storage that operations touch, while it lives.

Nothing is asked of the device, so a CPU can say as much as a GPU; what an allocator rounds up to is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mimo.schedule import Action
from mimo.schedule.runtime import Record

MemoryKind: TypeAlias = Literal[
    "weights", "gathered", "gradients", "optimizer", "activations", "working", "messages", "other"
]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
Labels: TypeAlias = Iterable[tuple[MemoryKind, str, Tensor]]
"""Tensors with their kind and the module that holds them."""


@attrs.frozen(kw_only=True)
class MemoryPeak:
    """Bytes at the moment at which a rank held the most.

    Args:
        modules: of each module by kind; what belongs to no module is under an empty name.
    """

    modules: Mapping[str, Mapping[MemoryKind, int]]

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(sum(kinds.values()) for kinds in self.modules.values())


@attrs.define(eq=False)
class _Storage:
    """A storage: the index of the action that made it, -1 if it was there before, and of that which freed it.

    ``found`` is that of the action in which it was first seen, and ``changed`` says whether its size has changed since.
    """

    made: int
    size: int
    found: int
    changed: bool = False
    freed: int | None = None
    label: tuple[MemoryKind, str] | None = None


class MemoryTracker(TorchDispatchMode):
    """Records the storages of a step while an executor fills a `Record`.

    Kinds follow from what holds a storage, where ``labels`` says so, and otherwise from the actions that made and freed
    it: what one action makes and frees is *working* memory, what a forward leaves behind are *activations*, what a
    backward leaves to a reduction are *gradients*, and what it leaves to other actions are *messages*.

    Args:
        record: of the run; its number of actions that are done is the index of the current action.
        labels: returns what is held now of other kinds; called between actions.
    """

    def __init__(self, record: Record, labels: Callable[[], Labels]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self._record, self._labels = record, labels
        self._index = -1
        self._alive: dict[int, tuple[_Storage, weakref.ref[torch.UntypedStorage]]] = {}
        self._may_change: set[int] = set()
        self._events: list[tuple[_Storage, int]] = []
        self._label()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and note the storages that it made, and those that it found."""
        if self._index != self._record.done:
            self._index = self._record.done
            self._label()
        for value in tree_leaves((args, kwargs)):
            self._find(value, made=-1)
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            self._find(value, made=self._index)
        for key in list(self._may_change):
            self._measure(key)
        return result

    def peak(self, actions: Sequence[Action]) -> MemoryPeak:
        """Return what there was at the highest moment.

        Args:
            actions: of this rank in the run, in order.
        """
        now: dict[tuple[str, MemoryKind], int] = {}
        total, most, found = 0, 0, dict(now)
        for storage, change in self._events:
            kind, module = storage.label or _kind_of(storage, actions)
            now[module, kind] = now.get((module, kind), 0) + change
            total += change
            if total > most:
                most, found = total, dict(now)
        modules: dict[str, dict[MemoryKind, int]] = {}
        for (module, kind), count in found.items():
            if count:
                modules.setdefault(module, {})[kind] = count
        return MemoryPeak(modules=modules)

    def _find(self, value: Any, *, made: int) -> tuple[int, _Storage] | None:
        """Return the storage of a tensor and its key, noted if it is new; None where no memory is its own."""
        tensor = value.to_local() if isinstance(value, DTensor) else value
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 -- as StorageWeakRef.cdata
        if key not in self._alive:
            self._add(key, storage, made)
        elif self._alive[key][0].size != storage.nbytes():
            self._may_change.add(key)
        return key, self._alive[key][0]

    def _add(self, key: int, storage: torch.UntypedStorage, made: int) -> None:
        noted = _Storage(made=made, size=storage.nbytes(), found=self._index)

        def free(_reference: object) -> None:
            del self._alive[key]
            self._may_change.discard(key)
            noted.freed = self._record.done
            self._events.append((noted, -noted.size))

        self._alive[key] = noted, weakref.ref(storage, free)
        self._events.append((noted, noted.size))
        if made < 0 or not noted.size:  # FSDP2 frees and takes the storages of tensors that stay
            self._may_change.add(key)

    def _measure(self, key: int) -> None:
        """Note the size of a storage as it is now."""
        noted, reference = self._alive[key]
        storage = reference()
        if storage is not None and storage.nbytes() != noted.size:
            self._events.append((noted, storage.nbytes() - noted.size))
            noted.size, noted.changed = storage.nbytes(), True

    def _label(self) -> None:
        """Label what is held between two actions; the first label of a storage stays."""
        for kind, module, tensor in self._labels():
            found = self._find(tensor, made=-1)
            if found is None:
                continue
            key, noted = found
            noted.label = noted.label or (kind, module)
            if noted.label[0] != "gathered":
                self._may_change.discard(key)


def _kind_of(storage: _Storage, actions: Sequence[Action]) -> tuple[MemoryKind, str]:
    """Return the kind of a storage without a label, and the module that made it."""
    if storage.made < 0 and storage.changed and 0 <= storage.found < len(actions):  # as FSDP2 keeps what it gathers
        return "gathered", actions[storage.found].module
    if not 0 <= storage.made < len(actions):
        return "other", ""
    made = actions[storage.made]
    if storage.freed == storage.made:
        return "working", made.module
    if made.kind in ("forward", "receive"):
        return "activations", made.module
    ended = storage.freed is None or storage.freed >= len(actions) or actions[storage.freed].kind == "reduce"
    return ("gradients" if ended else "messages"), made.module

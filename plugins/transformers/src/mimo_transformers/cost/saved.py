"""What autograd keeps of a forward for its backward, counted by shapes: each storage once, weights left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SavedTensors:
    """Collects tensors that autograd saves while `collecting` is entered.

    Args:
        weights: whose storages don't count, as they are there in any case.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {_storage(one) for one in weights}
        self._known: dict[int, Tensor] = {}  # one of each storage, which then can't be another's
        self._pauses = 0
        self._left_out: list[Tensor] = []  # whose storages then can't be another's

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Have autograd record what runs within, and collect what it saves."""

        def save(tensor: Tensor) -> Tensor:
            self.add(tensor)
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing within."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """Collect nothing until `resume` has been called as often."""
        self._pauses += 1

    def resume(self) -> None:
        """Collect again, if nothing else paused it."""
        self._pauses -= 1

    def add(self, *tensors: Tensor) -> None:
        """Count tensors as saved."""
        for tensor in () if self._pauses else tensors:
            if (key := _storage(tensor)) not in self._weights:
                self._known.setdefault(key, tensor)

    def leave_out(self, *tensors: Tensor) -> float:
        """Have tensors not count as saved from now on; return the size of new ones, in numbers of fp32."""
        new = {key: one for one in tensors if (key := _storage(one)) not in self._weights and key not in self._known}
        self._weights |= new.keys()
        self._left_out += new.values()
        return sum(one.untyped_storage().nbytes() for one in new.values()) / torch.float32.itemsize

    def elements(self, first: int = 0) -> list[tuple[torch.Size, float]]:
        """Return of each storage, from the one numbered ``first`` on, a shape in it and its size in numbers of fp32."""
        tensors = list(self._known.values())[first:]
        return [(one.shape, one.untyped_storage().nbytes() / torch.float32.itemsize) for one in tensors]

    def __len__(self) -> int:
        """Return how many storages have been saved."""
        return len(self._known)


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - as StorageWeakRef.cdata
    return found

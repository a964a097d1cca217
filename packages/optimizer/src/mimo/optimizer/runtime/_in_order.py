"""Sums over data lanes that begin while a backward still runs, as soon as their gradients are final.

As in PyTorch's DistributedDataParallel (Li et al. 2020, arXiv:2006.15704, section 3.2.3): all lanes must begin the same
sums in the same order, and a lane without a sample has no backward, or one that skips layers. So each sum begins when
its own gradients and those of all sums before it are final, and the rest when the backward ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from mimo.hooks import RunError
from mimo.optimizer._specs import DeferredGrads


class LaneSum(Protocol):
    """Gradients that are summed over the lanes in one message."""

    @property
    def leaves(self) -> Collection[Tensor]:
        """The autograd leaves of these gradients, as far as they exist."""

    def begin(self) -> None:
        """Begin the sum without waiting for another lane."""

    def look(self) -> None:
        """Use the sum if it has finished; do not wait for it."""


class InOrder:
    """Begins sums in one order.

    Args:
        sums: in the order in which a backward is likely to finish their gradients.
        name: of the module.
    """

    def __init__(self, sums: Sequence[LaneSum], *, name: str) -> None:
        self._sums = tuple(sums)
        self._name = name
        self._sum_of: dict[Tensor, int] = {}
        self._awaited: list[set[Tensor]] = []
        self._next = 0
        self._is_open = False

    @contextmanager
    def on_grad_accumulation(self, deferred: DeferredGrads | None) -> Iterator[None]:
        """Begin sums within the context, while a backward or its deferred part runs."""
        assert not self._is_open, "one backward of a stage at a time"
        self._watch()
        self._awaited = [set(one.leaves) for one in self._sums]
        if deferred is not None:
            late = set(deferred.parameters)
            for awaited in self._awaited:
                awaited.intersection_update(late)
            deferred.on_grad_accumulation(self._added)
        self._next, self._is_open = 0, True
        try:
            self._begin()
            yield
            for awaited in self._awaited:
                awaited.clear()
            self._begin()
        finally:
            self._is_open = False

    def _watch(self) -> None:
        """Register hooks on leaves that exist since the last call."""
        for index, one in enumerate(self._sums):
            for leaf in one.leaves:
                if leaf not in self._sum_of:
                    self._sum_of[leaf] = index
                    leaf.register_post_accumulate_grad_hook(self._added)

    def _added(self, leaf: Tensor) -> None:
        """Record that autograd, or a deferred gradient, has added to a leaf."""
        if not self._is_open or leaf not in self._sum_of:
            return
        index = self._sum_of[leaf]
        if index < self._next:
            raise RunError(
                f"modules.{self._name}",
                expected="a backward that adds to each gradient once, as optimizer.overlap_grad_reduce takes it for "
                "final then",
                got=f"one that adds to the gradient of a parameter of shape {tuple(leaf.shape)} again",
                fix="Set optimizer.overlap_grad_reduce = false for this module.",
            )
        self._awaited[index].discard(leaf)
        self._begin()

    def _begin(self) -> None:
        """Begin the sums whose turn has come."""
        first = self._next
        while self._next < len(self._sums) and not self._awaited[self._next]:
            self._sums[self._next].begin()
            self._next += 1
        if self._next > first:
            for one in self._sums[: self._next]:
                one.look()

"""Deferred weight gradients: the part of a backward that no other rank waits for, computed when there is time for it.

As in zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241, section 2). A backward visits its graph once; a
layer that holds the stage's `WeightGradQueue` computes the gradient of its input, and queues the rest.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from mimo.model.graphs import carry

WeightGrad: TypeAlias = Callable[[Tensor | None], Tensor]
"""Computes one weight gradient, without any other rank; takes the sum of those before, None if there are none.

It returns the sum with its own, which may lie where the one before lay.
"""


class DeferredWeightGrads:
    """Weight gradients that one backward has deferred; call it once, after that backward, to compute and add them."""

    def __init__(self) -> None:
        self._parts: deque[tuple[Tensor, WeightGrad]] = deque()
        self._callbacks: list[Callable[[Tensor], None]] = []
        self.is_collecting = True

    @property
    def parameters(self) -> Collection[Tensor]:
        """The parameters whose gradients they are."""
        return {parameter for parameter, _ in self._parts}

    def on_grad_accumulation(self, callback: Callable[[Tensor], None]) -> None:
        """Call ``callback`` with each parameter once all deferred parts of its gradient have been added."""
        self._callbacks.append(callback)

    def add(self, parameter: Tensor, part: WeightGrad) -> None:
        """Defer ``part`` of the gradient of ``parameter``."""
        self._parts.append((parameter, part))

    @torch.no_grad()
    def __call__(self) -> None:
        """Compute all of them and add them to the gradients of their parameters."""
        left = Counter(parameter for parameter, _ in self._parts)
        for parameter, part in self._computed():
            parameter.grad = part(parameter.grad)
            left[parameter] -= 1
            if not left[parameter]:
                for callback in self._callbacks:
                    callback(parameter)

    @torch.no_grad()
    def add_to(self, sums: dict[Tensor, Tensor]) -> None:
        """Compute all of them and add them to ``sums`` by parameter instead."""
        for parameter, part in self._computed():
            sums[parameter] = part(sums.get(parameter))

    def _computed(self) -> Iterator[tuple[Tensor, WeightGrad]]:
        """Yield them in the order in which they were deferred; each frees the rows that it holds once it is done."""
        assert not self.is_collecting, "weight gradients are computed after the backward that deferred them"
        while self._parts:
            yield self._parts.popleft()


class WeightGradQueue:
    """Where the layers of one stage queue the weight gradients that they defer.

    In its backward, a layer's autograd function checks `is_collecting`, and then calls `defer` instead of computing. A
    deferred gradient keeps the layer's input and the gradient of its output alive, and nothing else of the graph.
    """

    def __init__(self) -> None:
        self._collected: DeferredWeightGrads | None = None
        self._parameters: dict[int, nn.Parameter] = {}
        # Of floating numbers, so that a graph can be asked for its gradient: then none leaves a product's backward out.
        self.carrier = carry(weakref.ref(self), torch.float32).requires_grad_()

    def know(self, layer: nn.Module) -> None:
        """Take note of the parameters of a layer that is compiled: its graph has other tensors of their memory."""
        for parameter in layer.parameters():
            self._parameters[parameter.untyped_storage()._cdata] = parameter  # noqa: SLF001 - which outlives its address

    def parameter_of(self, tensor: Tensor) -> nn.Parameter:
        """Return the known parameter of the same memory."""
        return self._parameters[tensor.untyped_storage()._cdata]  # noqa: SLF001 - as in `know`

    @property
    def is_collecting(self) -> bool:
        """Whether the running backward may defer weight gradients."""
        return self._collected is not None

    def defer(self, parameter: Tensor, part: WeightGrad) -> None:
        """Queue a part of the gradient of ``parameter``; parts are computed in the order of these calls."""
        assert self._collected is not None, "weight gradients are deferred in a split backward only"
        self._collected.add(parameter, part)

    @contextmanager
    def collect(self) -> Iterator[DeferredWeightGrads]:
        """Collect what a backward within the context defers."""
        assert self._collected is None, "one backward of a stage at a time"
        collected = DeferredWeightGrads()
        self._collected = collected
        try:
            yield collected
        finally:
            collected.is_collecting = False
            self._collected = None


@runtime_checkable
class DefersWeightGrads(Protocol):
    """A submodule that can defer weight gradients: `build_part` sets its queue where backwards are split, else None."""

    weight_grad_queue: WeightGradQueue | None

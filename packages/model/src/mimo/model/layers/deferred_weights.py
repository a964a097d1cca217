"""Weight gradients put off: the part of a backward that nobody waits for, done when there is time for it.

As in zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241, section 2). A backward visits its graph once, as ever; a
layer that knows of the stage's `Deferral` computes in it the gradient of its input alone and hands in the rest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Put: TypeAlias = Callable[[], None]
"""Computes one weight gradient and adds it to that of its parameter, without any other rank."""


class WeightsLater:
    """Weight gradients that one backward has put off. Calling it, once and after that, computes and adds them up."""

    def __init__(self) -> None:
        self._parts: deque[tuple[Tensor, Put]] = deque()
        self._told: list[Callable[[Tensor], None]] = []
        self.is_open = True

    @property
    def parameters(self) -> Collection[Tensor]:
        """The parameters whose gradients they are."""
        return {parameter for parameter, _ in self._parts}

    def tell(self, added: Callable[[Tensor], None]) -> None:
        """Have ``added`` called with each parameter once all that was put off of its gradient has been added."""
        self._told.append(added)

    def add(self, parameter: Tensor, part: Put) -> None:
        """Put off ``part`` of the gradient of ``parameter``."""
        self._parts.append((parameter, part))

    @torch.no_grad()
    def __call__(self) -> None:
        """Compute and add all of it, in the order in which it was put off."""
        assert not self.is_open, "weight gradients are computed after the backward that put them off"
        left = Counter(parameter for parameter, _ in self._parts)
        while self._parts:
            parameter, part = self._parts.popleft()  # let go of as they are done, with the rows that they hold
            part()
            left[parameter] -= 1
            if not left[parameter]:
                for tell in self._told:
                    tell(parameter)


class Deferral:
    """Where the layers of one stage put off their weight gradients, while it is open.

    A layer's autograd function asks `is_open` in its backward, and calls `put_off` instead of computing. What it puts
    off keeps the layer's input and the gradient of its output alive, and nothing else of the graph.
    """

    def __init__(self) -> None:
        self._later: WeightsLater | None = None

    @property
    def is_open(self) -> bool:
        """Whether the backward that runs may put off."""
        return self._later is not None

    def put_off(self, parameter: Tensor, part: Put) -> None:
        """Hand in a part of the gradient of ``parameter`` to be computed later, in the order of handing in."""
        assert self._later is not None, "nothing is put off outside of a split backward"
        self._later.add(parameter, part)

    @contextmanager
    def open(self) -> Iterator[WeightsLater]:
        """Take what a backward within puts off, and give it."""
        assert self._later is None, "one backward of a stage at a time"
        later = WeightsLater()
        self._later = later
        try:
            yield later
        finally:
            later.is_open = False
            self._later = None


@runtime_checkable
class Deferring(Protocol):
    """A submodule that takes a `Deferral`: `build_part` sets it where a backward will be split, else it stays None."""

    deferral: Deferral | None

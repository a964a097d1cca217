"""Weight gradients put off: the part of a backward that nobody waits for, done when there is time for it.

As in zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241, section 2). A backward visits its graph once, as ever; a
layer that knows of the stage's `Deferral` computes in it the gradient of its input alone and hands in the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias, runtime_checkable

import torch

Put: TypeAlias = Callable[[], None]
"""Computes one weight gradient and adds it to that of its parameter, without any other rank."""


class Deferral:
    """Where the layers of one stage put off their weight gradients, while it is open.

    A layer's autograd function asks `is_open` in its backward, and calls `put_off` instead of computing. What it puts
    off keeps the layer's input and the gradient of its output alive, and nothing else of the graph.
    """

    def __init__(self) -> None:
        self._parts: deque[Put] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the backward that runs may put off."""
        return self._parts is not None

    def put_off(self, part: Put) -> None:
        """Hand in a weight gradient to be computed later, in the order of handing in."""
        assert self._parts is not None, "nothing is put off outside of a split backward"
        self._parts.append(part)

    @contextmanager
    def open(self) -> Iterator[Callable[[], None]]:
        """Take what a backward within puts off; give the function that computes it, to be called once and after."""
        assert self._parts is None, "one backward of a stage at a time"
        parts: deque[Put] = deque()
        self._parts = parts

        @torch.no_grad()
        def compute() -> None:
            assert self._parts is not parts, "weight gradients are computed after the backward that put them off"
            while parts:
                parts.popleft()()  # let go of as they are done, with the rows that they hold

        try:
            yield compute
        finally:
            self._parts = None


@runtime_checkable
class Deferring(Protocol):
    """A submodule that takes a `Deferral`: `build_part` sets it where a backward will be split, else it stays None."""

    deferral: Deferral | None

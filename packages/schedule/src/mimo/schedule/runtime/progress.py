"""The protocol by which the executor reports its progress, so that a hang report can say where each rank stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mimo.schedule.plan import Action


class Progress(Protocol):
    """Receives each action and each wait for another rank. Calls are frequent, so they should do next to nothing."""

    def begin(self, action: Action | None) -> None:
        """Record the action that begins; None: all are done."""

    def wait(self, edge: str, peer: int) -> None:
        """Record that this rank waits for another one to send rows of an edge, or to receive them."""

    def resume(self, is_over: Callable[[], bool]) -> None:
        """Record that this process no longer waits; its device may, until ``is_over``, which any thread may call."""


class NullProgress:
    """A `Progress` that records nothing."""

    def begin(self, action: Action | None) -> None:
        """Ignore it."""

    def wait(self, edge: str, peer: int) -> None:
        """Ignore it."""

    def resume(self, is_over: Callable[[], bool]) -> None:
        """Ignore it."""

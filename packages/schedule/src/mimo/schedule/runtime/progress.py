"""What a rank says of itself while it runs a plan, so that somebody can tell where it was when all stands still."""

from __future__ import annotations

from typing import Protocol

from mimo.schedule.plan import Action


class Progress(Protocol):
    """Is told of each action, and of each wait for another rank. It is told often, so it should do next to nothing."""

    def begin(self, action: Action | None) -> None:
        """Take note of the action that begins; None: all are done."""

    def wait(self, edge: str, peer: int) -> None:
        """Take note that rows of an edge are awaited from another rank, or that it takes those sent to it."""

    def go_on(self) -> None:
        """Take note that they have come, or have been taken."""


class Untold:
    """A `Progress` for runs that nobody watches."""

    def begin(self, action: Action | None) -> None:
        """Ignore it."""

    def wait(self, edge: str, peer: int) -> None:
        """Ignore it."""

    def go_on(self) -> None:
        """Ignore it."""

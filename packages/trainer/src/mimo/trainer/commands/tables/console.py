"""The console that commands print on."""

from __future__ import annotations

from rich.console import Console

_WIDE = 160


def make_console() -> Console:
    """Return a console on standard output that cuts nothing off where that is no terminal."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=_WIDE)


class _Console(Console):
    """One that leaves it to the command how to end when nobody reads on."""

    def on_broken_pipe(self) -> None:
        """Raise on, where `rich` would exit with 1."""
        raise  # noqa: PLE0704 -- it is called while that is handled

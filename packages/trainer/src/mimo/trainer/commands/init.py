"""``mimo init``: write a commented settings file."""

from __future__ import annotations

from pathlib import Path

from mimo.hooks import ConfigError


def init(file: Path | None = None, /) -> None:
    """Write a commented settings file with every key, or print it.

    Args:
        file: where to; it must not exist.
    """
    from mimo.trainer.config.template import example_text

    if file is None:
        print(example_text(), end="")
        return
    if file.exists():
        raise ConfigError(str(file), expected="a new file", got="one that exists", fix="Name another one.")
    file.write_text(example_text(), encoding="utf-8")

"""``mimo init``: write a commented settings file."""

from __future__ import annotations

from pathlib import Path

from mimo.hooks import ConfigError


def init(file: Path | None = None, /) -> None:
    """Write a commented settings file with every key, or print it; where there are GPUs, for these.

    Args:
        file: where to; it must not exist.
    """
    from mimo.launch import count_gpus
    from mimo.trainer.config.template import example_text

    text = example_text(on_gpus=count_gpus() > 0)
    if file is None:
        print(text, end="")
        return
    if file.exists():
        raise ConfigError(str(file), expected="a new file", got="one that exists", fix="Name another one.")
    file.write_text(text, encoding="utf-8")

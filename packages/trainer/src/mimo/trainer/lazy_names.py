"""Public lists whose names are imported when they are first used (PEP 562), so that a list costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(module: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module.

    Args:
        module: its name.
        homes: where each name that it lists is defined, below `mimo.trainer`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message)
        return getattr(import_module(f"mimo.trainer.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted(homes)

    return get, names

"""What is recorded of families that were tested beside the library, written by integration_tests/published/table.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mimo.model import HfTested

RECORD = Path(__file__).with_name("parity.json")


@cache
def tested(plugin: str) -> Mapping[str, HfTested]:
    """Return what is recorded of the families of a plugin, by model type."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, one in json.loads(RECORD.read_text(encoding="utf-8")).get(plugin, {}).items():
        found.setdefault(one.get("model_type", name), []).append(one)
    return {model_type: _of_all(several) for model_type, several in found.items()}


def _of_all(several: Sequence[Mapping[str, Any]]) -> HfTested:
    """Return what is recorded of a family of which several folders were tested: it can be trained if one can."""
    trained = [one for one in several if not one["problem"]] or several
    return HfTested(
        version=trained[0]["version"],
        problem=trained[0]["problem"],
        refused={axis: reason for one in trained for axis, reason in one["refused"].items()},
        language=trained[0].get("language", ""),
    )


def known(plugin: str, look_up: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Return the model types of a plugin: those of the record where it is of the installed library, else its own.

    Args:
        plugin: name of it.
        look_up: lists the installed library's, in some seconds.
    """
    found = tested(plugin)
    installed = f"transformers {version('transformers')}"
    return tuple(found) if found and all(one.version == installed for one in found.values()) else look_up()

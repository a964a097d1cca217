"""What is recorded of families that were tested beside the library, written by integration_tests/published/table.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mimo.model import HfTested

RECORD = Path(__file__).with_name("parity.json")


@cache
def tested(plugin: str) -> Mapping[str, HfTested]:
    """Return what is recorded of the families of a plugin, by model type."""
    families = json.loads(RECORD.read_text(encoding="utf-8")).get(plugin, {})
    return {
        model_type: HfTested(version=one["version"], problem=one["problem"], refused=one["refused"])
        for model_type, one in families.items()
    }


def known(plugin: str, look_up: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Return the model types of a plugin: those of the record where it is of the installed library, else its own.

    Args:
        plugin: name of it.
        look_up: lists the installed library's, in some seconds.
    """
    found = tested(plugin)
    installed = f"transformers {version('transformers')}"
    return tuple(found) if found and all(one.version == installed for one in found.values()) else look_up()

"""Which families the plugins list, by the record that integration_tests/published/table.py writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from mimo.model import read_hf_tested
from mimo_transformers.family import registered_types

RECORD = Path(__file__).with_name("parity.json")
"""What was found of families that were tested beside the library."""


def known(plugin: str, look_up: Callable[[], Sequence[str]], is_one: Callable[[str], bool]) -> Sequence[str]:
    """Return the model types of a plugin: those of the record where it is of the installed library, else its own.

    Args:
        plugin: name of it.
        look_up: lists the installed library's and those that were registered with it, in some seconds.
        is_one: whether a registered one is of the plugin's kind.
    """
    found = read_hf_tested(RECORD, plugin)
    installed = f"transformers {version('transformers')}"
    if not found or any(one.version != installed for one in found.values()):
        return look_up()
    return (*found, *(one for one in registered_types() if one not in found and is_one(one)))

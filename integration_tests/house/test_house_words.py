"""One meaning a word: class names, and names that the field has another word for."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from house import ROOT, Room, rooms

REPLACED: Mapping[str, str] = {
    **dict.fromkeys(("told", "tell", "tells", "Told", "tell_all"), "metrics, report, on_progress, all_gather_json"),
    "Deed": "TaskKey, Computation",
    **dict.fromkeys(("Witness", "evidence", "spoil"), "StepProbe, recorded norms, inject, corrupt"),
    **dict.fromkeys(("Lookout", "Coming", "settle", "blame"), "BatchLookahead, PendingBatch, confirm, mark_failed"),
    **dict.fromkeys(("Tally", "Agreed", "Proposed", "Stepped", "Bin"), "LocalStats, ReducedStats, StepDecision, …"),
    **dict.fromkeys(("WeightsLater", "Deferral"), "DeferredWeightGrads"),
    "Kept": "saved",
    "alike": "identical, equal on all ranks",
    "beginnings": "prefixes",
    **dict.fromkeys(("go_on", "goes_on"), "resumes, heartbeat()"),
    "look_further": "multi-token prediction",
    "Memory": "KV cache, decode cache",
    "Ledger": "AuxLosses, MemoryBudget",
    **dict.fromkeys(("Place", "Mark"), "ProcessInfo, heartbeat"),
    "Link": "checkpoint chain",
    **dict.fromkeys(("Written", "judge"), "Prediction, score"),
    **dict.fromkeys(("parting", "apart"), "first divergence, relative difference"),
    **dict.fromkeys(("Typical", "Amounts", "Work", "guess"), "SampleStats, ModuleStats, OpCost, from shapes"),
    **dict.fromkeys(("Untold", "Half"), "NullProgress, PlanPhase"),
}
"""Names that nothing is called any more, each with what says it."""

LEFT: Mapping[str, frozenset[str]] = {
    "mimo-checkpoint": frozenset({"alike", "told"}),
    "mimo-launch": frozenset({"alike", "tell", "told"}),
    "mimo-model": frozenset({"Place", "apart", "judge"}),
    "mimo-optimizer": frozenset({"alike", "settle"}),
    "mimo-schedule": frozenset({"Link"}),
    "mimo-trainer": frozenset(
        {
            "alike",
            "apart",
            "beginnings",
            "blame",
            "evidence",
            "goes_on",
            "judge",
            "settle",
            "spoil",
            "tell",
            "told",
        }
    ),
    "mimo-dataset-spoken-digits": frozenset({"told"}),
    "mimo-encoder-audio": frozenset({"told"}),
    "mimo-optimizer-distributed": frozenset({"settle", "tell"}),
    "mimo-optimizer-hybrid": frozenset({"alike", "settle", "told"}),
}
"""What is still called so, by member. Nothing is added here; a name that is gone leaves."""

TWICE: Mapping[str, frozenset[str]] = {
    "mimo-optimizer-distributed": frozenset({"Spread"}),
}
"""Class names with two meanings, by member. Nothing is added here; a name that is gone leaves."""

SHARED = frozenset({"HybridConfig"})
"""Public names that mean different classes in two members. Nothing is added here; a name that is gone leaves."""


def names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a file gives: to classes, functions, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_names_are_the_fields(room: Room) -> None:
    """No name has come back that has a better one; only whole names count."""
    used = {
        name.strip("_")
        for path, tree in room.trees()
        for name in (path.stem, *names(tree))
        if name.strip("_") in REPLACED
    }
    again = {name: REPLACED[name] for name in sorted(used - LEFT.get(room.name, frozenset()))}
    assert not again


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_class_names_have_one_meaning_in_a_package(room: Room) -> None:
    """Private ones too, but for those inside of functions."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path, tree in room.trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.strip("_")].append(path.relative_to(ROOT))
    fine = TWICE.get(room.name, frozenset())
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in fine}


def test_house_public_class_names_have_one_meaning() -> None:
    """Whoever imports two packages can import any of their classes."""
    meanings: dict[str, set[str]] = defaultdict(set)
    for room in rooms():
        module = importlib.import_module(room.package)
        for name in getattr(module, "__all__", ()):
            if inspect.isclass(found := getattr(module, name)):
                meanings[name].add(f"{found.__module__}.{found.__qualname__}")
    assert not {name: found for name, found in meanings.items() if len(found) > 1 and name not in SHARED}

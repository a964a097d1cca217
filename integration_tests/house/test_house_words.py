"""One meaning a word: class names, and names that the field has another word for."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from house import ROOT, Room, nodes_of, rooms, tree_of

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
    "mimo-schedule": frozenset({"Link"}),  # latency and bandwidth between two ranks; elsewhere it was a checkpoint's
}
"""What is called so in another meaning, by member."""

PROSE = re.compile(
    r"\b(told|untold|deeds?|witness\w*|spoil\w*|lookout|tall(y|ies)|put(s|ting)? off|roll call|blame[sd]?|parting)\b",
    flags=re.IGNORECASE,
)
"""Words that sentences have better ones for."""

RIDDLES = re.compile(
    rf"{PROSE.pattern}|\b(tells?|(go|goes|going|went|gone) on|strangers?|alike|all the same|(is|are|was|were) asked"
    r"(?! for))\b",
    flags=re.IGNORECASE,
)
"""Those words, and phrases that leave open who does what to whom."""

TESTS = ("packages/*/tests", "plugins/*/tests", "integration_tests", "benchmarks", "gpu")
NOT_YET = ("integration_tests/oracle", "packages/model/tests/testing", "packages/data/tests")
"""Folders of tests whose prose is not plain yet; this list may only shrink."""
USED_THERE = frozenset({"check_going_on"})
"""Names that tests in those folders import."""

STORED = re.compile(r"[\"'`]deeds?[\"'`]")
"""Keys of saved files, which stay."""


def names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a file gives: to classes, functions, arguments, variables and attributes."""
    for node in nodes_of(tree):
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


def test_house_names_of_tests_are_the_fields() -> None:
    """Those of tests and programs too, as they are read beside the sources."""
    again = [
        f"{path.relative_to(ROOT)}: {name}"
        for pattern in TESTS
        for path in sorted(ROOT.glob(f"{pattern}/**/*.py"))
        for name in names(tree_of(path))
        if name.strip("_") in REPLACED
    ]
    assert not again


def test_house_prose_is_the_fields() -> None:
    """Docstrings, comments, messages and pages say it in the field's words."""
    again = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for pattern in ("packages/*/src/**/*.py", "plugins/*/src/**/*.py", "docs/**/*.md", "p*/*/README.md", "*.md")
        for path in sorted(ROOT.glob(pattern))
        if path.name != "CHANGELOG.md"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PROSE.search(STORED.sub("", line))
    ]
    assert not again


def prose_of_test(text: str) -> Iterator[tuple[int, str]]:
    """Yield what a test file says, by line: docstrings, comments, and its names with blanks for underscores."""
    tree = ast.parse(text)
    for node in nodes_of(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), start=node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    yield from ((0, name.replace("_", " ")) for name in sorted(set(names(tree)) - USED_THERE))


def riddles(text: str) -> list[tuple[int, str]]:
    """Return the lines of a test file that have plainer words."""
    return [(number, line.strip()) for number, line in prose_of_test(text) if RIDDLES.search(STORED.sub("", line))]


def test_house_prose_of_tests_is_plain() -> None:
    """Docstrings, comments and names of tests say it in the field's words too; strings are what tests assert."""
    again = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for pattern in TESTS
        for path in sorted(ROOT.glob(f"{pattern}/**/*.py"))
        if path != Path(__file__) and not any(path.is_relative_to(ROOT / left) for left in NOT_YET)
        for number, line in riddles(path.read_text(encoding="utf-8"))
    ]
    assert not again


def test_house_scan_of_tests_can_fail() -> None:
    """It sees docstrings, comments and names, and leaves strings alone."""
    text = 'def test_a_loss_is_told() -> None:\n    """It goes on."""\n    x = \'told\'  # which tells\n'
    assert [number for number, _ in riddles(text)] == [2, 3, 0]


def test_house_public_class_names_have_one_meaning() -> None:
    """Whoever imports two packages can import any of their classes."""
    meanings: dict[str, set[str]] = defaultdict(set)
    for room in rooms():
        module = importlib.import_module(room.package)
        for name in getattr(module, "__all__", ()):
            if inspect.isclass(found := getattr(module, name)):
                meanings[name].add(f"{found.__module__}.{found.__qualname__}")
    assert not {name: found for name, found in meanings.items() if len(found) > 1}

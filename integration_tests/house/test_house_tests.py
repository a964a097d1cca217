"""Tests of members lean on nothing above them, and folders of tests are small enough to look through."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest
from affected import TEST_TOOLS, Repository
from house import ROOT, Room, distribution_of, imported_modules, installed, nodes_of, providers, rooms, tree_of

MAX_TESTS = 30
"""Of one folder."""
REPOSITORY = Repository()


def requirements(path: Path, group: str) -> set[str]:
    """Return the distributions of a dependency group of a pyproject.toml."""
    groups = tomllib.loads(path.read_text(encoding="utf-8")).get("dependency-groups", {})
    return {distribution_of(one) for one in groups.get(group, ()) if isinstance(one, str)}


def allowed(room: Room) -> set[str]:
    """Return the distributions that tests of a member may import: its closure's, those of test groups, test tools."""
    extras = (None, *room.project.get("optional-dependencies", {}))
    members = {name for extra in extras for name in REPOSITORY.closure(room.name, extra)} | {TEST_TOOLS}
    outside = {name for member in members for part in REPOSITORY.members[member].declared() for name in part}
    groups = requirements(ROOT / "pyproject.toml", "test") | requirements(room.folder / "pyproject.toml", "test")
    return members | outside | groups


def imports_of_tests(room: Room, known: Mapping[str, list[str]]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield where tests of a member import what, and the distributions that can provide it."""
    files = sorted((room.folder / "tests").rglob("*.py"))
    beside = {path.stem for path in files}
    for path in files:
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for module in imported_modules(node, path.relative_to(room.folder)):
                    top = module.partition(".")[0]
                    if top not in beside and top not in sys.stdlib_module_names:
                        # What is not installed here may be a distribution of the module's own name.
                        unknown = frozenset() if top in known else frozenset({top})
                        yield f"{path.relative_to(ROOT)}:{node.lineno}: {module}", providers(module, known) | unknown


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_tests_lean_on_nothing_above_them(room: Room) -> None:
    """They import what their member declares, what its test group declares, what lies beside them, and test tools."""
    known = installed()
    fine = allowed(room)
    wrong = [place for place, choices in imports_of_tests(room, known) if choices and not choices & fine]
    assert not wrong


def test_house_folders_of_tests_are_small() -> None:
    """Who looks for a test finds it by its folder."""
    folders = {
        path.parent
        for pattern in ("*/*/tests", "integration_tests")
        for top in ROOT.glob(pattern)
        for path in top.rglob("test_*.py")
    }
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("test_*.py"))) for folder in folders}
    assert counts
    assert not {name: count for name, count in counts.items() if count > MAX_TESTS}


def test_house_no_tests_lie_where_none_are_looked_for(pytestconfig: pytest.Config) -> None:
    """Pytest goes past folders of some names, among them by default those that builds are made in."""
    passed_over = pytestconfig.getini("norecursedirs")
    files = [
        path.relative_to(ROOT)
        for pattern in ("p*/*/tests", "integration_tests")
        for path in ROOT.glob(f"{pattern}/**/test_*.py")
    ]
    assert files
    assert not [path for path in files if any(fnmatch(part, name) for part in path.parts for name in passed_over)]

"""The page of what every layout keeps: each line names tests, and those tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from house import ROOT

LINES = re.findall(
    r"^\| (\d+) \| (.+?) \| (.+) \|$", (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8"), re.MULTILINE
)
FILES: dict[str, Path] = {
    path.name: path
    for folder in ("packages", "plugins", "integration_tests")
    for path in (ROOT / folder).rglob("test_*.py")
}


def functions_of(path: Path) -> set[str]:
    """Return the names of the test functions of a file that have a body and a docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.startswith("test_") and ast.get_docstring(node)}


def test_the_page_lists_all_behaviours_in_order() -> None:
    """Twenty-eight, each once."""
    assert [int(number) for number, _, _ in LINES] == list(range(1, 29))


@pytest.mark.parametrize(("number", "shown"), [(number, shown) for number, _, shown in LINES])
def test_every_named_test_exists(number: str, shown: str) -> None:
    """A line names one test or more and quotes nothing else; what is not there yet comes last and names none."""
    done, _, _missing = shown.partition("not yet:")
    named = re.findall(r"`([^`]*)`", shown)
    assert named, number
    assert named == re.findall(r"`([^`]*)`", done), number
    for name in named:
        file, separator, function = name.partition("::")
        assert separator, name
        assert file in FILES, name
        assert function in functions_of(FILES[file]), name

"""What no source of ours may do, and what every hook must say of itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import ROOT, Room, imported_modules, nodes_of, rooms, tree_of

PICKLING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
RUNNING_TEXT = {"eval", "exec", "compile", "__import__"}
READING_CODE = {"torch.load", "torch.save", "torch.serialization", "torch.jit.load", "torch.package"}
LAST_NAMES = {name.rpartition(".")[2] for name in READING_CODE}

FOR_TESTS = "mimo-testing"  # pickles between processes of one test


def executable_data(tree: ast.Module, file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of whatever could turn data into code."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in imported_modules(node, file):
                if module.split(".")[0] in PICKLING_MODULES or any(
                    f"{module}.".startswith(f"{name}.") for name in READING_CODE
                ):
                    yield node.lineno, module
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in RUNNING_TEXT:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and node.attr in LAST_NAMES and ast.unparse(node) in READING_CODE:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.value.lineno, "allow_pickle"


@pytest.mark.parametrize("room", [room for room in rooms() if room.name != FOR_TESTS], ids=lambda room: room.name)
def test_house_nothing_on_disk_is_executable(room: Room) -> None:
    """No file is pickled or unpickled, and no text is run."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in room.trees()
        for line, name in executable_data(tree, path.relative_to(room.source))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "from torch.serialization import load",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "run = compile",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_house_guard_against_executable_data_can_fail(source: str) -> None:
    """The guard sees each way in which data could become code, and lets what is named like it pass."""
    assert list(executable_data(ast.parse(source), Path("x.py")))
    assert not list(executable_data(ast.parse("model.eval()\nre.compile('x')\ncompile: bool = True"), Path("x.py")))


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_no_state_of_the_process(room: Room) -> None:
    """No function changes a variable of its module."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: global {', '.join(node.names)}"
        for path, tree in room.trees()
        for node in nodes_of(tree)
        if isinstance(node, ast.Global)
    ]
    assert not wrong


HOOKSPEC_FILES = sorted(ROOT.glob("packages/*/src/mimo/*/hookspecs.py"))


@pytest.mark.parametrize("file", HOOKSPEC_FILES, ids=lambda file: file.parent.name)
def test_house_every_hook_is_marked_and_documented(file: Path) -> None:
    """A hook says when it is called and what it returns, is named ``mimo_*`` and carries the marker."""
    functions = [node for node in tree_of(file).body if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        assert function.name.startswith("mimo_"), function.name
        assert [ast.unparse(decorator) for decorator in function.decorator_list] == ["hookspec"], function.name
        assert ast.get_docstring(function), function.name


def test_house_hooks_have_one_owner() -> None:
    """No hook is specified twice."""
    names = [node.name for file in HOOKSPEC_FILES for node in tree_of(file).body if isinstance(node, ast.FunctionDef)]
    assert len(names) == len(set(names))


def test_house_test_files_have_unique_names() -> None:
    """Two test files of one name cannot be distinguished in a report."""
    names = [path.name for pattern in ("*/*/tests/**/test_*.py", "*/test_*.py") for path in ROOT.glob(pattern)]
    assert sorted(names) == sorted(set(names))

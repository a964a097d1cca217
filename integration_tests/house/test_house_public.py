"""What programs outside of the trainer use of it: public names, and nothing else of its rooms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from house import ROOT, imported_modules, nodes_of, tree_of
from test_house_rooms import named

TRAINER = ROOT / "packages" / "trainer"
PUBLIC = ("", "generation", "runtime")
"""Public modules of `mimo.trainer`, see docs/architecture.md; the empty one is the package."""
COMMAND = "mimo.trainer.commands.main.run"
"""The command as a function, which tests call with the words that a user types."""
PROGRAMS = ("integration_tests", "benchmarks", "gpu", "examples", "docs", "packages/*/tests", "plugins")
HOUSE = ROOT / "integration_tests" / "house"
"""Tests of the repository itself, whose texts name rooms and import none."""
DOTTED = re.compile(r"\bmimo\.trainer(?:\.\w+)+")
FROM = re.compile(r"\bfrom (mimo\.trainer[\w.]*) import \(?([\w, ]+)")


def public_names() -> set[str]:
    """Return what everybody may import, with the modules."""
    home = TRAINER / "src" / "mimo" / "trainer"
    names = {COMMAND, COMMAND.rpartition(".")[0]}
    for module in PUBLIC:
        file = home / (f"{module}.py" if module else "__init__.py")
        prefix = f"mimo.trainer.{module}" if module else "mimo.trainer"
        names |= {prefix, *(f"{prefix}.{name}" for name in named(file))}
    return names


def named_in(text: str) -> Iterator[str]:
    """Yield the names of the trainer in a text: a program, or what `monkeypatch.setattr` and `mock.patch` are given."""
    yield from DOTTED.findall(text)
    for module, names in FROM.findall(text):
        yield from (f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip())


def inside(tree: ast.AST, file: Path, public: set[str], *, texts: bool = True) -> Iterator[str]:
    """Yield what a program imports, or names in its texts, of the trainer and that is not public."""
    for node in nodes_of(tree):
        names: list[str] = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imported_modules(node, file)
        elif texts and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = list(named_in(node.value))
        for name in names:
            if name.startswith("mimo.trainer.") and name not in public:
                yield name


def test_house_programs_use_public_names_of_the_trainer() -> None:
    """Tests of whole jobs, benchmarks and other programs need nothing but what any program has."""
    public, found = public_names(), {}
    for path in (path for pattern in PROGRAMS for folder in ROOT.glob(pattern) for path in folder.rglob("*.py")):
        if not path.is_relative_to(TRAINER) and ".nox" not in path.parts:
            tree = tree_of(path)
            names = set(inside(tree, path.relative_to(ROOT), public, texts=not path.is_relative_to(HOUSE)))
            if names:
                found[path.relative_to(ROOT).as_posix()] = sorted(names)
    assert not found


def test_house_scan_of_programs_can_fail() -> None:
    """It sees modules and names that are not public, within functions and texts too, and lets pass those that are."""
    program = (
        "from mimo.trainer import train, nothing\n"
        "def f(monkeypatch):\n"
        "    from mimo.trainer.run.begin import resolve_run\n"
        "    from mimo.trainer.commands.main import run\n"
        "    monkeypatch.setattr('mimo.trainer.step.build.build_part', None)\n"
        "    monkeypatch.setattr('mimo.trainer.Trainer', None)\n"
        "    return 'import sys\\nfrom mimo.trainer import rooms, resolve'\n"
    )
    assert set(inside(ast.parse(program), Path("a.py"), public_names())) == {
        "mimo.trainer.nothing",
        "mimo.trainer.run.begin.resolve_run",
        "mimo.trainer.step.build.build_part",
        "mimo.trainer.rooms",
    }

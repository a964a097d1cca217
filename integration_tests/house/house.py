"""What the house tests know of the repository: its packages and plugins, their sources, and what these import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parents[2]


@attrs.frozen(kw_only=True)
class Import:
    """A module that a file imports, with the line that says so; ``from a import b`` counts as ``a.b``."""

    module: str
    file: Path
    line: int

    def __str__(self) -> str:
        """Return file, line and module, for messages."""
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.module}"


@attrs.frozen(kw_only=True)
class Room:
    """A package or plugin: its folder and the project table of its pyproject.toml."""

    folder: Path
    project: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the distribution, ``mimo-topology``."""
        return str(self.project["name"])

    @property
    def source(self) -> Path:
        """Folder that holds what is installed."""
        return self.folder / "src"

    @property
    def is_plugin(self) -> bool:
        """Whether it lives outside our namespace, as a third-party package does."""
        return self.folder.parent.name == "plugins"

    @property
    def package(self) -> str:
        """Name by which it is imported, ``mimo.topology`` or ``mimo_encoder_vision``."""
        return self.name.replace("-", "_") if self.is_plugin else f"mimo.{self.folder.name}"

    @property
    def groups(self) -> frozenset[str]:
        """Entry-point groups of ours that it serves."""
        return frozenset(group for group in self.project.get("entry-points", {}) if group.startswith("mimo."))

    def files(self) -> list[Path]:
        """Return all files that belong into its wheel."""
        return sorted(
            path
            for path in self.source.rglob("*")
            if path.is_file()
            and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(self.source).parts)
        )

    def trees(self) -> Iterator[tuple[Path, ast.Module]]:
        """Yield each Python file with its syntax tree."""
        for path in self.files():
            if path.suffix == ".py":
                yield path, tree_of(path)

    def imports(self) -> list[Import]:
        """Return every import of every file, those inside functions and for type checkers included."""
        return [
            Import(module=module, file=path, line=node.lineno)
            for path, tree in self.trees()
            for node in nodes_of(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module in imported_modules(node, path.relative_to(self.source))
        ]

    def declared(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the distributions that it declares: always needed, and of its extras."""
        extras = [line for lines in self.project.get("optional-dependencies", {}).values() for line in lines]
        needed = frozenset(map(distribution_of, self.project.get("dependencies", ())))
        return needed, frozenset(map(distribution_of, extras))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file; nobody changes it."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree, outer ones first."""
    return tuple(ast.walk(tree))


@cache
def installed() -> Mapping[str, list[str]]:
    """Return by the names of modules the distributions that are installed here and provide them."""
    return {name: list(distributions) for name, distributions in packages_distributions().items()}


def rooms() -> list[Room]:
    """Return all packages and plugins of the workspace."""
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["workspace"]
    folders = sorted(path.parent for pattern in workspace["members"] for path in ROOT.glob(f"{pattern}/pyproject.toml"))
    return [
        Room(folder=folder, project=tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"])
        for folder in folders
    ]


def imported_modules(node: ast.Import | ast.ImportFrom, file: Path) -> list[str]:
    """Return the modules that a statement imports; ``file`` is relative to the folder on the import path."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parents = file.parts[: -node.level]
        base = ".".join([*parents, base]).rstrip(".")
    return [f"{base}.{alias.name}" for alias in node.names]


def canonical(name: str) -> str:
    """Return the name of a distribution in the form in which two names can be compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution_of(requirement: str) -> str:
    """Return the distribution that a requirement names, without extras, versions and markers."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return canonical(found[0])


def providers(module: str, known: Mapping[str, list[str]] | None = None) -> frozenset[str]:
    """Return the distributions that can provide a module; none for the standard library.

    ``known`` maps top-level names to distributions; by default what is installed here.
    """
    top, *rest = module.split(".")
    if top in sys.stdlib_module_names:
        return frozenset()
    if top == "mimo":
        return frozenset({f"mimo-{rest[0]}"} if rest else ())
    if top.startswith("mimo_"):
        return frozenset({canonical(top)})
    return frozenset(map(canonical, (installed() if known is None else known).get(top, [f"? {top}"])))

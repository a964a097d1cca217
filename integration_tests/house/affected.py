"""Which sessions of nox a change can reach: ``nox -s affected -- [REVISION]`` runs them.

A session reaches all that its tests import, and what these import in turn: inside functions, for type checkers, and by
the entry points of what is installed. So each file can be looked up the other way round.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
from house import ROOT, Room, distribution_of, imported_modules, nodes_of, rooms, tree_of

EVERYWHERE = ("conftest.py", "constraints.txt", "noxfile.py", "pyproject.toml")
"""Files of the root that any session reads."""
OLDEST = {"tests(transformers)": "oldest(transformers)"}
"""Sessions that run the tests of another with the oldest release of a library."""
OF_ALL = ("oldest(published)", "integration", "lint")
"""Sessions in which all members are installed."""
TEST_TOOLS = "mimo-testing"
_NAMED = re.compile(r"\bmimo(?:_\w+)?(?:\.\w+)+")
_README = re.compile(r"^(?:from|import) (mimo[\w.]*)", re.MULTILINE)


@attrs.frozen(kw_only=True)
class Session:
    """A session that tests one member with one extra or none."""

    room: Room
    extra: str | None

    @property
    def name(self) -> str:
        """As nox calls it."""
        return f"tests({self.room.folder.name}" + (f"[{self.extra}])" if self.extra else ")")

    def tests(self) -> Iterator[Path]:
        """Yield the files from which its imports start: tests and helpers, and the page whose program is run."""
        folder = self.room.folder / "tests"
        others = {extra for extra in self.room.project.get("optional-dependencies", {}) if extra != self.extra}
        for path in sorted(folder.rglob("*.py")):
            first = path.relative_to(folder).parts[0]
            beside = len(path.relative_to(folder).parts) == 1 and not path.name.startswith("test_")
            if first not in others and (self.extra is None or first == self.extra or beside):
                yield path
        yield self.room.folder / "README.md"


@attrs.frozen
class Repository:
    """All members, their modules, and what each file imports."""

    members: Mapping[str, Room] = attrs.field(factory=lambda: {room.name: room for room in rooms()})

    @cached_property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions that test one member."""
        return tuple(
            Session(room=room, extra=extra)
            for room in self.members.values()
            for extra in (None, *room.project.get("optional-dependencies", {}))
        )

    @cached_property
    def modules(self) -> Mapping[str, Path]:
        """The file of each module of a member."""
        return {
            module_name(path, room.source): path
            for room in self.members.values()
            for path in room.files()
            if path.suffix == ".py"
        }

    @cached_property
    def files(self) -> frozenset[Path]:
        """The files of all modules."""
        return frozenset(self.modules.values())

    @cached_property
    def imports(self) -> Mapping[Path, frozenset[Path]]:
        """The files of members that each file of members, and each of their tests, imports."""
        found = {path: self._imports(path, room.source) for room in self.members.values() for path in sources_of(room)}
        for session in self.sessions:
            found |= {path: self._imports(path, path.parent) for path in session.tests() if path.exists()}
        return found

    def closure(self, name: str, extra: str | None) -> frozenset[str]:
        """Return the members that are installed with one."""
        found: set[tuple[str, str | None]] = set()
        open_ends: list[tuple[str, str | None]] = [(name, None), (name, extra), (TEST_TOOLS, None)]
        while open_ends:
            end = open_ends.pop()
            if end not in found:
                found.add(end)
                open_ends += self._needs(*end)
        return frozenset(member for member, _ in found)

    def reach(self, session: Session) -> frozenset[Path]:
        """Return the files of members that a session may run."""
        open_ends = [*session.tests(), ROOT / "conftest.py", *sources_of(session.room)]
        for name in self.closure(session.room.name, session.extra):
            for points in self.members[name].project.get("entry-points", {}).values():
                open_ends += self.files_of(point.partition(":")[0] for point in points.values())
        open_ends += self._imports(ROOT / "conftest.py", ROOT)
        found: set[Path] = set()
        while open_ends:
            path = open_ends.pop()
            if path not in found:
                found.add(path)
                open_ends += self.imports.get(path, ())
        return frozenset(found)

    @cached_property
    def reached(self) -> Mapping[str, frozenset[Path]]:
        """What each session may run, by its name."""
        return {session.name: self.reach(session) for session in self.sessions}

    def affected(self, changed: Iterable[Path]) -> list[str]:
        """Return the names of the sessions that changes of these files can reach."""
        changed = [ROOT / path for path in changed]
        if not changed:
            return []
        places = {path: path.relative_to(ROOT).as_posix() for path in changed}
        everywhere = any(place in EVERYWHERE for place in places.values())
        found = [
            session.name
            for session in self.sessions
            if everywhere or any(self._may_notice(session, path) for path in changed)
        ]
        return [*found, *(OLDEST[name] for name in found if name in OLDEST), *OF_ALL]

    def files_of(self, modules: Iterable[str]) -> list[Path]:
        """Return the files that are run where modules, or names inside of modules, are imported."""
        found = []
        for module in modules:
            parts = module.split(".")
            prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            found += [self.modules[name] for name in prefixes if name in self.modules]
            found += [self.modules[f"{module}.__main__"]] if f"{module}.__main__" in self.modules else []
        return found

    def _may_notice(self, session: Session, path: Path) -> bool:
        """Whether a session imports a file, or reads one of a member that is no module."""
        if path in self.files:
            return path in self.reached[session.name]
        names = self.closure(session.room.name, session.extra)
        inside = [name for name in names if path.is_relative_to(self.members[name].folder)]
        if not inside:
            return False
        (name,) = inside
        tests = path.is_relative_to(self.members[name].folder / "tests") or path.name == "README.md"
        return name == session.room.name or not tests

    def _needs(self, name: str, extra: str | None) -> Iterator[tuple[str, str | None]]:
        project: Mapping[str, Any] = self.members[name].project
        wanted = project.get("optional-dependencies", {}).get(extra, ()) if extra else project.get("dependencies", ())
        for requirement in wanted:
            needed = distribution_of(requirement)
            if needed in self.members:
                extras = re.search(r"\[([^]]*)\]", requirement)
                yield needed, None
                yield from ((needed, one.strip()) for one in (extras[1].split(",") if extras else ()))

    def _imports(self, path: Path, source: Path) -> frozenset[Path]:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".py":
            return frozenset(self.files_of(_README.findall(text)))
        nodes = nodes_of(tree_of(path))
        named = {
            module
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module in imported_modules(node, path.relative_to(source))
        }
        shown = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in shown:
                named |= set(_NAMED.findall(node.value))
        return frozenset(self.files_of(named)) - {path}


def sources_of(room: Room) -> list[Path]:
    """Return the Python files of a member's wheel."""
    return [path for path in room.files() if path.suffix == ".py"]


def module_name(path: Path, source: Path) -> str:
    """Return the name by which a file is imported; a package's is that of its ``__init__``."""
    parts = PurePosixPath(path.relative_to(source)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def changed_since(revision: str | None) -> list[Path]:
    """Return the files that differ from a revision, by default from where this branch left main; new ones too."""
    base = revision or _git("merge-base", "HEAD", "main")[0]
    return [
        Path(line) for line in {*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")}
    ]


def _git(*words: str) -> list[str]:
    out = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: S607
    return out.splitlines()


if __name__ == "__main__":
    print(*Repository().affected(changed_since(next(iter(sys.argv[1:]), None))), sep="\n")

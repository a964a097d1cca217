"""Each package is useful alone: its README says how to install it from a clone, and shows public names only."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest
from house import ROOT, Room, rooms
from packaging.requirements import Requirement

ROOMS = {room.name: room for room in rooms()}
COMMAND = ["python", "-m", "pip", "install", "-c", "constraints.txt"]


def readme(room: Room) -> str:
    """Return the page of a package."""
    return (room.folder / "README.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def closure(name: str, own: frozenset[str] = frozenset()) -> Mapping[str, frozenset[str]]:
    """Return the packages of this repository that one with some extras needs, itself included, each with its extras."""
    extras: dict[str, frozenset[str]] = {}
    open_ends = [(name, own)]
    while open_ends:
        needed, wanted = open_ends.pop()
        if needed in extras and wanted <= extras[needed]:
            continue
        extras[needed] = extras.get(needed, frozenset()) | wanted
        project = ROOMS[needed].project
        lines = [*project.get("dependencies", ())]
        lines += [line for extra in extras[needed] for line in project["optional-dependencies"][extra]]
        requirements = map(Requirement, lines)
        open_ends += [(one.name, frozenset(one.extras)) for one in requirements if one.name in ROOMS]
    return extras


def folders(name: str, own: frozenset[str] = frozenset()) -> list[str]:
    """Return what pip is to install for a package with some extras: its own folder, then those that it needs.

    These stand without extras, as whoever needs them asks for those: pip finds a folder that was named with extras
    only for those who ask for the same.
    """
    suffix = f"[{','.join(sorted(own))}]" if own else ""
    needed = [ROOMS[other] for other in sorted(closure(name, own).keys() - {name})]
    return [f"{folder_of(ROOMS[name])}{suffix}", *map(folder_of, needed)]


def folder_of(room: Room) -> str:
    """Return the folder of a package as a clone's reader names it."""
    return str(room.folder.relative_to(ROOT))


def imported_names(program: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of what a program imports of this repository; the name is empty for a module alone."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and is_ours(node.module):
            yield from ((node.module, alias.name) for alias in node.names)


def is_ours(module: str) -> bool:
    """Whether a module is of a package or plugin here."""
    return module.split(".", maxsplit=1)[0] in {"mimo", *(room.package for room in ROOMS.values())}


def is_public(module: str, name: str) -> bool:
    """Whether a module, and a name in it, are offered to everybody."""
    if any(part.startswith("_") for part in module.split(".")):
        return False
    found = import_module(module)
    return not name or name in getattr(found, "__all__", vars(found))


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_house_readme_opens_with_how_to_install(name: str) -> None:
    """The first block is one pip command that names the folder of each package that is needed, and no other.

    The package itself may come with extras, where its first program needs them.
    """
    page = readme(ROOMS[name])
    first = re.search(r"^```(\w*)\n", page, flags=re.MULTILINE)
    assert first is not None, f"{name}: no block"
    assert first[1] == "sh", f"{name}: the first block is {first[1]!r}, not the command that installs it"
    words = shlex.split(blocks(page, "sh")[0].replace("\\\n", ""))
    extras = re.findall(r"\w+", words[len(COMMAND)].partition("[")[2])
    wanted = folders(name, frozenset(extras))
    line = " ".join([*COMMAND, *(f'"{word}"' if "[" in word else word for word in wanted)])
    assert words == [*COMMAND, *wanted], f"write: {line}"


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_house_readme_shows_public_names_only(name: str) -> None:
    """What a reader copies is there for everybody, and stays."""
    programs = blocks(readme(ROOMS[name]), "python")
    used = {pair for program in programs for pair in imported_names(program)}
    assert sorted(pair for pair in used if not is_public(*pair)) == []


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_house_readme_programs_are_tested(name: str) -> None:
    """A test of the package reads the page, to run what it prints."""
    tests = (ROOMS[name].folder / "tests").rglob("test_*.py")
    assert any("README.md" in path.read_text(encoding="utf-8") for path in tests), f"no test reads {name}'s README"


def test_house_readme_guards_can_fail(tmp_path: Path) -> None:
    """A closure follows extras, and private modules and names that a module does not offer are seen."""
    assert folders("mimo-topology") == ["packages/topology", "packages/hooks"]
    assert folders("mimo-topology", frozenset({"torch"})) == ["packages/topology[torch]", "packages/hooks"]
    assert closure("mimo-optimizer")["mimo-topology"] == {"torch"}
    program = "import mimo.hooks\nfrom mimo.hooks import _json\nfrom mimo.hooks._json import parse_json\nimport torch\n"
    names = list(imported_names(program))
    assert names == [("mimo.hooks", ""), ("mimo.hooks", "_json"), ("mimo.hooks._json", "parse_json")]
    assert [is_public(*pair) for pair in names] == [True, False, False]

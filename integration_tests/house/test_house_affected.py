"""Sessions that a change can reach: none that imports what was changed is left out, and few others are run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from affected import EVERYWHERE, OF_ALL, OLDEST, Repository, changed_since, module_name, sources_of
from house import ROOT, imported_modules, nodes_of, tree_of

REPOSITORY = Repository()
ALL = [*(session.name for session in REPOSITORY.sessions), *OLDEST.values(), *OF_ALL]
FILES = [path for room in REPOSITORY.members.values() for path in sources_of(room)]


def importers() -> dict[Path, set[str]]:
    """Return the names of the sessions whose tests or package import a file in so many words."""
    found: dict[Path, set[str]] = {path: set() for path in FILES}
    modules = {
        module_name(path, room.source): path for room in REPOSITORY.members.values() for path in sources_of(room)
    }
    for session in REPOSITORY.sessions:
        for path in [*session.tests(), *sources_of(session.room)]:
            if path.suffix == ".py":
                for node in nodes_of(tree_of(path)):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        file = path.relative_to(session.room.source if path in FILES else path.parent)
                        for name in imported_modules(node, file):
                            module = name if name in modules else name.rpartition(".")[0]
                            if module in modules:
                                found[modules[module]].add(session.name)
    return found


def test_house_sessions_of_a_change_cover_all_that_import_it() -> None:
    """A file's sessions are those of whoever imports it, and all sessions of each file that imports it in turn."""
    chosen = {path: set(REPOSITORY.affected([path])) for path in FILES}
    by_name = importers()
    assert FILES
    for path in FILES:
        assert {*OF_ALL} | by_name[path] <= chosen[path], path
    for importer in FILES:
        for imported in REPOSITORY.imports[importer]:
            assert chosen[importer] <= chosen[imported], (importer, imported)


def test_house_a_member_reaches_its_own_sessions() -> None:
    """Each of its files, whether anything imports it or not."""
    for room in REPOSITORY.members.values():
        own = {session.name for session in REPOSITORY.sessions if session.room is room}
        for path in sources_of(room):
            assert own <= set(REPOSITORY.affected([path])), path


@pytest.mark.parametrize(
    ("changed", "reached", "spared"),
    [
        ("packages/hooks/src/mimo/hooks/__init__.py", [name for name in ALL if "testing" not in name], []),
        ("packages/hooks/pyproject.toml", [name for name in ALL if "testing" not in name], []),
        (
            "packages/topology/src/mimo/topology/meshes.py",
            ["tests(topology[torch])", "tests(optimizer)", "tests(optimizer-muon)", "tests(trainer)"],
            ["tests(hooks)", "tests(schedule)", "tests(checkpoint)", "tests(data)"],
        ),
        (
            "packages/checkpoint/src/mimo/checkpoint/__init__.py",
            ["tests(checkpoint)", "tests(trainer)"],
            ["tests(model)", "tests(optimizer)", "tests(encoder-vision)"],
        ),
        ("packages/hooks/README.md", ["tests(hooks)", *OF_ALL], ["tests(topology)"]),
        ("docs/faults.md", [*OF_ALL], ["tests(hooks)"]),
        ("integration_tests/support/tables.py", [*OF_ALL], ["tests(hooks)"]),
        ("packages/topology/src/mimo/topology/gone.py", ["tests(topology)", "tests(schedule)"], ["tests(hooks)"]),
        *((place, ALL, []) for place in EVERYWHERE),
    ],
)
def test_house_a_change_runs_what_it_can_reach(changed: str, reached: list[str], spared: list[str]) -> None:
    """And no session of a package that has nothing to do with it."""
    found = REPOSITORY.affected([Path(changed)])
    assert set(reached) <= set(found) <= set(ALL)
    assert not set(spared) & set(found)
    assert found == [name for name in ALL if name in found]


def test_house_no_change_runs_nothing() -> None:
    """And what is not committed yet counts as a change."""
    assert REPOSITORY.affected([]) == []
    new = ROOT / "integration_tests" / "house" / "new_file_of_a_test.txt"
    before = set(changed_since("HEAD"))
    try:
        new.touch()
        assert set(changed_since("HEAD")) - before == {new.relative_to(ROOT)}
    finally:
        new.unlink()

"""Rooms inside packages: which may import which, how large they are, and that nothing imports in a circle.

A room is a folder of a package. `ROOMS` has each package with rooms, and all of these, lowest first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import attrs
import pytest
from house import ROOT, Import, Room, imported_modules, nodes_of, rooms, tree_of

MAX_FILES = 12
"""Of one folder, beside its ``__init__``."""


@attrs.frozen
class Row:
    """What one room of a package may import of it, and what others may import of the room.

    Args:
        imports: rooms below it.
        modules: its modules that other rooms may import beside what its ``__init__`` names, since the ``__init__`` is
            free of torch and they are not.
    """

    imports: str = ""
    modules: str = ""


ROOMS: Mapping[str, Mapping[str, Row]] = {
    "mimo.data": {
        "loading": Row(),
        "samples": Row(),
        "order": Row("samples"),
        "placement": Row(),
        "text": Row("samples"),
        "index": Row(),
        "sources": Row("loading samples text index"),
    },
    "mimo.launch": {
        "process": Row(modules="gpus heartbeat host_memory process_info run_lock"),
        "faults": Row("process", modules="collectives fault hang_report store watchdog"),
        "start": Row("process faults"),
    },
    "mimo.model": {
        "graphs": Row(),
        "parallel": Row(),
        "draws": Row("parallel"),
        "spec": Row("parallel"),
        "layers": Row("graphs parallel draws"),
        "losses": Row("parallel layers"),
        "attention": Row("graphs parallel"),
        "encoder": Row(
            "parallel draws spec layers attention",
            modules="layers packed_rows patches pictures projectors",
        ),
        "language": Row("graphs parallel draws spec layers losses attention"),
        "decoder": Row("parallel draws spec layers attention language", modules="flops"),
        "hybrid": Row("parallel spec layers attention language decoder", modules="mamba sequences"),
        "build": Row("graphs parallel draws spec layers language", modules="build create_on hf lora part trainable"),
        "testing": Row("parallel draws spec language build"),
    },
    "mimo.schedule": {
        "plan": Row(),
        "routes": Row(),
        "checker": Row("plan"),
        "schedules": Row("plan"),
        "ahead": Row("plan"),
        "simulator": Row("plan checker"),
        "viewer": Row("plan"),
        "testing": Row("plan"),
        "runtime": Row("plan routes"),
    },
    "mimo_transformers": {
        "images": Row(),
        "image_files": Row("images"),
        "family": Row(),
        "model": Row("family", modules="attention drops experts mixing modules own per_sample routers small stage"),
        "trial": Row("family model", modules="encoders packed record tensor tensor_plan two_ranks"),
        "tower": Row("family model trial", modules="encoder trial"),
        "whole": Row("images family model trial", modules="config encoder example heads processing seeing trial"),
        "cost": Row("family model tower whole", modules="decoder encoders"),
        "weights": Row("image_files family model tower whole"),
    },
}
"""The rooms of each package that has some, lowest first. Files beside the rooms import rooms; no room imports them."""

TRAINER: Mapping[str, str] = {
    "config": "",
    "job": "config",
    "cost": "config job",
    "resolving": "config job cost",
    "memory": "config job cost resolving",
    "items": "config job",
    "batch": "config job cost items",
    "step": "config job cost memory items batch",
    "rerun": "config job cost batch step",
    "resume": "config job batch step",
    "published": "config",
    "importing": "config published",
    "exporting": "config resolving resume published",
    "decoding": "config job resolving items batch step resume",
    "report": "config job step",
    "run": "config job cost resolving memory batch step rerun resume published importing exporting decoding report",
    "api": "config job resolving resume step decoding run",
    "commands": (
        "config job cost resolving items batch step rerun resume published importing exporting decoding report run"
    ),
}
"""The rooms of mimo.trainer, lowest first, and which rooms each may import. Their `__init__` name nothing yet."""

FLAT = {"mimo.checkpoint", "mimo_optimizer_hybrid"}
"""Packages with more files in a folder. One that is put into rooms leaves this set."""


@attrs.frozen(kw_only=True)
class Sources:
    """The modules of one package, by name, and what they import of it.

    Args:
        package: its name.
        files: of its modules, ``mimo.model.spec.hf``; a package's is its ``__init__``.
        imports: of each module; what is imported is a module of the package, or a name inside of one.
    """

    package: str
    files: Mapping[str, Path]
    imports: Mapping[str, tuple[Import, ...]]

    @classmethod
    def of(cls, room: Room) -> Sources:
        """Return those of a package or plugin."""
        trees = {path: tree for path, tree in room.trees() if _module(path, room.source).startswith(room.package)}
        files = {_module(path, room.source): path for path in trees}
        imports = {
            _module(path, room.source): tuple(
                Import(module=module, file=path, line=node.lineno)
                for node in nodes_of(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for module in imported_modules(node, path.relative_to(room.source))
                if f"{module}.".startswith(f"{room.package}.")
            )
            for path, tree in trees.items()
        }
        return cls(package=room.package, files=files, imports=imports)

    def module_of(self, imported: str) -> str:
        """Return the module in which an imported name is looked up."""
        return imported if imported in self.files else imported.rpartition(".")[0]

    def room_of(self, module: str) -> str | None:
        """Return the room of a module; None for files beside the rooms."""
        first = module.removeprefix(self.package).split(".")[1:2]
        return first[0] if first and first[0] in ROOMS.get(self.package, {}) else None

    def edges(self) -> dict[str, set[str]]:
        """Return for each module those that it imports, inside functions and for type checkers too."""
        return {
            module: {self.module_of(one.module) for one in found} - {module} for module, found in self.imports.items()
        }


def _module(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of modules that reach one another (Tarjan 1972), smallest names first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges.get(module, ()):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return sorted(found)


def named(init: Path) -> set[str]:
    """Return the names that an ``__init__`` lists in ``__all__``."""
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def wrong_imports(sources: Sources, table: Mapping[str, Row]) -> Iterator[str]:
    """Yield the imports from a room that its row does not allow, or that the other room does not offer."""
    for module, imports in sources.imports.items():
        room = sources.room_of(module)
        for one in imports:
            other = sources.room_of(one.module)
            if room is None or other == room:
                continue
            if other is None or other not in table[room].imports.split():
                yield f"{one}, which {room} may not import"
            elif not _is_offered(one.module, sources, other, table[other]):
                yield f"{one}, which {other} does not name in its __init__"


def _is_offered(imported: str, sources: Sources, room: str, row: Row) -> bool:
    inside = imported.removeprefix(f"{sources.package}.{room}").removeprefix(".")
    first, _, name = inside.partition(".")
    if f"{sources.package}.{room}.{first}" in sources.files:
        return first in row.modules.split()
    return not name and first in named(sources.files[f"{sources.package}.{room}"])


PACKAGES = {room.package: room for room in rooms()}


@cache
def sources_of(package: str) -> Sources:
    """Return the sources of a package by its name."""
    return Sources.of(PACKAGES[package])


IN_ROOMS = pytest.mark.parametrize("package", sorted(ROOMS))


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_house_no_import_circles(package: str) -> None:
    """No module imports what imports it: not at the top, not inside a function, not for types."""
    found = circles(sources_of(package).edges())
    assert not found


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_house_folders_are_small(package: str) -> None:
    """A folder holds about a dozen source files at most."""
    folders: dict[Path, int] = {}
    for file in sources_of(package).files.values():
        folders[file.parent] = folders.get(file.parent, 0) + (file.name != "__init__.py")
    large = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > MAX_FILES}
    assert bool(large) == (package in FLAT), large


@IN_ROOMS
def test_house_rooms_are_listed(package: str) -> None:
    """The table has every folder of a package in rooms, and each room's files have no leading underscore."""
    sources = sources_of(package)
    home = sources.files[package].parent
    folders = {path.name for path in home.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS[package])
    private = [str(path) for path in home.glob("*/**/_*.py") if path.name != "__init__.py"]
    assert not private


def test_house_rooms_of_the_trainer_import_rooms_below() -> None:
    """Each room of mimo.trainer imports only what its row names, and rows name rooms above them in the table alone."""
    below: set[str] = set()
    for room, allowed in TRAINER.items():
        assert below >= set(allowed.split()), room
        below.add(room)
    sources = sources_of("mimo.trainer")
    folders = {file.parent.name for file in sources.files["mimo.trainer"].parent.glob("*/__init__.py")}
    assert folders == set(TRAINER)
    wrong = []
    for module, imports in sources.imports.items():
        importer = module.split(".")[2:3]
        for one in imports:
            imported = one.module.split(".")[2:3]
            if importer == imported or not importer or importer[0] not in TRAINER:
                continue
            arrow = (importer[0], "".join(imported))
            if arrow[1] not in TRAINER[arrow[0]].split():
                wrong.append(str(one))
    assert not wrong


@IN_ROOMS
def test_house_rooms_lie_lowest_first(package: str) -> None:
    """A room's row names only rooms above it in the table: arrows between rooms run one way."""
    below: set[str] = set()
    for room, row in ROOMS[package].items():
        assert below >= set(row.imports.split()), room
        below.add(room)


@IN_ROOMS
def test_house_rooms_import_what_their_rows_allow(package: str) -> None:
    """A room imports only rooms of its row, and of those what their ``__init__`` names or the listed modules."""
    assert not list(wrong_imports(sources_of(package), ROOMS[package]))


@IN_ROOMS
def test_house_rows_allow_no_more_than_is_used(package: str) -> None:
    """A row that lists a room or a module that nobody imports is out of date."""
    sources = sources_of(package)
    used = {
        (sources.room_of(module), sources.room_of(one.module), sources.module_of(one.module))
        for module, imports in sources.imports.items()
        for one in imports
    }
    for room, row in ROOMS[package].items():
        assert set(row.imports.split()) <= {other for here, other, _ in used if here == room}, room
        others = {module for here, other, module in used if other == room != here}
        assert {f"{package}.{room}.{module}" for module in row.modules.split()} <= others, room


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_house_class_names_have_one_meaning(package: str) -> None:
    """No two classes or type aliases of a package share a name, an underscore before it aside."""
    found: dict[str, list[str]] = {}
    for file in sources_of(package).files.values():
        for node in tree_of(file).body:
            if name := _type_name(node):
                found.setdefault(name.lstrip("_"), []).append(f"{file.relative_to(ROOT)}:{node.lineno}")
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert not shared


def _type_name(node: ast.stmt) -> str | None:
    """Return the name of a class or type alias that a statement makes."""
    if isinstance(node, ast.ClassDef):
        return node.name
    is_alias = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) and is_alias else None


def test_house_guard_of_rooms_can_fail(tmp_path: Path) -> None:
    """The guard sees a room above, a file of a room, a name that the room does not offer, and circles for types."""
    package = tmp_path / "mimo" / "model"
    files = {
        "__init__": "from mimo.model.spec import Stage",
        "runtime": "from mimo.model.layers import Linear",
        "spec/__init__": "from mimo.model.spec.stage import Stage\n__all__ = ['Stage']",
        "spec/stage": "if TYPE_CHECKING:\n    from mimo.model.layers import Linear",
        "layers/__init__": "from mimo.model.layers.linear import Linear\n__all__ = ['Linear']",
        "layers/linear": "from mimo.model.spec import Stage, Other\nfrom mimo.model.spec.stage import Stage\n"
        "def f():\n    from mimo.model import runtime",
    }
    imports = {}
    paths = {}
    for name, text in files.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        module = _module(path, tmp_path)
        paths[module] = path
        imports[module] = tuple(
            Import(module=one, file=ROOT / name, line=node.lineno)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for one in imported_modules(node, path.relative_to(tmp_path))
        )
    sources = Sources(package="mimo.model", files=paths, imports=imports)
    wrong = list(wrong_imports(sources, {"spec": Row(), "layers": Row("spec")}))
    assert [line.partition(": ")[2] for line in wrong] == [
        "mimo.model.layers.Linear, which spec may not import",
        "mimo.model.spec.Other, which spec does not name in its __init__",
        "mimo.model.spec.stage.Stage, which spec does not name in its __init__",
        "mimo.model.runtime, which layers may not import",
    ]
    (found,) = circles(sources.edges())
    assert {"mimo.model.spec.stage", "mimo.model.layers.linear", "mimo.model.runtime"} <= set(found)

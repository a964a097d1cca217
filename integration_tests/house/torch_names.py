"""Which names of torch our sources use, with which keywords, and what the Python files of its wheels say of them.

``python integration_tests/house/torch_names.py WHEEL [WHEEL …]`` writes `torch_names.json` anew, from wheels of the
oldest releases that we accept (``pip download --no-deps torch==2.11.0``); `test_house_torch_names.py` compares the file
with our sources. Nothing of a wheel is run: its files are read as text. Names made in C++ are found as far as stubs
have them.

The class of an object can't be read from its text; private methods of FSDP2 are listed in `MEMBERS`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
from house import nodes_of, rooms

FILE = Path(__file__).with_name("torch_names.json")
FOUND, MISSING, UNKNOWN = "found", "missing", "no answer"
_FSDP = "torch.distributed.fsdp._fully_shard"
MEMBERS: Mapping[str, Sequence[str]] = {
    f"{_FSDP}._fsdp_state.FSDPState": ("_fsdp_param_group", "_fsdp_param_groups", "_lazy_init"),
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup": (
        *("_all_gather_result", "_reset_sharded_params", "fsdp_params", "is_unsharded"),
    ),
    f"{_FSDP}._fsdp_param.FSDPParam": (
        *("_module_info", "_unsharded_param", "accumulate_unsharded_grad_if_needed", "sharded_param"),
        *("to_accumulated_grad_if_needed", "unsharded_accumulated_grad", "unsharded_grad_data", "unsharded_param"),
    ),
}
"""Members of objects that only `mimo_optimizer_distributed._fsdp` reaches into."""

_OF_MODULES = {"__file__", "__name__", "__path__"}
"""What Python gives to every module."""


def names_used(tree: ast.Module) -> dict[str, set[str]]:
    """Return the names of torch that a file uses, in full, with the keywords that it gives to each."""
    known = dict(_imports(tree))
    found: dict[str, set[str]] = {}
    inner: set[ast.expr] = set()
    for node in nodes_of(tree):  # outer ones first
        if isinstance(node, ast.Call) and (name := _dotted(node.func, known)):
            found.setdefault(name, set()).update(keyword.arg for keyword in node.keywords if keyword.arg)
        if isinstance(node, ast.Attribute | ast.Name) and node not in inner and (name := _dotted(node, known)):
            found.setdefault(name, set())
            value: ast.expr = node
            while isinstance(value, ast.Attribute):
                value = value.value
                inner.add(value)
    return found


def all_names_used() -> dict[str, list[str]]:
    """Return those of all our sources, and the members of objects."""
    found: dict[str, set[str]] = {f"{kind}.{name}": set() for kind, names in MEMBERS.items() for name in names}
    for room in rooms():
        for _, tree in room.trees():
            for name, keywords in names_used(tree).items():
                found.setdefault(name, set()).update(keywords)
    return {name: sorted(found[name]) for name in sorted(found)}


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.expr, known: Mapping[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    return ".".join([known[node.id], *reversed(parts)])


@attrs.frozen
class Definition:
    """What a name is in a wheel.

    Args:
        module: that defines it.
        node: what does; None for a module.
    """

    module: str
    node: ast.AST | None


@attrs.define(slots=False)
class Wheel:
    """The Python files of a wheel of torch, each read when it is first asked for."""

    path: Path
    trees: dict[str, dict[str, list[ast.AST]] | None] = attrs.field(factory=dict)
    _known: dict[str, list[Definition]] = attrs.field(factory=dict, init=False)

    @cached_property
    def version(self) -> str:
        """Of torch."""
        found = re.match(r"torch-([0-9.]+)", self.path.name)
        assert found, self.path
        return found[1]

    @cached_property
    def _files(self) -> Mapping[str, list[str]]:
        """Files by module; stubs last."""
        found: dict[str, list[str]] = {}
        for file in sorted(zipfile.ZipFile(self.path).namelist(), key=lambda file: file.endswith(".pyi")):
            if file.startswith("torch/") and file.endswith((".py", ".pyi")):
                stem = file.rpartition(".")[0].removesuffix("/__init__")
                found.setdefault(stem.replace("/", "."), []).append(file)
        return found

    def names(self, module: str) -> dict[str, list[ast.AST]] | None:
        """Return what a module binds at its top level, stars included under ``*``; None where there is none."""
        if module not in self._files:
            return None
        if module not in self.trees:
            bound: dict[str, list[ast.AST]] = {}
            with zipfile.ZipFile(self.path) as archive:
                for file in self._files[module]:
                    for name, node in _bound(ast.parse(archive.read(file)).body):
                        bound.setdefault(name, []).append(node)
            self.trees[module] = bound
        return self.trees[module]

    def find(self, name: str) -> list[Definition]:
        """Return what a full name stands for; nothing where it can't be found."""
        if name not in self._known:
            self._known[name] = []  # for whoever asks while it is looked for, as modules import each other in circles
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> list[Definition]:
        head, _, last = name.rpartition(".")
        if name in self._files:
            return [Definition(name, None)]
        if not head:
            return []
        found = []
        for holder in self.find(head):
            if holder.node is None:
                found += self._in_module(holder.module, last)
            elif isinstance(holder.node, ast.ClassDef):
                found += self._in_class(holder, last)
            elif isinstance(holder.node, ast.AnnAssign):  # an object whose class is annotated
                found += self.find(f"{holder.module}.{ast.unparse(holder.node.annotation)}.{last}")
            elif isinstance(holder.node, ast.Assign) and isinstance(holder.node.value, ast.Call):  # one that is made
                found += self.find(f"{holder.module}.{ast.unparse(holder.node.value.func)}.{last}")
        return found

    def _in_module(self, module: str, name: str) -> list[Definition]:
        names = self.names(module)
        if names is None:
            return []
        if name in _OF_MODULES:
            return [Definition(module, ast.Constant(name))]
        found = [one for node in names.get(name, ()) for one in self._follow(module, node, name)]
        for star in names.get("*", ()) if not found else ():
            assert isinstance(star, ast.ImportFrom)
            found += self.find(f"{self._source(module, star)}.{name}")
        return found

    def _follow(self, module: str, node: ast.AST, name: str) -> list[Definition]:
        """Return what is bound: where it comes from, if it is another name for something."""
        if isinstance(node, ast.ImportFrom):
            (alias,) = [alias for alias in node.names if (alias.asname or alias.name) == name]
            source = self._source(module, node)
            return self.find(f"{source}.{alias.name}") if source.startswith("torch") else [Definition(module, node)]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            dotted = ast.unparse(node.value)
            other = self.find(dotted if dotted.startswith("torch.") else f"{module}.{dotted}")
            return other or [Definition(module, node)]
        return [Definition(module, node)]

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = any(Path(file).stem == "__init__" for file in self._files[module])
        parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _in_class(self, holder: Definition, name: str) -> list[Definition]:
        assert isinstance(holder.node, ast.ClassDef)
        members = dict(_members(holder.node))
        if name in members:
            return [Definition(holder.module, members[name])]
        for base in holder.node.bases:
            dotted = ast.unparse(base)
            for kind in self.find(dotted if dotted.startswith("torch.") else f"{holder.module}.{dotted}"):
                if isinstance(kind.node, ast.ClassDef) and (found := self._in_class(kind, name)):
                    return found
        return []

    def answer(self, name: str, keywords: Sequence[str]) -> dict[str, Any]:
        """Return whether the wheel has a name, and which keywords are missing or unknown."""
        found = self.find(name)
        if not found:
            made_in_c = name.startswith(("torch._C", "torch.ops"))
            return {"name": UNKNOWN if made_in_c else MISSING}
        if not keywords:
            return {"name": FOUND}
        taken = [parameters for one in found for parameters in self._parameters(one)]
        if not taken:
            return {"name": FOUND, UNKNOWN: list(keywords)}
        missing = [word for word in keywords if not any(word in one or "**" in one for one in taken)]
        return {"name": FOUND, **({MISSING: missing} if missing else {})}

    def _parameters(self, found: Definition) -> list[set[str]]:
        """Return the names of parameters, of each overload; nothing where they are unknown."""
        if isinstance(found.node, ast.FunctionDef):
            arguments = found.node.args
            names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            return [names | ({"**"} if arguments.kwarg else set())]
        if not isinstance(found.node, ast.ClassDef):
            return []
        for maker in ("__init__", "__new__"):
            made = [one for one in self._in_class(found, maker) if isinstance(one.node, ast.FunctionDef)]
            if made:
                return [one for definition in made for one in self._parameters(definition)]
        fields = {
            one.target.id
            for one in found.node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        return [fields] if fields else []


def _bound(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield names with what binds them, in blocks such as ``if TYPE_CHECKING`` too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign):
            targets = [one for target in node.targets for one in ast.walk(target)]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _bound(handler.body)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Yield members of a class, those that its methods set and slots included."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
            yield one.attr, one
    yield from _bound(node.body)


def main(wheels: Sequence[str]) -> None:
    """Write the file."""
    read = sorted((Wheel(Path(path)) for path in wheels), key=lambda wheel: wheel.version)
    table: dict[str, dict[str, Any]] = {
        name: {"keywords": keywords, **{wheel.version: wheel.answer(name, keywords) for wheel in read}}
        for name, keywords in all_names_used().items()
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for wheel in read:
        rows = {name: row[wheel.version] for name, row in table.items()}
        for said in (MISSING, UNKNOWN):
            named = [name for name, row in rows.items() if row["name"] == said]
            words = [f"{name}({', '.join(row[said])})" for name, row in rows.items() if said in row]
            sys.stdout.write(f"torch {wheel.version}: {said}: {', '.join([*named, *words]) or 'nothing'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Each package declares exactly what it imports."""

from __future__ import annotations

import tomllib
from importlib.metadata import packages_distributions

import pytest
from house import ROOT, Room, installed, providers, rooms

UNWANTED = {"torchvision", "torchcodec"}  # the registry's builds break torch and transformers by their presence
ALSO = {"torch.utils.tensorboard": "tensorboard"}  # a module of torch that needs another distribution


def imported(room: Room) -> dict[str, str]:
    """Return the distributions that a room imports, each with one place where it does."""
    known = installed()
    needed, optional = room.declared()
    found: dict[str, str] = {}
    for place in room.imports():
        choices = providers(place.module, known) - {room.name}
        also = {name for module, name in ALSO.items() if f"{place.module}.".startswith(f"{module}.")}
        for distribution in also | (choices & (needed | optional) or choices):
            found.setdefault(distribution, str(place))
    return found


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_every_import_is_declared(room: Room) -> None:
    """What a package imports it declares, in its dependencies or in an extra."""
    needed, optional = room.declared()
    undeclared = {name: place for name, place in imported(room).items() if name not in needed | optional}
    assert not undeclared


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_every_declaration_is_imported(room: Room) -> None:
    """What a package declares it imports."""
    needed, optional = room.declared()
    unused = sorted((needed | optional) - set(imported(room)))
    assert not unused


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_nothing_declares_what_breaks_torch(room: Room) -> None:
    """No package asks for a distribution whose presence breaks others."""
    assert not UNWANTED & frozenset.union(*room.declared())


def test_house_workspace_knows_every_room() -> None:
    """The workspace names each package and plugin as a source, so that uv takes it from here."""
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["sources"]
    assert sorted(sources) == sorted(room.name for room in rooms())


@pytest.mark.parametrize("name", sorted(UNWANTED))
def test_house_environment_is_free_of_what_breaks_torch(name: str) -> None:
    """Nothing that was installed here dragged it in."""
    assert name not in packages_distributions()

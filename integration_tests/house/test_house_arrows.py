"""Who may import whom: the arrows between packages, and that plugins import as third-party packages may."""

from __future__ import annotations

import pytest
from house import ROOT, Room, rooms

ARROWS = {
    "hooks": (),
    "topology": ("hooks",),
    "schedule": ("hooks", "topology"),
    "model": ("hooks", "topology"),
    "optimizer": ("hooks", "topology"),
    "checkpoint": ("hooks",),
    "data": ("hooks", "topology"),
    "testing": ("hooks",),
    "launch": ("hooks", "topology"),
    "planner": ("hooks", "topology", "schedule"),
    "trainer": ("hooks", "topology", "schedule", "model", "optimizer", "checkpoint", "data", "launch", "planner"),
}
OWNERS = {
    "mimo.encoders": "model",
    "mimo.language_models": "model",
    "mimo.generators": "model",
    "mimo.optimizers": "optimizer",
    "mimo.schedules": "schedule",
    "mimo.datasets": "data",
    "mimo.tokenizers": "data",
    "mimo.answer_metrics": "data",
    "mimo.lifecycle": "hooks",
}
BESIDE = {
    "mimo_dataset_spoken_digits": ("mimo_dataset_digits",),
    "mimo_optimizer_distributed": ("mimo.topology",),
    "mimo_optimizer_hybrid": ("mimo.topology", "mimo_optimizer_distributed"),
    "mimo_optimizer_muon": ("mimo_optimizer_distributed",),
}
"""What plugins of ours import beside hooks and the packages that own their kinds: `mimo_optimizer_distributed` is there
to be built on, and spoken digits stand beside the handwritten ones."""


def allowed(room: Room) -> set[str]:
    """Return the packages of ours that a room may import, itself included."""
    if room.is_plugin:
        owners = (f"mimo.{OWNERS[group]}" for group in room.groups)
        return {"mimo.hooks", room.package, *owners, *BESIDE.get(room.package, ())}
    return {room.package, *(f"mimo.{name}" for name in ARROWS[room.folder.name])}


def of_ours(module: str) -> str | None:
    """Return the package of ours that holds a module."""
    top, *rest = module.split(".")
    if top == "mimo":
        return ".".join(["mimo", *rest[:1]])
    return top if top.startswith("mimo_") else None


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_imports_follow_the_arrows(room: Room) -> None:
    """A package imports only what its arrows point to; a plugin hooks, owners of its kinds, and what it builds on."""
    wrong = [str(found) for found in room.imports() if (ours := of_ours(found.module)) and ours not in allowed(room)]
    assert not wrong


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_private_modules_stay_private(room: Room) -> None:
    """Nothing with a leading underscore is imported from another package of ours."""
    wrong = [
        str(found)
        for found in room.imports()
        if of_ours(found.module) not in {None, room.package}
        and any(part.startswith("_") for part in found.module.split("."))
    ]
    assert not wrong


@pytest.mark.parametrize("room", [room for room in rooms() if room.is_plugin], ids=lambda room: room.name)
def test_house_plugins_have_flat_names(room: Room) -> None:
    """A plugin of ours writes into no namespace of ours."""
    assert {path.relative_to(room.source).parts[0] for path in room.files()} == {room.package}


def test_house_namespace_has_no_init() -> None:
    """`mimo` is a namespace that several distributions share; an ``__init__.py`` in one would hide the others."""
    assert not list(ROOT.glob("*/*/src/mimo/__init__.py"))


@pytest.mark.parametrize("room", [room for room in rooms() if not room.is_plugin], ids=lambda room: room.name)
def test_house_packages_hold_one_typed_package(room: Room) -> None:
    """Each distribution holds its own package of the namespace and says that it is typed."""
    files = [path.relative_to(room.source).as_posix() for path in room.files()]
    prefix = room.package.replace(".", "/")
    assert f"{prefix}/py.typed" in files
    assert f"{prefix}/__init__.py" in files
    assert not [file for file in files if not file.startswith(f"{prefix}/")]

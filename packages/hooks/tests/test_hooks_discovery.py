"""Plugins of a kind: found, merged in a fixed order, and every clash or mistake refused with both parties named."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import attrs
import pytest

from mimo.hooks import ConfigError, Kind, PluginError, PluginFailure, discover, hookspec, survey


@attrs.frozen
class AnimalSpec:
    """A kind of plugin that exists only here."""

    name: str
    legs: int = 4


def mimo_register_animals() -> list[AnimalSpec]:  # type: ignore[empty-body]
    """Return the animals of this plugin."""


HOOKSPECS = ModuleType("animal_hookspecs")
HOOKSPECS.mimo_register_animals = hookspec(mimo_register_animals)  # type: ignore[attr-defined]
HOOKSPECS.AnimalSpec = AnimalSpec  # type: ignore[attr-defined]
ANIMALS = Kind(group="mimo.animals", noun="animal", hook="mimo_register_animals", hookspecs=HOOKSPECS, spec=AnimalSpec)


class Shelf(Protocol):
    """The fixture of this folder."""

    def add(self, distribution: str, points: dict[str, dict[str, str]], **modules: str) -> None: ...
    def points(self) -> list[Any]: ...


@pytest.fixture(autouse=True)
def animals_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the source of invented plugins say ``from animals import AnimalSpec``."""
    animals = ModuleType("animals")
    animals.AnimalSpec = AnimalSpec  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "animals", animals)


def test_what_is_installed_or_removed_while_a_program_runs_is_seen(shelf: Shelf, tmp_path: Path) -> None:
    """As in a notebook; what was found is not looked for again as long as nothing changes."""
    assert not discover(ANIMALS).entries
    source = """
        from mimo.hooks import hookimpl
        from animals import AnimalSpec
        @hookimpl
        def mimo_register_animals():
            return [AnimalSpec(name="spider", legs=8)]
        """
    shelf.add("mimo-spiders", {ANIMALS.group: {"spiders": "spiders"}}, spiders=source)
    assert discover(ANIMALS).entries == discover(ANIMALS).entries
    assert discover(ANIMALS).find("spider", "zoo").legs == 8
    shutil.rmtree(tmp_path / "mimo_spiders-1.5.dist-info")
    assert not discover(ANIMALS).entries


def registers(*specs: str) -> str:
    """Return the source of a plugin that registers these specs, each written as an expression."""
    return f"""
from animals import AnimalSpec
from mimo.hooks import hookimpl

@hookimpl
def mimo_register_animals():
    return [{", ".join(specs)}]
"""


def test_hooks_discovery_merges_lists_by_plugin_name(shelf: Shelf) -> None:
    """Specs come in the order of their plugins' names, and inside a plugin in its own order."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')", "AnimalSpec('ant', 6)"))
    shelf.add("farm", {"mimo.animals": {"a": "farm_a"}}, farm_a=registers("AnimalSpec('zebra')"))
    registry = discover(ANIMALS, entry_points=reversed(shelf.points()))
    assert list(registry) == ["zebra", "dog", "ant"]
    assert len(registry) == 3
    assert registry["ant"] == AnimalSpec("ant", 6)
    assert registry.find("dog", "pets.plugin") == AnimalSpec("dog")


def test_hooks_discovery_names_the_origin_of_each_plugin(shelf: Shelf) -> None:
    """An entry holds the entry point's name, distribution, version, hooks and specs."""
    shelf.add("big-zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')"))
    (entry,) = discover(ANIMALS, entry_points=shelf.points()).entries
    assert (entry.group, entry.name, entry.distribution, entry.version) == ("mimo.animals", "b", "big-zoo", "1.5")
    assert entry.hooks == ("mimo_register_animals",)
    assert entry.specs == ("dog",)


def test_hooks_discovery_reads_what_is_installed(shelf: Shelf) -> None:
    """Without entry points given, those of the environment are used."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')"))
    assert list(discover(ANIMALS)) == ["dog"]


def test_hooks_discovery_counts_a_distribution_found_twice_once(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first on the path is the one that imports; an older copy behind it is no clash."""
    shelf.add("big-zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')"))
    shutil.copytree(tmp_path / "big_zoo-1.5.dist-info", tmp_path / "behind" / "Big.Zoo-1.0.dist-info")
    metadata = tmp_path / "behind" / "Big.Zoo-1.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: Big.Zoo\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "behind")])
    assert [entry.version for entry in discover(ANIMALS).entries] == ["1.5"]


def test_hooks_discovery_imports_only_the_group_that_was_asked_for(shelf: Shelf) -> None:
    """A broken plugin of another kind is nobody's concern here."""
    shelf.add("rocks", {"mimo.minerals": {"iron": "no_such_module"}, "pytest11": {"x": "no_such_module"}})
    assert not discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_accepts_an_object_as_plugin(shelf: Shelf) -> None:
    """An entry point may name an instance inside a module."""
    shelf.add(
        "zoo",
        {"mimo.animals": {"b": "zoo_b:plugin"}},
        zoo_b="""
from animals import AnimalSpec
from mimo.hooks import hookimpl

class Plugin:
    @hookimpl
    def mimo_register_animals(self):
        return [AnimalSpec("cat")]

plugin = Plugin()
""",
    )
    assert list(discover(ANIMALS, entry_points=shelf.points())) == ["cat"]


def test_hooks_discovery_lets_one_module_serve_two_groups(shelf: Shelf) -> None:
    """Of a module that is listed in two groups, each group calls its own hook."""
    shelf.add(
        "zoo",
        {"mimo.animals": {"b": "zoo_b"}, "mimo.lifecycle": {"b": "zoo_b"}},
        zoo_b=registers("AnimalSpec('dog')") + "\n@hookimpl\ndef mimo_run_end(run): ...\n",
    )
    assert list(discover(ANIMALS, entry_points=shelf.points())) == ["dog"]


def test_hooks_discovery_refuses_two_distributions_with_one_entry_point_name(shelf: Shelf) -> None:
    """The error names both distributions, their versions and modules."""
    shelf.add("zoo", {"mimo.animals": {"pets": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')"))
    shelf.add("farm", {"mimo.animals": {"pets": "farm_a"}}, farm_a=registers("AnimalSpec('cow')"))
    text = "entry point mimo.animals: pets: expected one distribution with this name, got farm 1.5 (farm_a) and zoo 1.5"
    with pytest.raises(PluginError, match=re.escape(text)):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_refuses_two_plugins_with_one_spec_name(shelf: Shelf) -> None:
    """The error names the spec and both plugins."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')"))
    shelf.add("farm", {"mimo.animals": {"a": "farm_a"}}, farm_a=registers("AnimalSpec('cow')", "AnimalSpec('dog')"))
    text = "animal 'dog': expected one plugin that registers it, got 'a' of farm 1.5 and 'b' of zoo 1.5."
    with pytest.raises(PluginError, match=re.escape(text)):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_refuses_one_plugin_that_registers_a_name_twice(shelf: Shelf) -> None:
    """A plugin may clash with itself too."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')", "AnimalSpec('dog', 3)"))
    with pytest.raises(PluginError, match=r"animal 'dog': .* got 'b' of zoo 1\.5 and 'b' of zoo 1\.5"):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_suggests_a_near_name(shelf: Shelf) -> None:
    """An unknown name is a setting's error that lists what is installed and offers the nearest."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')", "AnimalSpec('Ant')"))
    registry = discover(ANIMALS, entry_points=shelf.points())
    text = (
        "pets.first.plugin: expected an installed animal (Ant, dog), got 'ants'. "
        'Did you mean "Ant"? It may be misspelled or not installed; `mimo plugins` lists what is.'
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        registry.find("ants", "pets.first.plugin")


def test_hooks_discovery_suggests_nothing_when_nothing_is_near() -> None:
    """Without any plugin installed the error says so."""
    text = r"^pets\.plugin: expected an installed animal \(there is none\), got 'ant'\. It may be misspelled or not"
    with pytest.raises(ConfigError, match=text):
        discover(ANIMALS, entry_points=()).find("ant", where="pets.plugin")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_hooks_discovery_names_the_plugin_that_cannot_be_imported(shelf: Shelf, source: str, reason: str) -> None:
    """Which entry point, which distribution, which version, and why."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=source)
    text = (
        f"plugin 'b' of zoo 1.5 (entry point mimo.animals: zoo_b): expected a module that can be imported, got {reason}"
    )
    with pytest.raises(PluginError, match=f"^{re.escape(text)}"):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_opens_errors_with_the_setting_that_asked(shelf: Shelf) -> None:
    """With the path of a setting given, the error begins with it and keeps its cause."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b:gone"}}, zoo_b="")
    text = r"^pets\.plugin: plugin 'b' of zoo 1\.5 .* got AttributeError"
    with pytest.raises(PluginError, match=text) as caught:
        discover(ANIMALS, where="pets.plugin", entry_points=shelf.points())
    assert isinstance(caught.value.__cause__, AttributeError)


BROKEN = {
    "misspelled hook": (
        "@hookimpl\ndef mimo_register_animal(): ...",
        "expected hooks that are specified (mimo_register_animals), got 'mimo_register_animal', which nobody specified",
    ),
    "without prefix": (
        "@hookimpl\ndef register(): ...",
        "expected hooks that are specified (mimo_register_animals), got 'register', which nobody specified",
    ),
    "without marker": (
        "def mimo_run_end(run): ...",
        "expected mimo_run_end to be marked with @mimo.hooks.hookimpl, got a function without the marker",
    ),
    "another project's marker": (
        "import pluggy\n@pluggy.HookimplMarker('other')\ndef mimo_run_end(run): ...",
        "expected mimo_run_end to be marked with @mimo.hooks.hookimpl, got a function without the marker",
    ),
    "a lifecycle hook in the wrong group": (
        "@hookimpl\ndef mimo_run_end(run): ...",
        "got only one of mimo.animals, where it would never be called. List zoo_b under mimo.lifecycle too.",
    ),
}


@pytest.mark.parametrize(("source", "text"), BROKEN.values(), ids=BROKEN)
def test_hooks_discovery_refuses_a_hook_that_would_never_be_called(shelf: Shelf, source: str, text: str) -> None:
    """A function that looks like a hook and is none is an error, not silence."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')") + "\n" + source)
    with pytest.raises(PluginError, match=r"^plugin 'b' of zoo 1\.5 .*" + re.escape(text)):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_refuses_a_hook_of_another_installed_kind(shelf: Shelf) -> None:
    """The refusal of a hook in a group that never calls it names the group that does."""
    shelf.add("rocks", {"mimo.minerals": {"iron": "iron"}}, iron="")
    source = registers("AnimalSpec('dog')") + "\n@hookimpl\ndef mimo_register_minerals(): ...\n"
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=source)
    with pytest.raises(PluginError, match=r"expected mimo_register_minerals .* an entry point of mimo\.minerals"):
        discover(ANIMALS, entry_points=shelf.points())


ANSWERS = {
    "nothing": ("return None", "expected a list of AnimalSpec, got None"),
    "tuple": ("return (AnimalSpec('a'),)", "expected a list of AnimalSpec, got (AnimalSpec(name='a', legs=4),)"),
    "wrong type": ("return ['dog']", "expected only AnimalSpec in the list, got 'dog'"),
    "class": ("return [AnimalSpec]", "expected only AnimalSpec in the list, got <class"),
    "no name": ("return [AnimalSpec('')]", "expected a name for each AnimalSpec, got ''"),
    "raises": ("raise KeyError('x')", "expected mimo_register_animals to return its animals, got KeyError: 'x'"),
}


@pytest.mark.parametrize(("body", "text"), ANSWERS.values(), ids=ANSWERS)
def test_hooks_discovery_refuses_an_answer_that_is_no_list_of_specs(shelf: Shelf, body: str, text: str) -> None:
    """What the hook returns is checked, and the plugin named."""
    source = f"""
from animals import AnimalSpec
from mimo.hooks import hookimpl

@hookimpl
def mimo_register_animals():
    {body}
"""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=source)
    with pytest.raises(PluginError, match=r"^plugin 'b' of zoo 1\.5 .*" + re.escape(text)):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_refuses_a_hook_with_arguments_that_it_never_gets(shelf: Shelf) -> None:
    """An argument that the hook does not have is refused with the plugin's name."""
    source = "from mimo.hooks import hookimpl\n@hookimpl\ndef mimo_register_animals(color): ...\n"
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=source)
    with pytest.raises(PluginError, match=r"(?s)^plugin 'b' of zoo 1\.5 .*'color'"):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_refuses_a_plugin_that_registers_nothing(shelf: Shelf) -> None:
    """An entry point of a kind must implement the hook of that kind."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b="")
    with pytest.raises(PluginError, match="expected a function mimo_register_animals, got none"):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_discovery_refuses_a_class_as_plugin(shelf: Shelf) -> None:
    """A class has no instance to call its methods on."""
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b:Plugin"}}, zoo_b="class Plugin: ...")
    with pytest.raises(PluginError, match="expected a module or an instance that carries the hooks, got the class"):
        discover(ANIMALS, entry_points=shelf.points())


def test_hooks_survey_shows_broken_plugins_beside_working_ones(shelf: Shelf) -> None:
    """Every installed plugin is a row; clashes and failures hold the error that `discover` would raise."""
    shelf.add("barn", {"mimo.animals": {"d": "barn_d"}}, barn_d=registers("AnimalSpec('cow')"))
    shelf.add("farm", {"mimo.animals": {"a": "farm_a"}}, farm_a=registers("AnimalSpec('dog')"))
    shelf.add("wild", {"mimo.animals": {"c": "wild_c"}}, wild_c="import no_such_library")
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}}, zoo_b=registers("AnimalSpec('dog')"))
    shelf.add("log", {"mimo.lifecycle": {"e": "log_e", "f": "no_such_module"}}, log_e=LISTENER)
    rows = survey([ANIMALS], entry_points=iter(shelf.points()))
    assert [(row.name, row.distribution, isinstance(row, PluginFailure)) for row in rows] == [
        ("a", "farm", True),
        ("b", "zoo", True),
        ("c", "wild", True),
        ("d", "barn", False),
        ("e", "log", False),
        ("f", "log", True),
    ]
    assert isinstance(rows[2], PluginFailure)
    assert "No module named 'no_such_library'" in str(rows[2].error)
    assert isinstance(rows[0], PluginFailure)
    assert "'a' of farm 1.5 and 'b' of zoo 1.5" in str(rows[0].error)


LISTENER = """
from mimo.hooks import hookimpl

@hookimpl
def mimo_run_end(run): ...
"""

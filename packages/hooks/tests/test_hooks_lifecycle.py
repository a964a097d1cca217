"""Lifecycle plugins: called in a fixed order, with typed values, and refused when they would be silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest

from mimo.hooks import (
    CheckpointError,
    Common,
    EvaluationInfo,
    Generators,
    IndexInfo,
    PluginError,
    RunInfo,
    Stateful,
    StateTree,
    StepInfo,
    UserError,
    hookimpl,
    lifecycle,
)

RUN = RunInfo(name="r", directory=Path("runs/r"), rank=0, world=1, first_step=1, steps=2, config={})
EVALUATION = EvaluationInfo(step=1, loss=1.0, exact_match=0.5, samples=2)
INDEX = IndexInfo(name="data", path=Path("data.sizes"), samples=2, broken=0, distributions={"tokens": [(3, 2)]})


class Shelf(Protocol):
    """The fixture of this folder."""

    def add(self, distribution: str, points: dict[str, dict[str, str]], **modules: str) -> None: ...
    def points(self) -> list[Any]: ...


@attrs.frozen
class Listener:
    """Notes what it hears under its name."""

    name: str
    heard: list[tuple[str, Any]]

    @hookimpl
    def mimo_run_begin(self, run: RunInfo) -> None:
        self.heard.append((self.name, run))

    @hookimpl
    def mimo_step_begin(self, step: int) -> None:
        self.heard.append((self.name, step))

    @hookimpl
    def mimo_step_end(self, info: StepInfo) -> None:
        self.heard.append((self.name, info))

    @hookimpl
    def mimo_evaluated(self, info: EvaluationInfo) -> None:
        self.heard.append((self.name, info))

    @hookimpl
    def mimo_save_failed(self, step: int, error: UserError) -> None:
        self.heard.append((self.name, (step, error)))

    @hookimpl
    def mimo_indexed(self, index: IndexInfo) -> None:
        self.heard.append((self.name, index))

    @hookimpl
    def mimo_run_end(self, run: RunInfo) -> None:
        self.heard.append((self.name, run))

    @hookimpl
    def mimo_fault(self, error: BaseException) -> None:
        self.heard.append((self.name, error))


@attrs.frozen
class Counter:
    """A part of a run that a checkpoint holds."""

    name: str

    def state(self) -> StateTree:
        return {"count": Common(3)}

    def load(self, tree: StateTree) -> None: ...


@attrs.frozen
class Taking(Counter):
    """Notes what it is loaded with."""

    taken: list[StateTree]

    def load(self, tree: StateTree) -> None:
        self.taken.append(tree)


@attrs.frozen(eq=False)
class Keeper:
    """Contributes what it was given."""

    parts: Any

    @hookimpl
    def mimo_state(self, run: RunInfo) -> Any:
        return self.parts


def test_hooks_lifecycle_hands_every_event_to_every_plugin_in_order(step: StepInfo) -> None:
    """Objects handed in are called in their order, each event with its value."""
    heard: list[tuple[str, Any]] = []
    caller = lifecycle([Listener("first", heard), Listener("second", heard)], entry_points=())
    fault, unwritten = RuntimeError("x"), CheckpointError("step_00000001", expected="no failure", got="a full disk")
    caller.run_begin(RUN)
    caller.step_begin(RUN, 1)
    caller.step_end(RUN, step)
    caller.evaluated(RUN, EVALUATION)
    caller.save_failed(RUN, 1, unwritten)
    assert not caller.indexed(INDEX)
    caller.run_end(RUN)
    caller.fault(RUN, fault)
    values = [RUN, 1, step, EVALUATION, (1, unwritten), INDEX, RUN, fault]
    assert heard == [(name, value) for value in values for name in ("first", "second")]


@attrs.frozen(eq=False)
class Failing:
    """Raises when a run ends."""

    error: BaseException

    @hookimpl
    def mimo_run_end(self) -> None:
        raise self.error

    @hookimpl
    def mimo_fault(self) -> None:
        raise self.error


@pytest.mark.parametrize("error", [KeyError("loss"), SystemExit(5)], ids=["exception", "exit"])
def test_hooks_lifecycle_plugins_that_fail_at_the_end_keep_nobody_from_being_called(error: BaseException) -> None:
    """Each is named with what it raised, and nothing is raised: the end of a run is not a plugin's to change."""
    heard: list[tuple[str, Any]] = []
    caller = lifecycle([Listener("first", heard), Failing(error), Listener("last", heard)], entry_points=())
    for failures in (caller.run_end(RUN), caller.fault(RUN, RuntimeError("x"))):
        (failure,) = failures
        where, got = "lifecycle plugin 2, Failing, mimo_", f"got {type(error).__name__}: {error}"
        assert str(failure).startswith(where)
        assert got in str(failure)
        assert failure.__cause__ is error
    assert [name for name, _ in heard] == ["first", "last"] * 2


class SilentError(Exception):
    """One whose text can't be made."""

    def __str__(self) -> str:
        raise KeyError("code")


def test_hooks_lifecycle_names_an_exception_without_a_text() -> None:
    """It keeps nobody from being called either."""
    heard: list[tuple[str, Any]] = []
    caller = lifecycle([Failing(SilentError()), Listener("last", heard)], entry_points=())
    (failure,) = caller.run_end(RUN)
    assert "got SilentError, which has no text" in str(failure)
    assert [name for name, _ in heard] == ["last"]


def test_hooks_lifecycle_calls_installed_plugins_by_name_after_those_handed_in(shelf: Shelf) -> None:
    """The order does not depend on the order in which distributions are found."""
    source = """
from mimo.hooks import hookimpl

@hookimpl
def mimo_run_begin(run):
    run.config["heard"].append(__name__)
"""
    shelf.add("aa", {"mimo.lifecycle": {"late": "aa_late"}}, aa_late=source)
    shelf.add("zz", {"mimo.lifecycle": {"early": "zz_early"}}, zz_early=source)
    heard: list[Any] = []
    caller = lifecycle([Listener("given", heard)], entry_points=reversed(shelf.points()))
    caller.run_begin(attrs.evolve(RUN, config={"heard": heard}))
    assert [item[0] if isinstance(item, tuple) else item for item in heard] == ["given", "zz_early", "aa_late"]


def test_hooks_lifecycle_without_plugins_does_nothing() -> None:
    """No plugin is an ordinary case."""
    caller = lifecycle(entry_points=())
    caller.run_begin(RUN)
    assert caller.state(RUN) == []


def test_hooks_lifecycle_collects_state_in_order() -> None:
    """The parts of all plugins come as one list."""
    caller = lifecycle([Keeper([Counter("a"), Counter("b")]), Keeper([]), Keeper([Counter("c")])], entry_points=())
    parts: list[Stateful] = caller.state(RUN)
    assert [part.name for part in parts] == ["a", "b", "c"]


def test_hooks_lifecycle_takes_generators_for_parts() -> None:
    """What a plugin marks as generators is a part like any other, by the same name and with the same state."""
    taken: list[StateTree] = []
    marked = Generators(Taking("dice", taken))
    (part,) = lifecycle([Keeper([marked])], entry_points=()).state(RUN)
    assert part is marked
    assert (part.name, part.state()) == ("dice", {"count": Common(3)})
    part.load({"count": Common(4)})
    assert taken == [{"count": Common(4)}]


def test_hooks_lifecycle_refuses_two_state_parts_with_one_name() -> None:
    """Two parts under one key of a checkpoint are refused, both plugins named."""
    caller = lifecycle([Keeper([Counter("a")]), Listener("x", []), Keeper([Counter("a")])], entry_points=())
    text = "state 'a': expected one plugin that contributes it, got lifecycle plugin 1, Keeper and lifecycle plugin 3"
    with pytest.raises(PluginError, match=re.escape(text)):
        caller.state(RUN)


@pytest.mark.parametrize("parts", [None, Counter("a"), (Counter("a"),), [3]], ids=["none", "bare", "tuple", "number"])
def test_hooks_lifecycle_refuses_state_that_is_no_list_of_parts(parts: object) -> None:
    """Anything but a list of `Stateful` is refused, the plugin named."""
    with pytest.raises(PluginError, match=r"^lifecycle plugin 1, Keeper, mimo_state: expected a list of Stateful"):
        lifecycle([Keeper(parts)], entry_points=()).state(RUN)


class Misspelled:
    """Implements a hook that nobody specified."""

    @hookimpl
    def mimo_step_ends(self) -> None: ...


class Unmarked:
    """Forgets the marker."""

    def mimo_step_end(self) -> None: ...


class Deaf:
    """Implements nothing."""


class Greedy:
    """Wants an argument that the hook does not have."""

    @hookimpl
    def mimo_run_end(self, loss: float) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (Misspelled(), r".*\(mimo_evaluated, .*mimo_step_end\), got 'mimo_step_ends', which nobody specified"),
        (Unmarked(), "expected mimo_step_end to be marked with @mimo.hooks.hookimpl"),
        (Deaf(), "expected at least one lifecycle hook .* got none"),
        (Greedy(), "expected hooks as they are specified, registered once, got .*'loss'"),
        (Listener, "expected a module or an instance that carries the hooks, got the class Listener"),
    ],
    ids=["misspelled", "unmarked", "deaf", "greedy", "class"],
)
def test_hooks_lifecycle_refuses_an_object_that_would_be_silent(plugin: object, text: str) -> None:
    """An object handed in is held to the same contract as an installed plugin."""
    with pytest.raises(PluginError, match=r"^lifecycle plugin 1, \w+: " + text):
        lifecycle([plugin], entry_points=())


def test_hooks_lifecycle_refuses_an_object_handed_in_twice() -> None:
    """It would be called twice for each event."""
    listener = Listener("x", [])
    with pytest.raises(PluginError, match=r"lifecycle plugin 1, Listener: expected hooks .* registered once"):
        lifecycle([listener, listener], entry_points=())


def test_hooks_lifecycle_refuses_a_broken_installed_plugin(shelf: Shelf) -> None:
    """A plugin that cannot be imported is named with its distribution and version."""
    shelf.add("log", {"mimo.lifecycle": {"f": "no_such_module"}})
    with pytest.raises(PluginError, match=r"^plugin 'f' of log 1\.5 \(entry point mimo\.lifecycle: no_such_module\): "):
        lifecycle(entry_points=shelf.points())


COUNTING = """
from mimo.hooks import Common, hookimpl
class Counting:
    name = "count"
    def __init__(self): self.count = 0
    def state(self): return {"count": Common(self.count)}
    def load(self, tree): ...
    @hookimpl
    def mimo_step_begin(self): self.count += 1
    @hookimpl
    def mimo_state(self): return [self]
"""


def test_hooks_lifecycle_makes_a_class_anew_for_each_caller(shelf: Shelf) -> None:
    """What a plugin remembers belongs to one run, not to the process."""
    shelf.add("log", {"mimo.lifecycle": {"c": "log_c:Counting"}}, log_c=COUNTING)
    first, second = (lifecycle(entry_points=shelf.points()) for _ in range(2))
    first.step_begin(RUN, 1)
    first.step_begin(RUN, 2)
    second.step_begin(RUN, 1)
    assert [caller.state(RUN)[0].state() for caller in (first, second)] == [{"count": Common(2)}, {"count": Common(1)}]


def test_hooks_lifecycle_refuses_a_class_that_wants_arguments(shelf: Shelf) -> None:
    """Nobody could give them."""
    source = "class Wanting:\n    def __init__(self, path): ...\n"
    shelf.add("log", {"mimo.lifecycle": {"c": "log_w:Wanting"}}, log_w=source)
    with pytest.raises(PluginError, match=r"^plugin 'c' of log 1\.5 .* a class Wanting that is made without arguments"):
        lifecycle(entry_points=shelf.points())


def test_hooks_lifecycle_refuses_a_registering_hook_in_its_group(shelf: Shelf) -> None:
    """A module that registers something must be listed under that kind, where its hook is called."""
    source = "from mimo.hooks import hookimpl\n@hookimpl\ndef mimo_register_animals(): ...\n"
    shelf.add("zoo", {"mimo.animals": {"b": "zoo_b"}, "mimo.lifecycle": {"b": "zoo_c"}}, zoo_b="", zoo_c=source)
    with pytest.raises(PluginError, match=r"expected mimo_register_animals in .* an entry point of mimo\.animals"):
        lifecycle(entry_points=shelf.points())

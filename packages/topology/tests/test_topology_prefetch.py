"""Modules that work a step ahead: what they work on, and those that can't."""

import pytest

from mimo.hooks import ConfigError
from mimo.topology import Grid, Module, ModuleGraph

ARROWS = (("sound", "vision"), ("vision", "language"))


def module(name: str, *, trains: bool = False, prefetch: bool = False) -> Module:
    """Make a module on one rank."""
    return Module(grid=Grid(name=name, ranks=[0]), trains=(trains,), prefetch=prefetch)


def graph(*, sound: Module, vision: Module, language: Module) -> ModuleGraph:
    """Join three modules in a row."""
    return ModuleGraph(modules=(sound, vision, language), arrows=ARROWS)


def test_topology_a_module_ahead_works_on_the_next_steps_microbatches() -> None:
    """They count on from this step's; in evaluation everything is in its own step."""
    found = graph(
        sound=module("sound", prefetch=True),
        vision=module("vision", prefetch=True),
        language=module("language", trains=True),
    )
    assert [each.first(8) for each in found.modules] == [8, 8, 0]
    assert [each.first(8) for each in found.without_training().modules] == [0, 0, 0]


def test_topology_a_module_that_trains_cannot_be_ahead() -> None:
    """A step changes what the next one's rows would be made with."""
    with pytest.raises(
        ConfigError, match=r"^modules.vision.prefetch: expected a module of which nothing is trained, got one that trai"
    ):
        module("vision", trains=True, prefetch=True)


@pytest.mark.parametrize(
    ("trains", "text"),
    [
        (True, r"^modules.vision.prefetch: expected that what feeds it is made ahead too, got sound, which trains"),
        (False, r"got sound, whose rows are made in their own step. Set modules.sound.prefetch = true too, or leave"),
    ],
)
def test_topology_nothing_is_ahead_of_what_feeds_it(trains: bool, text: str) -> None:
    """What a module reads has to be there a step before too."""
    with pytest.raises(ConfigError, match=text):
        graph(
            sound=module("sound", trains=trains),
            vision=module("vision", prefetch=True),
            language=module("language", trains=True),
        )


def test_topology_a_module_that_feeds_none_cannot_be_ahead() -> None:
    """Nobody waits for what it makes."""
    with pytest.raises(ConfigError, match=r"^modules.language.prefetch: expected a module that feeds another one, got"):
        graph(
            sound=module("sound", prefetch=True),
            vision=module("vision", prefetch=True),
            language=module("language", prefetch=True),
        )

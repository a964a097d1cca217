"""Tables into classes: what is accepted, and the exact words of what is not."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from mimo.hooks import ConfigError, PluginError
from mimo.trainer.config.settings import LoggingSettings, steps_of
from mimo.trainer.config.structure import structure, unstructure


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen(kw_only=True)
class Inner:
    width: int = attrs.field(default=1, validator=attrs.validators.gt(0))


@attrs.frozen
class Vague:
    x: Nowhere  # type: ignore[name-defined]  # noqa: F821 -- on purpose


def _refuse(_instance: Any, _attribute: Any, value: float) -> None:
    if value < 0:
        raise ConfigError("somewhere.else.share", expected="0 or more", got=repr(value))


@attrs.frozen(kw_only=True)
class Outer:
    count: int
    share: float = attrs.field(default=0.5, validator=_refuse)
    name: str | None = None
    path: Path = Path("here")
    kind: Literal["fast", "slow"] = "fast"
    colour: Colour = Colour.RED
    flag: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    words: tuple[str, ...] = ()
    inner: Inner = Inner()
    table: Mapping[str, int] = attrs.field(factory=dict)
    either: bool | tuple[str, ...] = ()


def test_everything_that_is_structured_reads_back_the_same() -> None:
    """`unstructure` gives plain data that `structure` takes, absent values left out."""
    value = Outer(
        count=1, share=2.0, path=Path("a/b"), colour=Colour.BLUE, words=("x",), table={"a": 1}, either=("part",)
    )
    plain = unstructure(value)
    assert "name" not in plain
    assert (plain["path"], plain["colour"], plain["betas"]) == ("a/b", "blue", [0.9, 0.95])
    assert structure(plain, Outer, "") == value


def test_a_whole_number_is_taken_for_a_number() -> None:
    """As TOML writes 1 for 1.0."""
    assert structure({"count": 1, "share": 1}, Outer, "").share == 1.0


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({}, "here.count: expected a whole number, got nothing. Set it."),
        ({"count": "3"}, "here.count: expected a whole number, got '3'."),
        ({"count": True}, "here.count: expected a whole number, got True."),
        ({"count": 1.0}, "here.count: expected a whole number, got 1.0."),
        ({"count": 1, "share": "much"}, "here.share: expected a number, got 'much'."),
        ({"count": 1, "share": -1}, "here.share: expected 0 or more, got -1.0."),
        ({"count": 1, "flag": 1}, "here.flag: expected true or false, got 1."),
        ({"count": 1, "name": 3}, "here.name: expected text, got 3."),
        ({"count": 1, "path": 3}, "here.path: expected a path, got 3."),
        ({"count": 1, "kind": "fats"}, "here.kind: expected one of 'fast', 'slow', got 'fats'. Did you mean 'fast'?"),
        ({"count": 1, "colour": "green"}, "here.colour: expected one of 'red', 'blue', got 'green'."),
        ({"count": 1, "betas": [1, 2, 3]}, "here.betas: expected a list of 2, got [1, 2, 3]."),
        ({"count": 1, "betas": [1, "x"]}, "here.betas[1]: expected a number, got 'x'."),
        ({"count": 1, "words": "abc"}, "here.words: expected a list, got 'abc'."),
        ({"count": 1, "words": ["a", 1]}, 'here.words[1]: expected text, got 1. Write it in quotes: "1".'),
        ({"count": 1, "inner": 3}, "here.inner: expected a table, got 3."),
        (
            {"count": 1, "inner": {"widht": 3}},
            "here.inner.widht: expected a known key, got an unknown one. Did you mean",
        ),
        (
            {"count": 1, "inner": {"width": 0}},
            "here.inner.width: expected a valid value, got one that is refused: 'wid",
        ),
        ({"count": 1, "table": {"a": "b"}}, "here.table.a: expected a whole number, got 'b'."),
        ({"count": 1, "either": "all"}, "here.either: expected true or false or a list, got 'all'."),
        ({"count": 1, "either": ["a", 2]}, "here.either[1]: expected text, got 2."),
        (
            {"count": 1, "zzz": 2},
            "here.zzz: expected a known key, got an unknown one. Known here: betas, colour, count",
        ),
        (3, "here: expected a table, got 3."),
    ],
)
def test_wrong_values_are_refused_by_their_full_path(table: Any, text: str) -> None:
    """Path, expectation, finding, and where there is one the next step."""
    with pytest.raises(ConfigError) as caught:
        structure(table, Outer, "here")
    assert str(caught.value).startswith(text)


@attrs.frozen
class Judge:
    """Refuses what its table holds, by the path that it usually has."""

    inner: Inner

    def __attrs_post_init__(self) -> None:
        """Refuse."""
        raise ConfigError("config.inner.width", expected="less", got="more")


def test_a_class_may_refuse_what_a_table_inside_of_it_holds() -> None:
    """The path is the full one, from where the class stands."""
    with pytest.raises(ConfigError, match=r"^here\.inner\.width: expected less, got more"):
        structure({"inner": {"width": 3}}, Judge, "here")


def test_keys_of_a_neighbour_are_suggested_too() -> None:
    """In a table that a plugin shares with others."""
    with pytest.raises(ConfigError, match=r"Did you mean 'clip'\?"):
        structure({"clipp": 1.0}, Inner, "optimizer", siblings=("clip",))


def test_types_that_cannot_be_resolved_are_the_plugins_fault() -> None:
    """A class whose types are imported for the type checker alone cannot be filled."""
    with pytest.raises(PluginError, match="Vague: expected types of settings that can be resolved, got name 'Nowhere'"):
        structure({"x": 1}, Vague, "here")


@attrs.frozen(kw_only=True)
class Optional:
    text: str | None = None
    path: Path | None = None
    count: int | None = None
    kind: Literal["none", "all"] | None = None
    word: str = ""


def test_none_takes_back_what_may_be_left_out() -> None:
    """But for a setting of which it is a value, and text that can't be left out."""
    table = dict.fromkeys(("text", "path", "count", "kind", "word"), "none")
    assert structure(table, Optional, "") == Optional(kind="none", word="none")


@pytest.mark.parametrize(("named", "steps"), [(2, range(2, 3)), ("2", range(2, 3)), ("2-4", range(2, 5))])
def test_steps_to_profile_are_a_number_or_a_span(named: int | str, steps: range) -> None:
    """One that is a number in a file, or on the command line, is a step; it is saved as it was written."""
    found = structure({"profile": named}, LoggingSettings, "logging")
    assert steps_of(found.profile) == steps
    assert unstructure(found)["profile"] == named
    with pytest.raises(ConfigError, match=r"logging.profile: expected one step, or the first and the last.* got 0"):
        structure({"profile": 0}, LoggingSettings, "logging")

"""JSON is read strictly, and what is wrong with it is named by its keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from mimo.hooks import CheckpointError, JsonNode, JsonSource, parse_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is given twice"),
        ("[NaN]", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("[" * 100_000, "too many levels of nesting"),
        ("[" + "9" * 5_000 + "]", "Exceeds the limit"),
        (b'"\xff"', "can't decode byte 0xff"),
        ("{'a': 1}", "line 1 column 2"),
    ],
)
def test_what_is_no_json_is_refused(text: str | bytes, reason: str) -> None:
    """Nothing but a `ValueError` is raised, whatever the text."""
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_constants_are_read_where_they_are_allowed() -> None:
    """Published files hold numbers that JSON doesn't have."""
    assert parse_json("[NaN, Infinity, -Infinity]", constants=True)[1:] == [float("inf"), -float("inf")]


def root(text: str) -> JsonNode:
    """Return the root of a text from a file."""
    return JsonSource(where="a.json", error=CheckpointError, fix="Load another one.", separator=": ").parse(text)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda node: node["b"], "a.json: expected an object with 'b', got {"),
        (lambda node: node["a"][0]["x"], "a.json: a: expected an object with 0"),
        (lambda node: node["a"].list()[1]["n"].integer(), "a.json: a[1]: n: expected an integer, got true."),
        (lambda node: node["a"].list()[0]["n"].text(), "a.json: a[0]: n: expected a string, got -1."),
        (lambda node: node["a"].list()[0]["n"].size(), "a.json: a[0]: n: expected a whole number, got -1."),
        (lambda node: node["sizes"].sizes(), "a.json: sizes[1]: expected a whole number, got 4611686018427387904."),
        (lambda node: node["sizes"].items(), "a.json: sizes: expected an object, got [1, "),
        (lambda node: node.list(), "a.json: expected an array, got {"),
        (lambda node: node.fields(["a"]), "a.json: expected only the keys a, got 'sizes'."),
        (lambda node: node.fields(["a", "c"], ["sizes"]), "a.json: c: expected a value, got none."),
        (lambda node: node["long"].integer(), 'a.json: long: expected an integer, got "' + "x" * 78 + "…."),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_keys(read: Callable[[JsonNode], Any], text: str) -> None:
    """The error is of the class that was asked for, and says what to do."""
    node = root(f'{{"a": [{{"n": -1}}, {{"n": true}}], "sizes": [1, {1 << 62}], "long": "{"x" * 100}"}}')
    with pytest.raises(CheckpointError, match=f"^{re.escape(text)}") as caught:
        read(node)
    assert caught.value.fix == "Load another one."


def test_a_failure_may_have_a_next_step_of_its_own() -> None:
    """In place of the one that all others have."""
    node = root('{"a": 1}')["a"]
    assert str(node.fail("a name", "Write one.")) == "a.json: a: expected a name, got 1. Write one."


def test_values_are_returned_as_they_are() -> None:
    """What is right is given back, and a root that is no JSON is an error of the same class."""
    node = root('{"a": [1, -2], "b": [3, 4], "c": "d"}')
    fields = node.fields(["a", "b"], ["c", "e"])
    assert (fields["a"].integers(), fields["b"].sizes(), fields["c"].text()) == ((1, -2), (3, 4), "d")
    with pytest.raises(CheckpointError, match=r"^a\.json: expected JSON, got Expecting value at line 2, column 1"):
        root("\n")
    with pytest.raises(CheckpointError, match=r"^a\.json: expected JSON, got 'a' is given twice\. Load another one\."):
        root('{"a": 1, "a": 1}')

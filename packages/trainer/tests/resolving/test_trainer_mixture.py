"""Every refusal of a mixture's settings, as a user meets it: by the path of the setting, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from eye import make_job, on, table

from mimo.hooks import ConfigError

MOCK: Mapping[str, Any] = {"plugin": "mock", "text": 8, "images": 0, "samples": 4}
NUMBER = "expected a finite number above 0"


def resolve_with(sources: Any, **data: Any) -> None:
    """Resolve a run of text alone on a mixture."""
    make_job({**table({"language": on(0, 0)}), "data": {"plugin": "mixture", "sources": sources, **data}})


def test_a_mixture_of_sources_is_allowed() -> None:
    """With weights, epochs or neither; a source may be named as it likes to be, also as a key is."""
    resolve_with({"a": MOCK, "weight": MOCK})
    resolve_with({"a": {**MOCK, "weight": 0.5}, "b": {**MOCK, "weight": 3}})
    resolve_with({"a": {**MOCK, "epochs": 2}})


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, "data.sources: expected at least one source, got none. Add a table [data.sources.<name>]"),
        (3, "data.sources: expected a table, got 3"),
        ({"a": 3}, "data.sources.a: expected a table, got 3"),
        ({"a": [MOCK]}, "data.sources.a: expected a table, got"),
        ({"a": {}}, "data.sources.a.plugin: expected text, got nothing. Set it."),
        ({"a": {**MOCK, "plugin": "mocc"}}, "data.sources.a.plugin: expected an installed dataset ("),
        ({"a": {**MOCK, "plugin": 3}}, "data.sources.a.plugin: expected text, got 3."),
        (
            {"a": {**MOCK, "txt": 3}},
            "data.sources.a.txt: expected a known key, got an unknown one. Did you mean 'text",
        ),
        ({"a": {**MOCK, "text": "long"}}, "data.sources.a.text: expected a whole number, got 'long'"),
        ({"a": {"plugin": "jsonl"}}, "data.sources.a.path: expected text, got nothing"),
        ({"a": {"plugin": "jsonl", "path": "none.jsonl"}}, "data.sources.a.path: expected an existing jsonl file"),
        ({"a": {"plugin": "mixture", "sources": {"b": MOCK}}}, "data.sources.a.plugin: expected a dataset that is no"),
        ({"1st": MOCK}, "data.sources: expected names of letters, digits and _ that don't begin with a digit"),
        ({"a": {**MOCK, "weight": 1, "epochs": 2}}, "data.sources.a.epochs: expected nothing beside weight"),
        ({"a": {**MOCK, "weight": 1}, "b": MOCK}, "data.sources.b.weight: expected a number, as a has one, got none"),
        ({"a": {**MOCK, "epochs": 1}, "b": MOCK}, "data.sources.b.epochs: expected a number, as a has one, got none"),
        ({"a": {**MOCK, "weight": "much"}}, "data.sources.a.weight: expected a number, got 'much'"),
        ({"a": {**MOCK, "weight": True}}, "data.sources.a.weight: expected a number, got True"),
        *(
            ({"a": {**MOCK, key: value}}, f"data.sources.a.{key}: {NUMBER}, got {float(value)}")
            for key in ("weight", "epochs")
            for value in (0, -1, math.inf)
        ),
        *(
            ({"a": {**MOCK, key: math.nan}}, f"data.sources.a.{key}: expected a number, got nan")
            for key in ("weight", "epochs")
        ),
    ],
)
def test_settings_of_a_mixture_are_refused_by_their_path(sources: Any, message: str) -> None:
    """Whatever is wrong with a source, its name stands in the message."""
    with pytest.raises(ConfigError) as refused:
        resolve_with(sources)
    assert str(refused.value).startswith(message)


def test_evaluating_on_a_mixture_that_holds_nothing_out_is_refused() -> None:
    """No source has samples for it, where they are asked for."""
    run = {**table({"language": on(0, 0)})["run"], "evaluation_interval": 1}
    with pytest.raises(ConfigError) as refused:
        make_job({**table({"language": on(0, 0)}), "run": run, "data": {"plugin": "mixture", "sources": {"a": MOCK}}})
    assert "expected held-out samples to evaluate on, got" in str(refused.value)
    assert "Check the keys of [data], or set run.evaluation_interval = 0." in str(refused.value)

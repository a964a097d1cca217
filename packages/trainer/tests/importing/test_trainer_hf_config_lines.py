"""Lines of a published ``config.json``."""

from __future__ import annotations

import json

import pytest

from mimo.trainer.importing.config_lines import line_of

TEXT = json.dumps(
    {
        "a": ["x", {"tied": 1}],
        "tied: ": '"tied": {',
        "text_config": {"inner": {"tied": True}, "tied": False},
        "tied": True,
    },
    indent=2,
)


@pytest.mark.parametrize(
    ("path", "line"),
    [(("tied",), 15), (("text_config", "tied"), 13), (("text_config", "inner", "tied"), 11), (("none",), 0)],
)
def test_the_line_of_a_key_is_that_of_its_own_object(path: tuple[str, ...], line: int) -> None:
    """Not of another one of this name, nor of text that looks like it."""
    assert line_of(TEXT, path) == line
    if line:
        assert f'"{path[-1]}": ' in TEXT.splitlines()[line - 1]

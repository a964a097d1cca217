"""A few settings that nobody chose; `nox -s fuzz` checks a thousand."""

from __future__ import annotations

import random
import re

import pytest
from fuzz import fuzz
from fuzzing import Case, Checked, draw, faults, has_place

SOUND = Checked(code=0, out="", err="", seconds=1.0, peak=300 << 20)
CASE = Case(base="x", text="[run]\n[modules.vision.config]\nwidth = 0\n")


def test_settings_that_nobody_chose_are_refused_by_path_or_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, none that takes long or much memory, none without a setting's path."""
    assert fuzz(7, range(20), only=("init",)) == 0, capsys.readouterr().out


def test_settings_depend_on_seed_and_number_alone() -> None:
    """So that what failed can be looked at again."""
    table = {"init": {"run": {"name": "a", "steps": 2}, "modules": {}}}
    assert draw(random.Random("3 4"), table) == draw(random.Random("3 4"), table)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"code": 3, "err": "Traceback (most recent call last):\n"}, "ended with 3"),
        ({"code": -24}, "ended with -24"),
        ({"code": 2, "err": "mimo: run.steps: expected 1, got 0.\n", "seconds": 3.1}, "refused after 2.1 s"),
        ({"code": 2, "err": "mimo: run.steps: expected 1, got 0.\n", "peak": 401 << 20}, "refused after .* 101 MiB"),
        ({"code": 2, "err": "mimo: what is this\n"}, "refused without a setting's path"),
        ({"code": 2, "err": "mimo: : expected a known key, got an unknown one.\n"}, "refused without a setting's path"),
        ({"code": 2, "err": "mimo: width: expected 1, got 0.\n"}, "refused without a setting's path"),
        ({"code": 2, "err": "mimo: config.width: expected 1, got 0.\n"}, "refused without a setting's path"),
        ({"out": "\x1b[31m"}, r"prints '.x1b'"),
        ({"seconds": 200.0}, "accepted, and took 199.0 s"),
    ],
)
def test_the_fuzzer_sees_what_is_wrong(changes: dict[str, object], fault: str) -> None:
    """Each kind of fault, and none in a refusal as it should be."""
    values = {"code": 0, "out": "", "err": "", "seconds": 1.0, "peak": 300 << 20, **changes}
    (found,) = faults(CASE, Checked(**values), SOUND)  # type: ignore[arg-type]  # of the table above
    assert re.search(fault, found)
    sound = Checked(code=2, out="", err="mimo: run.steps: expected 1 or more, got 0.\n", seconds=1.0, peak=300 << 20)
    assert not list(faults(CASE, sound, SOUND))


@pytest.mark.parametrize(
    ("place", "text", "overrides", "has"),
    [
        ("modules.vision.config.width", "", (), True),
        ("config.width", "", ("modules.vision.config.width=0",), False),
        ("modules", "", ("modules.vision.config.width=0",), True),
        ("own", "own = 1", (), True),
        ("own.key", "[own]", (), True),
        ("owner", "[own]", (), False),
        ('"two words".key', '["two words"]', (), True),
        ('""', '"" = 1', (), True),
        ("a", "a = 1\na = 2", (), False),
        ("dir/fuzz.toml", "a = 1\na = 2", (), True),
        ("x.y.z", "", ("x.y=1",), True),
        ("x", "", ("x.y=1",), True),
        ("y", "", ("x.y=1",), False),
        ("'x.y'", "", ("x.y",), True),
        ("x" * 509 + "…", "x" * 600 + " = 1", (), True),
    ],
)
def test_a_place_is_a_whole_path_of_what_was_written(
    place: str, text: str, overrides: tuple[str, ...], *, has: bool
) -> None:
    """From the file's first keys or a word of the command line on: the end of a path, or a part of a word, is none."""
    assert has_place(Case(base="x", text=text, overrides=overrides), f"mimo: {place}: expected 1, got 0.\n") == has

"""Errors: one form of text, and the exit code of the process that each ends."""

from __future__ import annotations

import pytest

from mimo.hooks import CheckpointError, ConfigError, DataError, PlanError, PluginError, RunError, UserError


def test_hooks_errors_say_place_expectation_finding_and_next_step() -> None:
    """The text has a fixed form, and the parts stay readable as fields."""
    error = ConfigError("modules.vision.tp", expected="a divisor of heads = 6", got="4", fix="Set it to 1, 2, 3 or 6.")
    assert str(error) == "modules.vision.tp: expected a divisor of heads = 6, got 4. Set it to 1, 2, 3 or 6."
    assert (error.where, error.expected, error.got) == ("modules.vision.tp", "a divisor of heads = 6", "4")
    assert error.fix == "Set it to 1, 2, 3 or 6."


def test_hooks_errors_may_know_no_next_step() -> None:
    """Without a next step the text ends after the finding."""
    assert str(DataError("train.jsonl:12", expected="2 images", got="1")) == "train.jsonl:12: expected 2 images, got 1."


def test_hooks_errors_may_list_lines() -> None:
    """After lines the next step has one of its own, without a full stop before it."""
    error = ConfigError("a", expected="b", got="2 that differ:\n  c\n  d\n", fix="Mend both.")
    assert str(error) == "a: expected b, got 2 that differ:\n  c\n  d\nMend both."


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 2), (PluginError, 2), (PlanError, 2), (DataError, 3), (CheckpointError, 3), (RunError, 3)],
)
def test_hooks_errors_know_their_exit_code(kind: type[UserError], code: int) -> None:
    """What is refused before launch ends with 2, what fails at run time with 3; all are value errors."""
    error = kind("a", expected="b", got="c")
    assert error.exit_code == code
    assert isinstance(error, ValueError)


def test_hooks_errors_of_plugins_can_be_seen_from_a_setting() -> None:
    """The setting's path comes first, the rest stays."""
    error = PluginError("plugin 'b'", expected="a list", got="None", fix="Correct it.").seen_from(
        "modules.vision.plugin"
    )
    assert str(error) == "modules.vision.plugin: plugin 'b': expected a list, got None. Correct it."


@pytest.mark.parametrize(
    ("value", "end"),
    [("x" * 1000, "…'"), ("it's " * 100, '…"'), (list(range(1000)), "…"), ({"a": "b" * 200}, "…"), (10**200, "…")],
)
def test_hooks_errors_cut_a_wrong_value_at_80_characters(value: object, end: str) -> None:
    """What a user wrote by mistake may be a whole file; the words around it stay."""
    error = ConfigError("a", expected="b", got=repr(value))
    assert len(error.got) == 80
    assert error.got == repr(value)[: 80 - len(end)] + end
    within = ConfigError("a", expected="b", got=f"{'x' * 1000!r}, which isn't one", fix="It's not, and there's more.")
    assert within.got == f"'{'x' * 77}…', which isn't one"
    assert within.fix == "It's not, and there's more."


def test_hooks_errors_show_a_path_and_lines_of_ours_whole() -> None:
    """A path is of use only with its end; what lists many things is not a value."""
    path, lines = f"'/{'folder/' * 20}file'", "".join(f"  line {index} isn't here\n" for index in range(100))
    assert ConfigError("a", expected="b", got=f"{path}, a file").got == f"{path}, a file"
    assert ConfigError("a", expected="b", got=lines).got == lines
    assert len(ConfigError("a", expected="b", got=repr("../" * 1000)).got) == 255


@pytest.mark.parametrize(
    "got",
    [
        repr("x" * 1000),
        repr("it's " * 100),
        repr("../" * 1000),
        repr("x" * 300 + "/"),
        repr("x" * 252 + "/" + "x" * 50),
        repr("\\" * 300),
        f"{'a' * 200!r}, which reads it, beside {'b' * 200!r} and {'9' * 300}",
        f"'{chr(27) * 60}', which isn't one",
        repr(["x" * 50] * 50),
        "",
    ],
)
def test_hooks_errors_can_be_made_of_another_ones_parts(got: str) -> None:
    """A refusal with a longer path keeps its words: what was cut is not cut again, nor are its quotes."""
    error = ConfigError("a", expected=got, got=got, fix=got)
    again = ConfigError(f"b.{error.where}", expected=error.expected, got=error.got, fix=error.fix)
    assert (again.expected, again.got, again.fix) == (error.expected, error.got, error.fix)
    whole = ConfigError("a", expected="b", got=f"{'x' * 300!r}, which vision reads. It's long")
    assert whole.got.endswith("…', which vision reads. It's long")


@pytest.mark.parametrize(
    "text", ["全角\u3000空白", "1\u202f000\xa0km", "ab\u200ccd", "👩\u200d🔬", "\U0001fae9", "a\tb"]
)
def test_hooks_errors_show_other_peoples_texts_as_they_are(text: str) -> None:
    """Spaces of any width, what joins letters, and pictures that this Python doesn't know yet."""
    assert ConfigError(text, expected=text, got=text).got == text
    assert str(ConfigError(text, expected=text, got=text)).startswith(f"{text}: expected {text}, ")


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x7f", "\x9b31m", "\r", "\x00", "\u2028", "\u202e", "\u2066", "\ud800"])
def test_hooks_errors_escape_what_a_terminal_would_obey(bad: str) -> None:
    """A key, a file's name or a library's words may hold escape sequences; none reaches the terminal."""
    error = ConfigError(f"a{bad}\nb", expected=f"c{bad}", got=f"d{bad}\ne", fix=f"f{bad}")
    assert str(error).isprintable() or str(error).replace("\n", "").isprintable()
    assert bad not in str(error)
    assert str(error).encode()
    assert str(error).startswith("a\\")
    assert str(error).count("\n") == 1, "a line of ours stays, one in a key does not"

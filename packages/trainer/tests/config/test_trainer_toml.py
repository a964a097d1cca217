"""Files and ``key=value`` words as settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mimo.hooks import ConfigError
from mimo.topology import Ranks, parse_ranks, show_ranks
from mimo.trainer.config.structure import unstructure
from mimo.trainer.config.toml import make_settings, parse_value, read_settings, write_config

TABLE: dict[str, Any] = {
    "run": {"name": "r", "steps": 2, "global_batch": 4},
    "data": {"plugin": "jsonl", "path": "x.jsonl"},
    "modules": {"language": {"plugin": "decoder", "ranks": "0"}},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ('"a b"', "a b"),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("0-3", "0-3"),
        ("0,2,5-7", "0,2,5-7"),
        ("latest", "latest"),
        ("runs/a b", "runs/a b"),
        ("", ""),
        ("2026-01-02", "2026-01-02"),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_a_value_is_toml_or_else_text(text: str, value: object) -> None:
    """Bare words need no quotes; nothing slips in a second key."""
    assert parse_value(text) == value


def test_overrides_are_set_over_the_file_in_their_order() -> None:
    """Tables on the way are made, and the last one wins."""
    settings = make_settings(
        TABLE, ["run.steps=5", "run.steps=7", "modules.vision.plugin=vit", "modules.vision.ranks=0-1", "data.extra=a=b"]
    )
    assert settings.run.steps == 7
    assert settings.modules["vision"].ranks == (0, 1)
    assert settings.data.config == {"path": "x.jsonl", "extra": "a=b"}
    assert TABLE["run"]["steps"] == 2


def test_a_key_with_dots_stands_in_quotes() -> None:
    """As in TOML; whatever stands between them is one key."""
    settings = make_settings(TABLE, ['optimizer.patterns."vision.*".lr=0.5', 'optimizer.patterns."*".betas=[0, 0]'])
    assert settings.optimizer.patterns == {"vision.*": {"lr": 0.5}, "*": {"betas": [0, 0]}}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ('optimizer.patterns."a.lr=1', r"'optimizer.patterns.\"a.lr=1': expected key=value"),
        ("optimizer.patterns.x=1", r"optimizer.patterns.x: expected a table, got 1."),
        ('optimizer.patterns."a.*"=1', r'optimizer.patterns."a.\*": expected a table, got 1.'),
        ("steps", r"'steps': expected key=value, got something else. For example: run.steps=50."),
        ("steps=50", r"steps: expected a key with its section, got one without. Write run.steps=50."),
        ("interval=5", r"interval: expected .* Write checkpoint.interval=5 or logging.interval=5."),
        ("run.=3", r"'run.=3': expected key=value"),
        ("run.name.x=3", r"run.name: expected a table, got 'r'. It has no key 'x'."),
        ("run.stesp=3", r"run.stesp: expected a known key, got an unknown one. Did you mean 'steps'\?"),
        ("rnu.steps=3", r"rnu: expected a known key, got an unknown one. Did you mean 'run'\?"),
        ("run.steps=many", r"run.steps: expected a whole number, got 'many'."),
        ("run.steps=0", r"run.steps: expected 1 or more, got 0."),
        ("run.name=7", r'run.name: expected text, got 7. Write it in quotes: "7".'),
        ("run.name=a/b", r"run.name: expected a name that can be a folder's, got 'a/b'."),
        ("run.precision=fp8", r"run.precision: expected one of 'fp32', 'bf16', 'fp16', got 'fp8'."),
        ("run.loss_scale=-1", r"run.loss_scale: expected 0 or more, got -1.0."),
        ("run.device=gpu", r"run.device: expected one of 'auto', 'cpu', 'cuda', got 'gpu'."),
        ("optimizer.lr=nan", r"optimizer.lr: expected a number, got nan."),
        ("modules.language.ranks=0-x", r"modules.language.ranks: expected ranks, got '0-x'. Write \"0-3\""),
        ("modules.language.ranks=[0, a]", r"modules.language.ranks: expected ranks, got '\[0, a\]'."),
        ("modules.language.ranks=[true]", r"modules.language.ranks: expected whole numbers, got \[True\]."),
        ("modules.language.frozen=layers", r"modules.language.frozen: expected true or false or a list, got 'layers'."),
    ],
)
def test_a_wrong_override_is_refused_like_a_wrong_line(override: str, text: str) -> None:
    """By the path of the setting."""
    with pytest.raises(ConfigError, match=f"^{text}"):
        make_settings(TABLE, [override])


def test_a_table_for_a_misspelt_module_names_the_one_that_is_meant() -> None:
    """It would be a module without a plugin; a name that resembles none is refused for the missing plugin."""
    text = r"^modules\.langauge: expected a module that there is, got 'langauge', .* Did you mean 'language'\?"
    with pytest.raises(ConfigError, match=text):
        make_settings(TABLE, ["modules.langauge.tp=2"])
    with pytest.raises(ConfigError, match=r"^modules\.sonar\.plugin: expected text, got nothing"):
        make_settings(TABLE, ["modules.sonar.tp=2"])


def test_a_module_without_ranks_is_refused() -> None:
    """The key is named, and how it is written."""
    table = {**TABLE, "modules": {"language": {"plugin": "decoder"}}}
    with pytest.raises(
        ConfigError, match=r'^modules.language.ranks: expected ranks such as "0-3", got nothing. Set it.'
    ):
        make_settings(table)


def test_a_missing_section_is_refused() -> None:
    """By its name."""
    with pytest.raises(ConfigError, match=r"^data: expected a table, got nothing"):
        make_settings({key: value for key, value in TABLE.items() if key != "data"})


def test_settings_with_all_defaults_read_back_from_toml(tmp_path: Path) -> None:
    """What is saved with a run is the same run."""
    settings = make_settings(TABLE, ["modules.language.ranks=0,2,5-7", "modules.language.frozen=true"])
    plain = unstructure(settings)
    assert plain["modules"]["language"]["ranks"] == "0,2,5-7"
    loading = {"workers": 2, "ahead": 2, "ahead_bytes": 1 << 30, "hand_on": 1 << 18}
    broken = {"broken": "refuse", "max_broken": 0.0}
    order = {"order": 0, "balance": "auto", "longer": "cut"}
    assert plain["data"] == {"plugin": "jsonl", "max_tokens": 1024, "path": "x.jsonl", **order, **loading, **broken}
    write_config(plain, tmp_path / "config.toml")
    assert read_settings(tmp_path / "config.toml") == settings


def test_a_broken_or_missing_file_is_refused(tmp_path: Path) -> None:
    """With the parser's own words about the place."""
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken.toml: expected a TOML file, got one that is broken: .*line 1"):
        read_settings(tmp_path / "broken.toml")
    with pytest.raises(
        ConfigError, match=r"none.toml: expected a readable file, got nothing: there is .*mimo init FILE"
    ):
        read_settings(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r": expected a readable file, got a folder"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("written", "ranks"),
    [("0-3", (0, 1, 2, 3)), (" 0, 2 ,5 - 7", (0, 2, 5, 6, 7)), (4, (4,)), ([3, 1], (3, 1)), ("", ())],
)
def test_ranks_are_read_in_every_form(written: object, ranks: tuple[int, ...]) -> None:
    """In the order in which they stand; the grid refuses what does not ascend."""
    assert parse_ranks(written) == ranks


@pytest.mark.parametrize("text", ["0", "0-1", "0,2,5-7", ""])
def test_ranks_are_shown_as_they_are_read(text: str) -> None:
    """Shortest form."""
    assert show_ranks(parse_ranks(text)) == text
    assert show_ranks(Ranks((0, 1, 2, 4))) == "0-2,4"


def test_settings_are_on_the_disk_before_they_take_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that goes down would leave an empty file under their name."""
    seen = []
    monkeypatch.setattr(os, "fsync", lambda file: seen.append((os.fstat(file).st_size, (tmp_path / "c").exists())))
    write_config({"run": {"steps": 1}}, tmp_path / "c")
    assert seen == [((tmp_path / "c").stat().st_size, False)]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]

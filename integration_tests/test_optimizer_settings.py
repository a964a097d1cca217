"""Optimizers of modules and of patterns of parameters: what is merged over what, and what is refused before launch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import tomli_w

from mimo.hooks import ConfigError, Kind
from mimo.optimizer import OPTIMIZERS
from mimo.trainer._cli import run
from mimo.trainer._config import make_settings
from mimo.trainer._plugins import find_installed
from mimo.trainer._resolve import resolve
from mimo.trainer._resolved import Job

S = TypeVar("S")
SETTINGS = """
[run]
name = "text"
steps = 10
global_batch = 2
directory = "{directory}/run"
[data]
plugin = "jsonl"
path = "{directory}/train.jsonl"
[modules.vision]
plugin = "vit"
ranks = "0"
config = {{ width = 16, layers = 1, heads = 2, intermediate = 16 }}
[modules.language]
plugin = "decoder"
ranks = "0"
config = {{ hidden = 16, layers = 1, heads = 2, intermediate = 16 }}
"""
NORMS = '"*.norm*"'


@attrs.frozen(kw_only=True)
class StillConfig:
    """Settings of an optimizer that is no other's."""

    spread: int = 1
    slowness: float = 0.5


def find(kind: Kind[S], name: str, where: str) -> S:
    """Find ``still``, whose key ``spread`` says how parameters lie, and otherwise what is installed."""
    if kind.group == OPTIMIZERS.group and name == "still":
        adamw: Any = find_installed(OPTIMIZERS, "adamw", "")
        still: Any = attrs.evolve(adamw, name=name, config=StillConfig, lays=frozenset({"spread"}))
        return still  # type: ignore[no-any-return]
    return find_installed(kind, name, where)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file of a small model on one rank."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 4)
    path = tmp_path / "small.toml"
    path.write_text(SETTINGS.format(directory=tmp_path))
    return path


def resolved(file: Path, *overrides: str) -> Job:
    """Return the job of a file with overrides."""
    return resolve(make_settings(tomllib.loads(file.read_text()), overrides), find=find)


def test_a_pattern_is_merged_over_its_module(file: Path) -> None:
    """Key by key; a module's own patterns come first; another plugin begins with its own defaults."""
    job = resolved(
        file,
        "optimizer.clip=1",
        "optimizer.clip_by=module",
        "optimizer.weight_decay=0.25",
        "modules.vision.optimizer={lr = 0.125, eps = 1e-6}",
        f'optimizer.patterns.{NORMS}={{weight_decay = 0, clip_group = "norms"}}',
        'optimizer.patterns."language.head.*"={plugin = "still", lr = 0.5}',
        'modules.vision.optimizer.patterns."norm.b*".lr=0.25',
    )
    vision, language = (job.module(name).optimizer.rules for name in ("vision", "language"))
    names = ("vision.patch", "vision.norm.bias", "vision.norm.weight")
    found = [(rule.learning_rate.lr, rule.config.weight_decay, rule.config.eps) for rule in map(vision.of, names)]
    assert found == [(0.125, 0.25, 1e-6), (0.25, 0.25, 1e-6), (0.125, 0.0, 1e-6)]
    assert [vision.of(name).clip_group for name in names] == ["vision", "vision", "norms"]
    head = language.of("language.head.weight")
    assert (head.spec.name, head.config, head.learning_rate.lr) == ("still", StillConfig(), 0.5)
    assert (language.clip_groups, vision.clip_groups) == (("language", "norms"), ("vision", "norms"))
    wheres = [pattern.where for pattern in vision.patterns]
    assert wheres == ['modules.vision.optimizer.patterns."norm.b*"', f"optimizer.patterns.{NORMS}"]


def test_patterns_read_back_as_the_same_job(file: Path) -> None:
    """Their order counts, and stays."""
    overrides = [f'optimizer.patterns."{glob}".lr=0.5' for glob in ("vision.p*", "*.bias", "language.hea?.*")]
    job = resolved(file, *overrides, 'modules.language.optimizer.patterns."embedding*".lr=0.1')
    again = resolve(make_settings(tomllib.loads(tomli_w.dumps(job.plain))), find=find)
    assert [module.optimizer.rules for module in again.modules] == [module.optimizer.rules for module in job.modules]
    assert again.plain == job.plain


@pytest.mark.parametrize(
    ("overrides", "where", "text"),
    [
        (
            ["modules.vision.optimizer.clip_by=module"],
            "modules.vision.optimizer.clip_by",
            "a key that a module can have",
        ),
        (["optimizer.clip_by=modul"], "optimizer.clip_by", "one of 'global', 'module', got 'modul'. Did you mean"),
        (["optimizer.clip_by=module"], "optimizer.clip_by", "global, as nothing is clipped: optimizer.clip is 0, got"),
        (
            ["optimizer.clip=1", "optimizer.clip_group=x"],
            "optimizer.clip_group",
            "nothing, as the parameters of a clip group are chosen by modules and patterns, got 'x'. Set ",
        ),
        (
            ["modules.vision.optimizer.clip_group=x"],
            "modules.vision.optimizer.clip_group",
            "nothing, as nothing is clipped: optimizer.clip is 0, got 'x'. Set optimizer.clip, or leave it out.",
        ),
        (
            [f"optimizer.patterns.{NORMS}.clip_group=x"],
            f"optimizer.patterns.{NORMS}.clip_group",
            "nothing, as nothing is clipped: optimizer.clip is 0, got 'x'.",
        ),
        (
            ["optimizer.clip=1", f"optimizer.patterns.{NORMS}.clip_group=vision"],
            f"optimizer.patterns.{NORMS}.clip_group",
            "a name that no module has, got 'vision'. Call the group otherwise; optimizer.clip_by = 'module' makes one",
        ),
        (["optimizer.weight_decay=inf"], "optimizer.weight_decay", "a finite number of 0 or more, got inf."),
        (
            ['optimizer.patterns."visoin.*".lr=1'],
            'optimizer.patterns."visoin.*"',
            "a pattern of full names, which begin with vision or language, got one that matches none. Did you mean '",
        ),
        (["optimizer.patterns=3"], "optimizer.patterns", "a table, got 3."),
        ([f"optimizer.patterns.{NORMS}=3"], f"optimizer.patterns.{NORMS}", "a table, got 3."),
        (
            [f"optimizer.patterns.{NORMS}={{}}"],
            f"optimizer.patterns.{NORMS}",
            "keys that differ for what it matches, got none. Set one: lr = 1e-4.",
        ),
        ([f"optimizer.patterns.{NORMS}.lr=x"], f"optimizer.patterns.{NORMS}.lr", "a number, got 'x'."),
        (
            ['modules.vision.optimizer.patterns."norm*".weight_decai=0'],
            'modules.vision.optimizer.patterns."norm*".weight_decai',
            "a known key, got an unknown one. Did you mean 'weight_decay'?",
        ),
        (
            [f"optimizer.patterns.{NORMS}.betas=[1, 2]"],
            f"optimizer.patterns.{NORMS}.betas",
            "two numbers from 0 to below 1, got (1.0, 2.0).",
        ),
        (
            [f"optimizer.patterns.{NORMS}.lr_min=1"],
            f"optimizer.patterns.{NORMS}.lr_min",
            "at most lr = 0.001, got 1.0.",
        ),
        (
            [f"optimizer.patterns.{NORMS}.clip=1"],
            f"optimizer.patterns.{NORMS}.clip",
            "a key that a pattern can have, got clip, which is one for the whole model. Set optimizer.clip.",
        ),
        (
            [f"optimizer.patterns.{NORMS}.patterns={{}}"],
            f"optimizer.patterns.{NORMS}.patterns",
            "a key that a pattern can have, got patterns inside a pattern. Write them in optimizer.patterns or ",
        ),
        (
            [f"optimizer.patterns.{NORMS}.plugin=adam"],
            f"optimizer.patterns.{NORMS}.plugin",
            "an installed optimizer (adamw",
        ),
        (
            [f'optimizer.patterns.{NORMS}={{plugin = "still", betas = [0.5, 0.5]}}'],
            f"optimizer.patterns.{NORMS}.betas",
            "a key of optimizer 'still', got one of 'adamw'",
        ),
        (
            ["modules.vision.optimizer.plugin=still", "modules.vision.optimizer.weight_decay=0.5"],
            "modules.vision.optimizer.weight_decay",
            "a key of optimizer 'still', got one of 'adamw'",
        ),
        (
            ["modules.vision.optimizer.plugin=still", 'modules.vision.optimizer.patterns."norm*".spread=2'],
            'modules.vision.optimizer.patterns."norm*".spread',
            "a key that a pattern can have, got spread, by which all parameters of a module lie. Set modules.vision.o",
        ),
    ],
)
def test_wrong_optimizer_settings_are_refused_by_path(file: Path, overrides: list[str], where: str, text: str) -> None:
    """A key of another plugin by that plugin's name, a pattern that can match nothing with the modules there are."""
    with pytest.raises(ConfigError) as caught:
        resolved(file, *overrides)
    assert str(caught.value).startswith(f"{where}: expected {text}")


@pytest.mark.parametrize("command", ["train", "check"])
def test_patterns_that_match_no_parameter_are_refused_before_launch(
    file: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names are known without building anything for real, those of stages on other ranks too."""
    assert run([command, str(file), 'modules.vision.optimizer.patterns."*.atention.*".lr=1']) == 2
    told = capsys.readouterr()
    assert told.err == (
        'mimo: modules.vision.optimizer.patterns."*.atention.*": expected a pattern that matches trained parameters of '
        "vision, by their path inside it, got one that matches none. The closest are layers.0.attention.query.weight, "
        "layers.0.attention.query.bias, layers.0.attention.key.weight.\n"
    )
    assert run([command, str(file), "modules.vision.frozen=true", 'optimizer.patterns."vision.*".lr=1']) == 2
    assert "got one that matches frozen parameters alone." in capsys.readouterr().err
    assert not (file.parent / "run").exists()


def test_check_shows_what_follows_which_pattern(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With how many parameters and numbers; without patterns there is no such table."""
    overrides = (
        "optimizer.clip=1",
        f'optimizer.patterns.{NORMS}={{lr = 0.5, clip_group = "norms"}}',
        'modules.language.optimizer.patterns."[!l]*".lr=0.25',
    )
    assert run(["check", str(file), *overrides]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = next(index for index, line in enumerate(lines) if "numbers" in line)
    assert lines[start + 1 : start + 6] == [
        ["vision", 'optimizer.patterns."*.norm*"', "adamw", "0.5", "norms", "2", "32"],
        ["vision", "no", "pattern", "adamw", "0.001", "-", "21", "14,528"],
        ["language", 'modules.language.optimizer.patterns."[!l]*"', "adamw", "0.25", "-", "3", "8,272"],
        ["language", "no", "pattern", "adamw", "0.001", "-", "9", "1,824"],
        [],
    ]
    assert run(["check", str(file)]) == 0
    assert "no pattern" not in capsys.readouterr().out

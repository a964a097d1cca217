"""Upper bounds: of each setting in the table of docs/limits.md, of every whole number of every plugin, of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from house import ROOT
from tables import Table

from mimo.data import DATASETS, TOKENIZERS
from mimo.hooks import ConfigError, Kind, PluginEntry, survey
from mimo.model import ENCODERS, LANGUAGE_MODELS
from mimo.optimizer import OPTIMIZERS
from mimo.schedule import SCHEDULES
from mimo.topology import parse_ranks
from mimo.trainer import read_settings, resolve
from mimo.trainer.runtime import count_actions, find_installed, read_table, structure

ENDLESS = {"budget", "shard_lanes"}
"""Fields that any number may be: bytes of memory that nothing is made of, and a divisor of the lanes that there are."""


def documented() -> Iterator[tuple[str, int]]:
    """Yield each setting of the table, and its bound."""
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    table = text.partition("## Settings")[2].partition("## Together")[0]
    for paths, most in re.findall(r"^\| (`.*?`) \| (\d+) \|", table, re.MULTILINE):
        for path in re.findall(r"`([\w.]+)`", paths):
            yield path, int(most)


def vlm() -> Table:
    """Return settings of a vision encoder with a learned table, and a decoder."""
    return {
        "run": {"name": "large", "steps": 2, "global_batch": 8},
        "data": {"plugin": "mock", "max_tokens": 64},
        "modules": {
            "vision": {"plugin": "siglip", "ranks": "0"},
            "language": {"plugin": "decoder", "ranks": "0"},
        },
    }


@pytest.mark.parametrize(("path", "most"), list(documented()), ids=str)
def test_what_is_above_a_documented_bound_is_refused_by_its_path(path: str, most: int) -> None:
    """The number that the table says is allowed by that setting, the next one is not."""
    with pytest.raises(ConfigError, match=re.escape(str(most + 1))) as refused:
        resolve(read_settings(vlm(), [f"{path}={most + 1}"]))
    assert refused.value.where == path
    assert str(most) in refused.value.expected
    with pytest.raises(ConfigError) as other:  # for another reason, if only that no schedule is called so
        resolve(read_settings({**vlm(), "schedule": {"plugin": "none"}}, [f"{path}={most}"]))
    assert other.value.where != path or str(most) not in other.value.expected


def plugin_numbers() -> Iterator[tuple[Kind[Any], str, tuple[str, ...]]]:
    """Yield every number among the settings of every plugin of ours."""
    kinds: tuple[Kind[Any], ...] = (ENCODERS, LANGUAGE_MODELS, OPTIMIZERS, SCHEDULES, DATASETS, TOKENIZERS)
    for kind in kinds:
        for name in config_names(kind):
            for path in _numbers(find_installed(kind, name, "plugin").config):
                yield kind, name, path


def config_names(kind: Kind[Any]) -> list[str]:
    """Return the names of the plugins of a kind that are ours."""
    return [name for entry in survey([kind]) if isinstance(entry, PluginEntry) for name in entry.specs]


def _numbers(config: type) -> Iterator[tuple[str, ...]]:
    for field in attrs.fields(config):
        if isinstance(field.default, attrs.Factory) and attrs.has(field.default.factory):  # type: ignore[arg-type]
            yield from ((field.name, *path) for path in _numbers(field.default.factory))
        elif field.type in ("int", int) and field.name not in ENDLESS:
            yield (field.name,)


@pytest.mark.parametrize(
    ("kind", "name", "path"), list(plugin_numbers()), ids=lambda value: getattr(value, "noun", str(value))
)
def test_every_whole_number_of_a_plugin_has_an_upper_bound(kind: Kind[Any], name: str, path: tuple[str, ...]) -> None:
    """2^62 of anything is refused by its own path, before anything is made of it."""
    config = find_installed(kind, name, "plugin").config
    required = {field.name: "x" for field in attrs.fields(config) if field.default is attrs.NOTHING}
    table: Any = 2**62
    for key in reversed(path):
        table = {key: table}
    with pytest.raises(ConfigError) as refused:
        structure({**required, **table}, config, "here")
    assert refused.value.where == ".".join(("here", *path))


@pytest.mark.parametrize("text", ["0-99999999999", "0-65536", "70000", "0-65535,0-65535", "9" * 100, "1-" + "9" * 5000])
def test_ranks_are_bounded_before_they_are_expanded(text: str) -> None:
    """A range that is too long takes no memory, however it is written."""
    with pytest.raises(ConfigError, match="expected at most 65536 ranks, from 0 to 65535"):
        parse_ranks(text)
    assert len(parse_ranks("0-65535")) == 65536


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("a = " + "9" * 5000, "expected whole numbers below 2^63, got one of thousands of digits"),
        ("a = " + "[" * 3000 + "]" * 3000, "expected tables and lists at most 32 deep, got more"),
        ("a = " + "[" * 33 + "]" * 33, r"a\[0\].*: expected tables and lists at most 32 deep"),
        ("[a]\nb = 18446744073709551616", "a.b: expected whole numbers below 2.63, got one of 65 bits"),
        ("[a]\nb = nan", "a.b: expected a number, got nan"),
        ("[a]\nb = -1e308", "a.b: expected a number of at most 1e.30, got -1e.308"),
        ('[a]\nb = "\\u001b[31m"', "a.b: expected text without control characters.*got '.x1b' at character 1"),
        ('[a]\n"\\u0007" = 1', "expected text without control characters"),
        ("[a]\n" + "".join(f"k{n} = 1\n" for n in range(1025)), "a: expected at most 1024 keys, got 1025"),
        ('a = "' + "x" * 70_000 + '"', "a: expected at most 65536 characters, got 70000"),
        ("#" * (1 << 22) + "\n", "expected a file of at most 4194304 bytes, got a larger one"),
    ],
)
def test_no_file_holds_values_that_no_setting_could_be(tmp_path: Path, written: str, message: str) -> None:
    """What no setting could be is refused by its path whoever would read it, or by the file where it can't be read."""
    (tmp_path / "run.toml").write_text(written)
    with pytest.raises(ConfigError, match=message.replace("2^63", "2.63")):
        read_settings(tmp_path / "run.toml")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000 + "]" * 3000, "1" + "0" * 30, '"\\u009b31m"'])
def test_an_override_is_bounded_like_a_line_of_the_file(value: str) -> None:
    """By the path that was written."""
    with pytest.raises(ConfigError) as refused:
        read_settings(vlm(), [f"run.steps={value}"])
    assert refused.value.where == "run.steps"


@pytest.mark.parametrize(
    ("overrides", "where", "message"),
    [
        (["run.global_batch=262144"], "run.global_batch", "at most 16384 microbatches"),
        (["run.evaluation_batch=262144"], "run.evaluation_batch", "at most 16384 microbatches"),
        (
            ["run.micro_batch=8", "run.global_batch=65536", "data.max_tokens=1000000"],
            "run.global_batch",
            "at most 4294967296 tokens, 4294 samples of data.max_tokens = 1000000",
        ),
        (
            [
                *("run.global_batch=16384", "modules.language.ranks=0-15", "modules.language.pp=16"),
                "modules.language.config.layers=16",
            ],
            "run.global_batch",
            "a plan of at most 524288 actions",
        ),
    ],
)
def test_what_several_settings_make_is_bounded_before_a_plan_is_made(
    overrides: list[str], where: str, message: str
) -> None:
    """Microbatches, actions and tokens of a step."""
    with pytest.raises(ConfigError, match=message) as refused:
        resolve(read_settings(vlm(), overrides))
    assert refused.value.where == where


def test_there_may_be_64_modules() -> None:
    """Each is a table of its own."""
    table = vlm()
    table["modules"] |= {f"m{index}": table["modules"]["vision"] for index in range(63)}
    with pytest.raises(ConfigError, match="modules: expected at most 64 modules, got 65"):
        resolve(read_settings(table))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_actions_are_counted_as_a_plan_has_them(schedule: str) -> None:
    """The estimate is within a factor of two of the plan that is made."""
    overrides = ["modules.language.ranks=1-2", "modules.language.pp=2", f"schedule.plugin={schedule}"]
    job = resolve(read_settings(vlm(), overrides))
    planned = sum(len(actor.actions) for actor in job.plan.actors)
    assert planned / 2 <= count_actions(job.graph, job.microbatches) <= 2 * planned


def test_ten_thousand_ranks_are_planned() -> None:
    """Ten thousand GPUs, a vocabulary of 300,000 and hundreds of layers are an ordinary job."""
    overrides = [
        *("modules.vision.ranks=0-9999", "modules.language.ranks=0-9999", "modules.language.pp=10"),
        *("modules.language.tp=8", "modules.language.config.layers=400", "modules.language.config.vocabulary=300000"),
        "run.global_batch=2000",
    ]
    job = resolve(read_settings(vlm(), overrides))
    assert (job.world, job.microbatches, len(job.plan.actors)) == (10_000, 16, 10)


def test_the_recipe_of_an_example_is_legal() -> None:
    """The largest of the examples."""
    table = read_table(ROOT / "examples" / "nemotron-moe-vlm-20l.toml")
    assert resolve(read_settings(table)).world == 8

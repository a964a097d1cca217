"""The commented file: every key there is, and it works."""

from __future__ import annotations

import tomllib
from importlib import util
from typing import Any, TypeVar

import attrs
import pytest

from mimo.hooks import ConfigError, Kind
from mimo.model import Lora
from mimo.trainer.config.fields import own_keys
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.settings import Distil, ModuleSettings, Settings
from mimo.trainer.config.template import example_text, one_line
from mimo.trainer.config.toml import make_settings

S = TypeVar("S")
DISTRIBUTED = util.find_spec("mimo_optimizer_distributed") is not None


def find_nothing(kind: Kind[S], name: str, where: str) -> S:
    """Refuse every plugin."""
    raise ConfigError(where, expected="an installed plugin", got=repr(name))


@pytest.mark.parametrize("find", [find_installed, find_nothing])
def test_the_file_holds_every_key_and_reads_as_settings(find: Any) -> None:
    """Also where the plugins of the example are not installed."""
    table = tomllib.loads(example_text(find))
    settings = make_settings(table)
    for section in attrs.fields(Settings):
        if section.name != "modules":
            missing = set(own_keys(type(getattr(settings, section.name)))) - set(table[section.name])
            assert not missing, section.name
    for name, module in table["modules"].items():
        assert set(own_keys(ModuleSettings)) - {"lora", "distil"} <= set(module), name


def test_a_table_that_a_module_may_have_is_a_comment() -> None:
    """Without its marks it reads as settings, with every key."""
    text = example_text()
    for name in tomllib.loads(text)["modules"]:
        _, _, after = text.partition(f"# [modules.{name}.lora]\n")
        lines = after.splitlines()[: len(attrs.fields(Lora))]
        table = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines))
        assert list(table) == [field.name for field in attrs.fields(Lora)]
        assert Lora(**table).scale == 2.0


def with_module(name: str) -> ModuleSettings:
    """Return the settings of a module that is a comment, read with the rest of the file, without its marks."""
    head, _, after = example_text().partition(f"# [modules.{name}]\n")
    lines = [line.removeprefix("# ") for line in after.splitlines()]
    whole = "\n".join([head, f"[modules.{name}]", *lines[: lines.index("")], *after.splitlines()[lines.index("") :]])
    return make_settings(tomllib.loads(whole)).modules[name]


def test_a_module_that_a_run_may_have_is_a_comment() -> None:
    """A teacher, and a generator."""
    assert with_module("teacher").distil == Distil(top_k=8, temperature=1.0)
    drawer = with_module("drawer")
    assert (drawer.plugin, drawer.fed_by, drawer.loss_weight) == ("flow", "language", 1.0)


def test_axes_that_are_left_at_one_are_written_too() -> None:
    """Whoever looks for a way to split a module finds it there, in encoders as in the language model."""
    for name, module in tomllib.loads(example_text())["modules"].items():
        assert [module[axis] for axis in ("cp", "ep", "etp")] == [1, 1, 1], name
    assert tomllib.loads(example_text())["logging"]["edges"] is False


@pytest.mark.parametrize("find", [find_installed, find_nothing])
def test_on_gpus_layers_compute_in_bf16_where_a_plugin_can(find: Any) -> None:
    """One that keeps fp32 weights beside what they compute with; without it the file is as elsewhere."""
    can = find is find_installed and DISTRIBUTED
    table = tomllib.loads(example_text(find, on_gpus=True))
    assert table["run"]["precision"] == ("bf16" if can else "fp32")
    assert table["optimizer"]["plugin"] == ("distributed" if can else "adamw")
    make_settings(table)


def test_every_key_has_a_comment() -> None:
    """The comment is the setting's own, in its class."""
    for line in example_text(find_nothing).splitlines():
        key = line.partition(" = ")[0]
        if key in own_keys(ModuleSettings) and not line.startswith("#"):
            assert "# " in line, line


def test_keys_of_installed_plugins_are_there_with_their_defaults() -> None:
    """The optimizer and the language model are built in; a key without a value is shown as a comment."""
    text = example_text()
    table = tomllib.loads(text)
    assert table["optimizer"]["betas"] == [0.9, 0.95]
    assert table["modules"]["language"]["config"]["vocabulary"] == 0
    assert "\n# file =\n" in text


def test_a_table_among_a_plugins_keys_stands_on_one_line() -> None:
    """Written as a table of its own it would take the keys that follow."""
    table = {"kind": "mlp", "bias": True, "shares": [0.5, 1.0], "inner": {"width": 3}}
    line = one_line("projector", table)
    assert "\n" not in line
    assert tomllib.loads(line) == {"projector": table}

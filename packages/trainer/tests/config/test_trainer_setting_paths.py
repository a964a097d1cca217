"""Errors of plugins by the path of the settings in the table of the module that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import attrs
import pytest

from mimo.hooks import ConfigError, DataError, PluginError, UserError
from mimo.model import EncoderSpec, TensorSupport
from mimo.trainer.config.setting_paths import naming_settings


@attrs.frozen(kw_only=True)
class NoConfig:
    pass


def refusing(error: type[UserError], where: str) -> Callable[..., NoReturn]:
    """Return a function that refuses a setting."""

    def refuse(*_arguments: Any) -> NoReturn:
        raise error(where, expected="2", got="3", fix="Set it.")

    return refuse


def unused(*_arguments: Any) -> Any:
    """Fail, as nobody calls it."""
    raise AssertionError(_arguments)


def eye(**functions: Callable[..., Any]) -> EncoderSpec:
    """Return an encoder with some functions of its own."""
    given: Mapping[str, Any] = {
        **dict.fromkeys(("measure", "rows", "prepare", "build"), unused),
        "tensor": TensorSupport(divisible=refusing(ConfigError, "config.heads"), plan=unused),
        **functions,
    }
    return EncoderSpec(name="eye", config=NoConfig, **given)


@pytest.mark.parametrize("error", [ConfigError, PluginError])
@pytest.mark.parametrize(
    ("named", "full"),
    [
        ("config", "modules.left.config"),
        ("config.values.size", "modules.left.config.values.size"),
        ("modules.language.config.values.size", "modules.left.config.values.size"),
        ("modules.right.config.size", "modules.right.config.size"),
        ("configured.size", "configured.size"),
        ("tp", "tp"),
    ],
)
def test_a_setting_is_named_in_the_table_of_its_module(error: type[UserError], named: str, full: str) -> None:
    """As the plugin usually has it or relative to it; what has another path keeps it."""
    spec = naming_settings(eye(rows=refusing(error, named)), "modules.left")
    with pytest.raises(error) as caught:
        spec.rows(NoConfig(), (1,))
    assert str(caught.value) == f"{full}: expected 2, got 3. Set it."
    assert spec.config is NoConfig


def test_plugins_of_the_same_functions_are_equal() -> None:
    """So are jobs that are made of the same settings twice."""
    spec = eye()
    assert naming_settings(spec, "modules.left") == naming_settings(spec, "modules.left") != spec
    assert naming_settings(spec, "modules.left") != naming_settings(spec, "modules.right")


def test_functions_of_what_a_plugin_supports_name_settings_too() -> None:
    """Errors of data, and what is no setting's, stay as they are."""
    spec = naming_settings(eye(prepare=refusing(DataError, "config.jsonl:3")), "modules.left")
    assert spec.tensor is not None
    with pytest.raises(ConfigError, match=r"^modules\.left\.config\.heads: expected 2"):
        spec.tensor.divisible(NoConfig())
    with pytest.raises(DataError, match=r"^config\.jsonl:3: "):
        spec.prepare(NoConfig(), None)

"""Along which axes a plugin's modules can be split: by its spec, and tried on one config."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from torch import nn

from mimo.hooks import ConfigError
from mimo.model import DECODER, PARALLEL_AXES, DecoderConfig, EncoderSpec, ExpertSupport, supported_axes
from mimo.model.testing import try_axes

DENSE = DecoderConfig(vocabulary=13, hidden=8, layers=2, heads=2, intermediate=12)
SIMPLE = EncoderSpec(
    name="simple",
    config=dict,
    measure=lambda _raw: (1,),
    rows=lambda _config, _size: 1,
    prepare=lambda _config, _raw: {},
    build=lambda _config, hidden: nn.Linear(1, hidden),
)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [({"tensor": None}, {"tp", "sequence_parallel"}), ({"context": None}, {"cp"}), ({"experts": None}, {"ep", "etp"})],
)
def test_a_plugin_has_the_axes_that_its_spec_supports(changes: dict[str, Any], lost: set[str]) -> None:
    """A language model always has stages; an encoder may have no axis at all."""
    assert supported_axes(DECODER) == PARALLEL_AXES
    assert set(PARALLEL_AXES) - set(supported_axes(attrs.evolve(DECODER, **changes))) == lost
    assert supported_axes(SIMPLE) == ()


def test_each_axis_is_tried_with_two() -> None:
    """What a config can't be cut into is refused with the reason; lanes alone are left of an encoder without more."""
    mixed = DecoderConfig(vocabulary=13, hidden=8, layers=2, heads=2, experts=4, expert_intermediate=4)
    assert not any(try_axes(DECODER, mixed).values())
    found = try_axes(DECODER, attrs.evolve(DENSE, layers=1, heads=1, kv_heads=1, hidden=8))
    assert {axis for axis, reason in found.items() if not reason} == {"cp"}
    assert found["pp"] == "expected at most its layers = 1, got 2"
    assert found["tp"].startswith("expected a divisor of heads = 1, got 2")
    assert found["ep"] == "expected 1, since language model 'decoder' has no experts, got 2"
    assert all(try_axes(SIMPLE, {}).values())
    widths: list[int] = []

    def build(_config: Any, hidden: int) -> nn.Module:
        widths.append(hidden)
        return nn.Identity()

    try_axes(attrs.evolve(SIMPLE, build=build), {}, hidden=5)
    assert widths == [5]


def test_a_plan_of_experts_may_refuse_too() -> None:
    """As the one of `hf-decoder` does where it doesn't know their form."""

    def plan(_module: nn.Module, _axis: object) -> dict[str, Any]:
        raise ConfigError("modules.language.ep", expected="1, as these hang together", got="2")

    spec = attrs.evolve(DECODER, experts=ExpertSupport(count=lambda _config: 4, plan=plan))
    found = try_axes(spec, DENSE)
    assert found["ep"] == found["etp"] == "expected 1, as these hang together, got 2"


def test_what_cannot_be_built_is_said() -> None:
    """By the plugin's own error."""

    def build(_config: object, _stage: object) -> nn.Module:
        raise ConfigError("config", expected="another", got="this one")

    with pytest.raises(ConfigError, match="config: expected another, got this one"):
        try_axes(attrs.evolve(DECODER, build=build), DENSE)

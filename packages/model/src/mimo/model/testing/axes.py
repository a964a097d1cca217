"""Along which parallel axes a module can be split, tried on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimo.hooks import ConfigError
from mimo.model.build import check_module
from mimo.model.build.create_on import create_on
from mimo.model.parallel import ExpertAxis
from mimo.model.spec import PARALLEL_AXES, LanguageModelSpec, ModuleSpec, Stage
from mimo.topology import Grid

_SIZES: Mapping[str, Mapping[str, int]] = {
    "tp": {"tp": 2},
    "sequence_parallel": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "ep": {"dp": 2, "ep": 2},
    "etp": {"dp": 2, "etp": 2},
}
_HIDDEN = 8


def try_axes(spec: ModuleSpec, config: Any, *, hidden: int = _HIDDEN) -> dict[str, str]:
    """Return why a module can't be split in two along each of the `PARALLEL_AXES`, nothing where it can.

    It is built without storage. What a plugin finds out on a small model of it is found out.

    Args:
        spec: the plugin.
        config: an instance of ``spec.config``; a vocabulary of 0 is none.
        hidden: width of the rows that an encoder is to deliver, or a generator to read, where not any will do.

    Raises:
        ConfigError: it can't be built at all.
    """
    with create_on("meta"):
        if not isinstance(spec, LanguageModelSpec):
            spec.build(config, hidden)
            return {axis: _refusal(spec, config, axis) for axis in PARALLEL_AXES}
        module = spec.build(config, Stage())
    found = {axis: _refusal(spec, config, axis) for axis in PARALLEL_AXES}
    for axis, spread in (("ep", ExpertAxis(ep=2)), ("etp", ExpertAxis(etp=2))):
        if spec.experts is not None and not found[axis]:
            try:
                spec.experts.plan(module, spread)
            except ConfigError as error:
                found[axis] = _reason(error)
    return found


def _refusal(spec: ModuleSpec, config: Any, axis: str) -> str:
    grid = Grid(name=spec.name, ranks=range(2), **_SIZES[axis])
    try:
        check_module(spec, config, grid=grid, sequence_parallel=axis == "sequence_parallel")
    except ConfigError as error:
        return _reason(error)
    return ""


def _reason(error: ConfigError) -> str:
    return f"expected {error.expected}, got {error.got}"

"""What `HybridDeviceOptimizer` may be made of: all that an optimizer of torch may, as groups of named parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import attrs
from torch import Tensor

Group: TypeAlias = dict[str, Any]
Parameters: TypeAlias = Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]
"""Tensors, with names or without, or groups of them: dicts with ``params`` and settings of their own."""


@attrs.frozen(kw_only=True)
class Grouped:
    """Parameters by name, in groups as torch takes them.

    Args:
        named: all of them, in the order given.
        groups: each with a list of its own as ``params``.
    """

    named: dict[str, Tensor]
    groups: list[Group]


def group_parameters(parameters: Parameters) -> Grouped:
    """Return the parameters; one without a name is called by its number among all of them.

    Raises:
        TypeError: something other than a tensor is among them.
        ValueError: one is there twice, or two have one name.
    """
    named: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    groups = []
    for group in _as_groups(parameters):
        own = []
        for entry in _as_list(group["params"]):
            name, parameter = entry if isinstance(entry, tuple) else (str(len(named)), entry)
            if not isinstance(parameter, Tensor):
                msg = f"HybridDeviceOptimizer: expected tensors as parameters, got a {type(parameter).__name__}: {name}"
                raise TypeError(msg)
            if name in named or parameter in names:
                twice = f"the name {name!r}" if name in named else f"{names[parameter]!r}"
                msg = f"HybridDeviceOptimizer: expected each parameter once, with a name of its own, got {twice} twice"
                raise ValueError(msg)
            named[name], names[parameter] = parameter, name
            own.append(parameter)
        groups.append({**group, "params": own})
    return Grouped(named=named, groups=groups)


def _as_groups(parameters: Parameters) -> list[Group]:
    entries = _as_list(parameters)
    return entries if not entries or isinstance(entries[0], dict) else [{"params": entries}]


def _as_list(parameters: Any) -> list[Any]:
    if isinstance(parameters, Mapping):
        return list(parameters.items())
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)

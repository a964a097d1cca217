"""A state tree as flat names, and back: nested keys are joined with dots, leaves are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from mimo.hooks import CheckpointError, Common, Owned, StateTree

_RESERVED = "__metadata__"  # a key of the safetensors header


@attrs.frozen(kw_only=True)
class Flat:
    """The leaves of a state tree by flat name."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Common | Owned]


def collect(tree: StateTree) -> Flat:
    """Return the leaves of ``tree`` by flat name; no tensor is read.

    Raises:
        CheckpointError: a key is not text, two paths have one flat name, or a leaf has an unknown type; the message
            names the path.
    """
    found: dict[str, tuple[tuple[str, ...], Any]] = {}
    _collect(tree, (), found)
    leaves = {name: leaf for name, (_, leaf) in found.items()}
    return Flat(
        tensors={name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)},
        values={name: leaf for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)},
    )


def fill(tree: StateTree, values: Mapping[str, Any]) -> StateTree:
    """Return ``tree`` as nested dicts with the same tensors; other leaves get the ``values`` of their flat names."""
    return {key: _fill(branch, key, values) for key, branch in tree.items()}


def _fill(branch: Any, name: str, values: Mapping[str, Any]) -> Any:
    if isinstance(branch, Mapping):
        return {key: _fill(below, f"{name}.{key}", values) for key, below in branch.items()}
    return (
        branch if isinstance(branch, torch.Tensor) or name not in values else attrs.evolve(branch, value=values[name])
    )


def _collect(branch: Any, path: tuple[str, ...], found: dict[str, tuple[tuple[str, ...], Any]]) -> None:
    name = ".".join(path)
    if isinstance(branch, Mapping):
        for key, below in branch.items():
            if type(key) is not str or not key or "/" in key or (not path and key == _RESERVED):
                raise CheckpointError(
                    name or "state tree", expected="keys of text without a slash", got=f"the key {key!r}"
                )
            _collect(below, (*path, key), found)
        return
    if not path or not isinstance(branch, torch.Tensor | Common | Owned):
        raise CheckpointError(
            name or "state tree",
            expected="a mapping" if not path else "a tensor, a DTensor, Common(value) or Owned(value, module)",
            got=f"a {type(branch).__module__}.{type(branch).__qualname__}",
            fix="Declare a value that all ranks share Common, one that a module's ranks know Owned.",
        )
    if name in found:
        raise CheckpointError(
            name, expected="one entry with this flat name", got=f"two, at {list(found[name][0])} and {list(path)}"
        )
    if isinstance(branch, Owned) and (type(branch.module) is not str or not branch.module):
        raise CheckpointError(name, expected="Owned with the name of a module", got=repr(branch.module))
    found[name] = (path, branch)

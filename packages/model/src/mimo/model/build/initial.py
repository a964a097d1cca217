"""Initial values that depend on seed and name alone: each submodule's are drawn at full shape, in fp32, on the CPU.

One submodule is whole at a time, so a rank never holds more than its pieces and one full layer's parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which PyTorch keeps what a module has registered."""


@runtime_checkable
class Resettable(Protocol):
    """A module that can draw the initial values of its own parameters, as PyTorch's layers can."""

    def reset_parameters(self) -> None:
        """Draw them."""


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Draw the CPU's random numbers inside from ``seed`` and ``name`` alone, and leave those outside as they were."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
        yield


def draws_itself(module: nn.Module) -> bool:
    """Tell whether every initial value of ``module``, built on the meta device, can be drawn from its shapes alone.

    Buffers that have values all the same are as the plugin made them.
    """
    if any(buffer.is_meta for buffer in module.buffers()) or any(_keeps_tensors(part) for part in module.modules()):
        return False
    return all(
        isinstance(part, Resettable)
        for part in module.modules()
        if next(part.parameters(recurse=False), None) is not None
    )


def _keeps_tensors(part: nn.Module) -> bool:
    """Tell whether a module lost a tensor that is neither parameter nor buffer: a plain attribute, or in one."""
    return any(
        isinstance(one, Tensor) and one.is_meta
        for name, value in vars(part).items()
        if name not in _REGISTERED
        for one in _within(value)
    )


def _within(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def initialise(
    module: nn.Module,
    *,
    name: str,
    seed: int,
    given: Mapping[str, Tensor],
    finish: Callable[[str, Tensor], nn.Parameter],
) -> None:
    """Replace every parameter of ``module`` by what ``finish`` makes of its name and its full initial value.

    Args:
        module: with full shapes, on any device, the meta device too.
        name: of the module in the model.
        seed: of the run.
        given: full values by parameter name, for submodules that cannot draw their own.
        finish: returns the parameter to keep; called once for a parameter that several submodules share.
    """
    finished: dict[int, nn.Parameter] = {}
    # Parents come before children: one that resets its children too meets them before they are drawn, never after.
    for path, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False, remove_duplicate=False))
        if not own:
            continue
        prefix = f"{path}." if path else ""
        if isinstance(part, Resettable):
            for leaf, old in own.items():
                setattr(part, leaf, nn.Parameter(torch.empty(old.shape, dtype=torch.float32, device="cpu")))
            with seeded(seed, f"{name}.{path}" if path else name):
                part.reset_parameters()
        full = {
            leaf: parameter.detach() if isinstance(part, Resettable) else given[prefix + leaf]
            for leaf, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        }
        for leaf, old in own.items():
            if id(old) not in finished:
                finished[id(old)] = finish(prefix + leaf, full[leaf])
            setattr(part, leaf, finished[id(old)])

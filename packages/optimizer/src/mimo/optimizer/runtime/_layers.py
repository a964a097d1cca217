"""What the layers of a stage are, for whoever treats their parameters one layer after the other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost members of lists and dicts of modules that can be called, in order, each once."""
    seen: set[nn.Module] = set()
    for child in module.children():
        for layer in _members(child) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else layers(child):
            if layer not in seen:
                seen.add(layer)
                yield layer


def _members(container: nn.Module) -> Iterator[nn.Module]:
    for member in container.children():
        if type(member).forward is not nn.Module.forward:
            yield member
        elif isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            yield from _members(member)

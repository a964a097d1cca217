"""What both encoders register. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

PARTS: Mapping[str, tuple[str, ...]] = {"encoder": ("encoder",), "projector": ("projector",)}
"""For freezing."""


@runtime_checkable
class Layered(Protocol):
    """An encoder whose tower has layers."""

    def layer_forwards(self) -> list[Callable[..., Any]]:
        """Return their forwards."""


def measure(raw: Any) -> tuple[int, int]:
    """Return the height and width of an image."""
    return raw.height, raw.width


def layers(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the forwards of the layers of an encoder's tower."""
    assert isinstance(module, Layered)
    return module.layer_forwards()

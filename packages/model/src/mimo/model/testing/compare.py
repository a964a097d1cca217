"""When rows and gradients count as the same: rounding apart, in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from mimo.model.testing.checks import BrokenError

_ROWS = 1e-5
_GRADIENTS = 1e-5
_LOSSES = 1e-6
_SMALL = 1e-3
"""Share of the norm of all gradients below which one counts as that: a gradient that is zero is pure rounding."""


def compare_rows(found: Tensor, wanted: Tensor, what: str, than: str) -> None:
    """Refuse rows that differ by more than rounding.

    Raises:
        BrokenError: names the first row that differs.
    """
    if found.shape != wanted.shape:
        raise BrokenError(f"{what} have shape {tuple(found.shape)}, {than} {tuple(wanted.shape)}")
    if not wanted.numel():
        return
    difference = (found.detach() - wanted).abs().amax(1)
    allowed = _ROWS * max(float(wanted.abs().max()), 1.0)
    if not bool((difference <= allowed).all()):
        row = int((~(difference <= allowed)).nonzero()[0])
        raise BrokenError(
            f"{what} differ from {than}: row {row} by {float(difference[row]):.3g}, allowed {allowed:.3g}"
        )


def compare_totals(found: Tensor, wanted: Tensor, what: str) -> None:
    """Refuse a sum of losses that differs from that of the whole module by more than rounding.

    Raises:
        BrokenError: says both.
    """
    if not abs(float(found) - float(wanted)) <= _LOSSES * max(abs(float(wanted)), 1.0):
        raise BrokenError(f"{what} is {float(found):.8g}, of the whole module {float(wanted):.8g}")


def norm_of(gradients: Iterable[Tensor]) -> float:
    """Return the norm of all gradients together."""
    return math.hypot(*(float(gradient.norm()) for gradient in gradients))


def compare_gradients(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, of: str = "parameter", whole: float | None = None
) -> None:
    """Refuse gradients that differ by more than rounding; design law 1 says how much that is.

    Args:
        found: by name.
        wanted: likewise.
        of: what has these names.
        whole: norm of all gradients together, if there are more of them.

    Raises:
        BrokenError: names the parameter that differs most.
    """
    if found.keys() != wanted.keys():
        raise BrokenError(f"other parameters have gradients: {sorted(found.keys() ^ wanted.keys())}")
    if whole is None:
        whole = norm_of(wanted.values())
    worst = ("", 0.0)
    for name, gradient in wanted.items():
        allowed = _GRADIENTS * max(float(gradient.norm()), _SMALL * whole)
        difference = float((found[name] - gradient).norm()) if gradient.numel() else 0.0
        if not difference <= allowed and not difference <= worst[1]:
            worst = (name, difference)
    if worst[0]:
        raise BrokenError(
            f"the gradient of {of} {worst[0]!r} differs by {worst[1]:.3g} of {float(wanted[worst[0]].norm()):.3g}"
        )

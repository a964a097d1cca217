"""By how much what was computed is off, as shares of what the first law allows: at most 1 is right.

The law: the first loss to 1e-6 of itself, each gradient to ``1e-5 max(|g|, 1e-3 |g_all|)``, each weight after three
steps to ``1e-5 max(|w|, 3 lr sqrt(n))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from oracle import ROUNDING, Outcome, Piece, worst
from tables import RATE
from torch import Tensor
from truth import Truth


@attrs.frozen(kw_only=True)
class Bounds:
    """What each kind of number may be off by, as a share of its size: that of the law, or less."""

    loss: float = 1e-6
    gradient: float = 1e-5
    weight: float = 1e-5


LAW = Bounds()
DOUBLE = Bounds(loss=1e-12, gradient=1e-11, weight=1e-11)
"""For float64: a millionth of the law. Weights that begin as the next numbers change these by 1e-14 and less."""


@attrs.frozen(kw_only=True)
class RelativeDifference:
    """The worst of each kind of number, as a share of what is allowed.

    Args:
        loss: of the first step.
        gradient: of all parameters.
        weight: likewise.
        names: of the parameters that are the worst.
    """

    loss: float
    gradient: float
    weight: float
    names: tuple[str, str]

    @property
    def worst(self) -> float:
        """The largest of them; what is not finite counts as infinitely wrong."""
        return max(math.inf if math.isnan(one) else one for one in (self.loss, self.gradient, self.weight))

    def figures(self) -> dict[str, Any]:
        """Return them with as many digits as are of use."""
        return {name: float(f"{getattr(self, name):.3g}") for name in ("loss", "gradient", "weight")}


def relative_difference(
    truth: Truth, found: Sequence[Outcome] | Truth, *, bounds: Bounds = LAW, nudged: Truth | None = None
) -> RelativeDifference:
    """Return how far what ranks hold, or another truth, is from a truth.

    Args:
        truth: what is right.
        found: by rank, or another truth.
        bounds: of each kind of number.
        nudged: the truth of weights that begin as the next numbers; each gradient and weight may also be off by
            `oracle.ROUNDING` times what that changes of it.
    """
    outcomes = [_as_outcome(found)] if isinstance(found, Truth) else found
    total = math.sqrt(sum(float(value.double().square().sum()) for value in truth.gradients.values()))
    gradients = {
        name: bounds.gradient * max(float(value.double().norm()), 1e-3 * total)
        for name, value in truth.gradients.items()
    }
    weights = {
        name: bounds.weight * max(float(value.double().norm()), 3 * RATE * math.sqrt(value.numel()))
        for name, value in truth.weights.items()
    }
    loss = max(abs(outcome.losses[0] - truth.losses[0]) for outcome in outcomes)
    gradient = _worst(
        [one.gradients for one in outcomes], truth.gradients, gradients, nudged.gradients if nudged else None
    )
    weight = _worst([one.weights for one in outcomes], truth.weights, weights, nudged.weights if nudged else None)
    return RelativeDifference(
        loss=loss / (bounds.loss * abs(truth.losses[0])),
        gradient=gradient[0],
        weight=weight[0],
        names=(gradient[1], weight[1]),
    )


def _as_outcome(truth: Truth) -> Outcome:
    """Return a truth as what the only rank would hold."""
    gradients, weights = (
        {name: Piece.of(value) for name, value in tree.items()} for tree in (truth.gradients, truth.weights)
    )
    return Outcome(losses=truth.losses, terms=truth.terms, norms=truth.norms, gradients=gradients, weights=weights)


def _worst(
    trees: Sequence[Mapping[str, Piece]],
    expected: Mapping[str, Tensor],
    bounds: Mapping[str, float],
    nudged: Mapping[str, Tensor] | None,
) -> tuple[float, str]:
    """Return the largest share of what may be off, and which tensor's it is; infinite where elements are nowhere."""
    shares = {}
    for name, value in expected.items():
        errors = worst([tree[name] for tree in trees if name in tree], value)
        off = math.inf if (errors < 0).any() else float(np.linalg.norm(errors))
        rounding = 0.0 if nudged is None else ROUNDING * float((nudged[name].double() - value.double()).norm())
        shares[name] = off / max(bounds[name], rounding)
    return max(((share, name) for name, share in shares.items()), default=(0.0, ""))


def missed(name: str, found: RelativeDifference) -> Iterator[str]:
    """Yield each bound that was missed, in a line."""
    for what, share in (
        ("first loss", found.loss),
        (f"gradient {found.names[0]}", found.gradient),
        (f"weight {found.names[1]}", found.weight),
    ):
        if not share <= 1:
            yield f"{name}: {what} is off by {share:.3g} times what is allowed"

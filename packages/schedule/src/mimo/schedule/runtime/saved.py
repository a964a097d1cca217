"""What is kept of a pass between its forward and its backward, and no more: the graph's ends, not their tensors.

Autograd keeps what it needs of a stage's inputs and outputs. Beyond that nothing holds them here, so that a message
that has left, or rows that were received and are not read again, give their storage back before the backward comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mimo.schedule.runtime.program import LOSS


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of a pass from those of its microbatches; of one, they are those."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(rows: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the rows of each microbatch of a pass, which are views; of one, they are the pass's."""
    assert len(rows) == sum(counts), (tuple(rows.shape), counts)
    first = 0
    for count in counts:
        yield rows if len(counts) == 1 else rows[first : first + count]
        first += count


class _Door(torch.autograd.Function):
    """Lets rows into a graph, and their gradient out. A leaf would do so too, and hold the rows for the gradient."""

    @staticmethod
    def forward(ctx: Any, knob: Tensor, rows: Tensor, out: list[Tensor]) -> Tensor:  # noqa: ARG004 - makes it differentiable
        ctx.out = out
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.out.append(gradient)
        return None, None, None


@attrs.frozen
class _Entered:
    """Rows that went into a graph: where their gradient comes out, and their likeness without their storage."""

    out: list[Tensor]
    shape: torch.Size
    nothing: Tensor

    @property
    def gradient(self) -> Tensor:
        """The gradient, which is zero where no output depends on the rows."""
        return self.out.pop() if self.out else self.nothing.new_zeros(self.shape)


@attrs.define
class Kept:
    """The ends of one pass's graph."""

    entered: dict[str, _Entered] = attrs.field(factory=dict)
    left: dict[str, GradientEdge] = attrs.field(factory=dict)

    def enter(self, edge: str, rows: Tensor) -> Tensor:
        """Return rows that came along an edge as the graph's own, to be given to the stage."""
        out: list[Tensor] = []
        self.entered[edge] = _Entered(out, rows.shape, rows.new_empty(0))
        knob = rows.new_empty(0).requires_grad_()
        return cast("Tensor", _Door.apply(knob, rows, out))  # type: ignore[no-untyped-call]

    def leave(self, outputs: Mapping[str, Tensor]) -> None:
        """Note where the outputs are in the graph.

        One without a graph is left out: a microbatch without a trained part in it, such as an empty lane of a
        stranger's encoder.
        """
        self.left = {port: get_gradient_edge(output) for port, output in outputs.items() if output.requires_grad}

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Run the graph backward from the outputs that have gradients, and from the loss, and let go of it."""
        roots = {port: end for port, end in self.left.items() if port in gradients or port == LOSS}
        self.left = {}
        if roots:
            torch.autograd.backward(tuple(roots.values()), [gradients.get(port) for port in roots])

    def gradient(self, edge: str) -> Tensor:
        """Return the gradient of what entered along an edge, once."""
        return self.entered.pop(edge).gradient

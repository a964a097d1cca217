"""What is saved of a pass between its forward and its backward: the ends of its autograd graph, not their tensors.

Autograd saves what it needs of a stage's inputs and outputs. Nothing here holds them beyond that, so that the storage
of a sent message, or of received rows that are not read again, is freed before the backward.
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


_KNOB = torch.empty(0).requires_grad_()
"""An input that requires gradients, so that what is computed beside it does; it gets none itself."""


class _GraphEntry(torch.autograd.Function):
    """Takes rows into a graph and gives their gradient out. A leaf would do so too, but would hold the rows."""

    @staticmethod
    def forward(ctx: Any, knob: Tensor, rows: Tensor, out: list[Tensor]) -> Tensor:  # noqa: ARG004 - `_KNOB`
        ctx.out = out
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.out.append(gradient)
        return None, None, None


@attrs.frozen
class _SavedInput:
    """Rows that went into a graph: where their gradient comes out, and what they were like."""

    out: list[Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def gradient(self) -> Tensor:
        """The gradient, which is zero where no output depends on the rows."""
        return self.out.pop() if self.out else torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@attrs.define
class SavedPass:
    """The ends of the autograd graph of one pass."""

    inputs: dict[str, _SavedInput] = attrs.field(factory=dict)
    outputs: dict[str, GradientEdge] = attrs.field(factory=dict)

    def enter(self, edge: str, rows: Tensor) -> Tensor:
        """Return the rows of an edge as an input of the graph, to pass to the stage."""
        out: list[Tensor] = []
        self.inputs[edge] = _SavedInput(out, rows.shape, rows.dtype, rows.device)
        return cast("Tensor", _GraphEntry.apply(_KNOB, rows, out))  # type: ignore[no-untyped-call]

    def leave(self, outputs: Mapping[str, Tensor]) -> None:
        """Save where the outputs are in the graph.

        An output without a graph is left out: no trained part was used for it, as on an empty lane of a third-party
        encoder.
        """
        self.outputs = {port: get_gradient_edge(output) for port, output in outputs.items() if output.requires_grad}

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """Run the graph backward from the outputs that have gradients, and from the loss, and free it."""
        roots = {port: end for port, end in self.outputs.items() if port in gradients or port == LOSS}
        self.outputs = {}
        if roots:
            torch.autograd.backward(tuple(roots.values()), [gradients.get(port) for port in roots])

    def gradient(self, edge: str) -> Tensor:
        """Return the gradient of the rows that entered along an edge, once."""
        return self.inputs.pop(edge).gradient

"""What a pipeline stage implements for the executor. The trainer adapts the model and the optimizer to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import Tensor

LOSS = "loss"
"""Port of a stage's output that is a loss: a scalar, whose gradient is 1."""


class StageProgram(Protocol):
    """What one pipeline stage of one module does."""

    def forward(self, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run one pass.

        Args:
            microbatches: that it serves, ascending; one, unless the module's ``batch_factor`` says more.
            inputs: rows by the name of the edge on which they came: those of the first microbatch, then those of the
                next.

        Returns:
            Rows by the name of the edge, in the same order, and `LOSS`, the sum over the microbatches.
        """

    def on_compute(self, phase: Literal["forward", "backward"]) -> AbstractContextManager[None]:
        """Return the context in which a forward runs, or a backward without its deferred weight gradients.

        It is entered and left whether or not there is anything to compute, on the ranks of a stage in the same order.
        """

    def defer_weight_grads(self) -> AbstractContextManager[Callable[[], None]]:
        """Return a context in which backwards defer their weight gradients.

        A backward within the context computes the gradients of the inputs, and of the weights only what can't be
        deferred. The context gives a function; calling it once, after the context, computes the rest and adds it up. It
        must need no other rank for that.
        """

    def on_grad_accumulation(self, deferred: Callable[[], None] | None, *, last: bool) -> AbstractContextManager[None]:
        """Return the context in which a backward, or its deferred part, adds to the stage's gradients.

        Args:
            deferred: what `defer_weight_grads` gave, about to be called; None for a whole backward.
            last: whether it is the last in this step to add to them.
        """

    def reduce_gradients(self) -> None:
        """Sum the stage's gradients over the ranks that share its parameters."""

    def reduce_tied(self) -> None:
        """Sum the gradients of parameters that another stage holds too."""

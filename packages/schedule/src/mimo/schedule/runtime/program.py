"""What the executor asks of a pipeline stage. The trainer adapts the model and the optimizer to it."""

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

    def computing(self, phase: Literal["forward", "backward"]) -> AbstractContextManager[None]:
        """Return the context of a forward, or of a backward but for what of it is put off.

        It is entered and left whether or not there is anything to compute, on the ranks of a stage in the same order.
        """

    def weights_later(self) -> AbstractContextManager[Callable[[], None]]:
        """Put off weight gradients.

        A backward within the context computes the gradients of the inputs, and of the weights only what can't be put
        off. Calling what the context gives, once and after it, computes the rest and adds it up. It must need no other
        rank for that.
        """

    def adding(self, put_off: Callable[[], None] | None, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of a backward that adds to the stage's gradients, or of the part of it that was put off.

        Args:
            put_off: what `weights_later` has given, about to be called; None for a whole backward.
            last: whether nothing is added to them in this step after it.
        """

    def reduce_gradients(self) -> None:
        """Sum the stage's gradients over the ranks that share its parameters."""

    def reduce_tied(self) -> None:
        """Add up the gradients of parameters that another stage holds too."""

"""What one microbatch is to the language model, and what a language-model stage must be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
from torch import Tensor

NO_LABEL = -100
"""Label of a row that takes no part in the loss."""


@attrs.frozen(kw_only=True, eq=False)
class LanguageBatch:
    """A packed microbatch; only its end is padded (positions 0, no label), and T may be 0.

    Args:
        tokens: [T] ids; at placeholders, the placeholder's.
        labels: [T] the next id, or `NO_LABEL`.
        positions: [T] of each token in its sample.
        lengths: tokens of each sample; their sum is T without the padding.
        placeholders: for each encoder by module name, [R] ascending positions in T that its rows take.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    placeholders: Mapping[str, Tensor] = attrs.field(factory=dict)


class LanguageModule(Protocol):
    """One pipeline stage of a language model, as `LanguageModelSpec.build` makes it (an `nn.Module`).

    Between stages and to `losses` go rows [T, H]; with sequence parallelism each tensor rank's slice [T/t, H].
    `losses`, `greedy` and `logits` exist to be called on the last stage only.
    """

    def __call__(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return the hidden rows of this stage, on the last stage after the final norm.

        Args:
            batch: the whole microbatch, on every stage.
            rows: on stage 0, each encoder's rows in the order of its placeholders; with sequence parallelism only
                those whose placeholders lie in this rank's slice of T. Empty on later stages.
            hidden: what the stage before returned; None on stage 0.
        """

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row [T] in fp32, 0 where it has no label, the same on all tensor ranks."""

    def greedy(self, hidden: Tensor) -> Tensor:
        """Return the likeliest next id of each row [T], of equal ones the lowest, the same on all tensor ranks."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this tensor rank's span of the logits [T, V_local]."""

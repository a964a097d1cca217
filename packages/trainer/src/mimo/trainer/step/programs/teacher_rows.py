"""What a teacher sends of rows in one message: the likeliest ids of each, its hidden row, or both.

Shapes: R rows, k ids of a row, H hidden.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from mimo.model.runtime import TopIds
from mimo.optimizer import Precision
from mimo.trainer.config.settings import Distil
from mimo.trainer.job.job import ID_BYTES
from mimo.trainer.job.precision import compute_dtype


@attrs.frozen(kw_only=True, eq=False)
class TeacherRows:
    """What a teacher says of R rows.

    Args:
        ids: the likeliest of each row; None where it sends none.
        hidden: [R, H]; None where it sends none.
    """

    ids: TopIds | None
    hidden: Tensor | None

    def to_bytes(self, precision: Precision) -> Tensor:
        """Return them as rows of bytes, [R, k · (4 + those of a number) + H · those of a number], as `Job.row_bytes`.

        Args:
            precision: of the run.
        """
        parts = [] if self.ids is None else [self.ids.to_bytes(_of_probabilities(precision))]
        if self.hidden is not None:
            parts.append(self.hidden.to(compute_dtype(precision)).contiguous().view(torch.uint8))
        return torch.cat(parts, dim=1)

    @classmethod
    def from_bytes(cls, rows: Tensor, precision: Precision, distil: Distil) -> TeacherRows:
        """Return what `to_bytes` has made rows of.

        Args:
            rows: of bytes.
            precision: of the run.
            distil: how the teacher teaches.
        """
        dtype = _of_probabilities(precision)
        first = distil.top_k * (ID_BYTES + dtype.itemsize)
        ids, hidden = rows[:, :first], rows[:, first:]
        return cls(
            ids=TopIds.from_bytes(ids, dtype, temperature=distil.temperature) if distil.top_k else None,
            # Copied in any case: a slice of one row counts as contiguous, and begins where no such number may.
            hidden=hidden.clone(memory_format=torch.contiguous_format).view(compute_dtype(precision))
            if distil.compares_hidden
            else None,
        )


def _of_probabilities(precision: Precision) -> torch.dtype:
    """Return how log-probabilities travel: in fp16 beside bf16 too, which is as wide and rounds them eight times less.

    They are 0 or less, and what is below the least number of fp16, which is -65504, is as impossible as minus infinity.
    """
    return torch.float32 if precision == "fp32" else torch.float16

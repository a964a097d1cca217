"""The expert axes: which rank holds which experts, and how rows and counts go between those ranks.

Shapes: W ranks that share all experts (ep x etp, etp fastest), E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.model.parallel.tensor import chunk
from mimo.topology import Grid


@attrs.frozen(kw_only=True)
class ExpertAxis:
    """This rank's place among the ranks that share a module's experts. With ``size`` 1 nothing is sent.

    Args:
        group: the ranks, None for one.
        ep: over how many the experts are spread, equally many on each.
        etp: over how many each expert's inner width is cut.
        ep_rank: which share of the experts is here.
        etp_rank: which piece of each.
        rows: the ranks over which the rows of one lane are split (context and tensor ranks), None for one.
    """

    group: dist.ProcessGroup | None = None
    ep: int = 1
    etp: int = 1
    ep_rank: int = 0
    etp_rank: int = 0
    rows: dist.ProcessGroup | None = None

    @classmethod
    def single(cls) -> ExpertAxis:
        """Return the axis of a rank that holds all experts and sees all rows of its lane."""
        return cls()

    @classmethod
    def of(
        cls, grid: Grid, rank: int, *, group: dist.ProcessGroup | None = None, rows: dist.ProcessGroup | None = None
    ) -> ExpertAxis:
        """Return the axis of ``rank`` in the expert view of ``grid``.

        Args:
            grid: the module's.
            rank: one of its ranks.
            group: this rank's group along ``("ep", "etp")``.
            rows: its group along `mimo.topology.ROW_AXES`.
        """
        place = grid.expert_coordinates(rank)
        return cls(group=group, ep=grid.ep, etp=grid.etp, ep_rank=place.ep, etp_rank=place.etp, rows=rows)

    @property
    def size(self) -> int:
        """Ranks that hold all experts together, W."""
        return self.ep * self.etp

    def held(self, experts: int) -> range:
        """Return which of ``experts`` are here."""
        assert experts % self.ep == 0, f"{experts} experts over {self.ep} ranks"
        each = experts // self.ep
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)

    def span(self, total: int) -> range:
        """Return which of an expert's ``total`` indices lie here when they are cut as `torch.chunk` does."""
        return chunk(total, size=self.etp, rank=self.etp_rank)

    def swap_counts(self, counts: Tensor) -> Tensor:
        """Send row w of ``counts`` [W, N] to rank w; return what all ranks sent here, [W, N]."""
        if self.size == 1:
            return counts
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=self.group)
        return received

    def swap(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its rows of ``x`` [sum(sent), …], return those that all sent here; no gradient of its own.

        Args:
            x: rows, those for rank 0 first.
            sent: how many go to each rank.
            received: how many come from each.
        """
        if self.size == 1:
            return x
        found = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), list(received), list(sent), group=self.group)
        return found

    def total(self, counts: Tensor) -> Tensor:
        """Return the sum of ``counts`` over the ranks that share the rows of this lane; no gradient."""
        if self.rows is None or self.rows.size() == 1:
            return counts
        summed = counts.clone(memory_format=torch.contiguous_format)
        if summed.numel():
            dist.all_reduce(summed, group=self.rows)
        return summed

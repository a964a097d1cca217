"""Rows to the ranks that hold their experts, and what the experts made of them back: dropless, one message each way.

Every row goes to each expert that it chose, as it is, however many chose the same (as in MegaBlocks, Gale et al. 2022,
arXiv:2211.15841). Where an expert is cut over several ranks the row goes to all of them, and their partial results
are added up where it came from.
Shapes: n rows here, k experts that each chose, E experts, H hidden, W ranks; R rows that this rank's experts take.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from mimo.model.parallel.collectives import linear
from mimo.model.parallel.decisions import decided
from mimo.model.parallel.expert import ExpertAxis


def counts_of(numbers: Tensor, total: int) -> Tensor:
    """Return how often each of ``total`` numbers is among some, [total], without a host that waits for a device."""
    counts = torch.zeros(total, dtype=torch.long, device=numbers.device)
    return counts.index_add_(0, numbers, torch.ones_like(numbers))


@attrs.frozen(kw_only=True, eq=False)
class Dispatch:
    """The ways of one layer's rows; make it with `Dispatch.of`, on all ranks of the axis together.

    A copy is one row for one of its experts on one of the ranks that share it; copies travel sorted by rank and there
    by expert.

    Args:
        axis: where the experts are.
        chosen: shape of the choices, ``(n, k)``.
        order: [n·k·etp] which copy, counted by row, choice and rank, travels at each place.
        place: the inverse: where each copy travels.
        sent: copies for each rank.
        received: copies from each rank.
        regroup: [R] which arrived copy is at each place when they are sorted by expert; None where they come so.
        arrived: the inverse.
        counts: copies for each expert here; their sum is R.
    """

    axis: ExpertAxis
    chosen: tuple[int, int]
    order: Tensor
    place: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    regroup: Tensor | None
    arrived: Tensor | None
    counts: tuple[int, ...]

    @classmethod
    def of(cls, chosen: Tensor, *, experts: int, axis: ExpertAxis) -> Dispatch:
        """Return the ways of rows that chose ``chosen`` [n, k] of ``experts``; counts are exchanged, and waited for.

        Where a forward is computed again they go as they went, whatever they would choose now, and nothing is waited
        for.
        """
        held = experts // axis.ep

        def keys_of(chosen: Tensor) -> Tensor:
            shards = torch.arange(axis.etp, device=chosen.device)
            ranks = (chosen // held * axis.etp).unsqueeze(2) + shards  # [n, k, etp]
            return (ranks * held + (chosen % held).unsqueeze(2)).flatten()

        def exchanged() -> tuple[Tensor, list[int]]:
            mine = counts_of(keys, axis.size * held).view(axis.size, held)
            others = axis.swap_counts(mine)
            return others, torch.cat((mine.sum(1), others.sum(1), others.sum(0))).tolist()

        keys = keys_of(decided(lambda: chosen))
        others, sizes = decided(exchanged)
        order = keys.argsort(stable=True)
        received = sizes[axis.size : 2 * axis.size]
        regroup = None
        if axis.size > 1 and held > 1:
            here = torch.arange(held, device=chosen.device).repeat(axis.size)
            regroup = here.repeat_interleave(others.flatten(), output_size=sum(received)).argsort(stable=True)
        return cls(
            axis=axis,
            chosen=(chosen.shape[0], chosen.shape[1]),
            order=order,
            place=_inverse(order),
            sent=tuple(sizes[: axis.size]),
            received=tuple(received),
            regroup=regroup,
            arrived=None if regroup is None else _inverse(regroup),
            counts=tuple(sizes[2 * axis.size :]),
        )

    def send(self, x: Tensor) -> Tensor:
        """Return the rows [R, H] that this rank's experts take, those of the first before those of the next.

        Args:
            x: [n, H], this rank's rows.
        """
        rows, chosen = self.chosen
        copies = chosen * self.axis.etp

        def forth(x: Tensor) -> Tensor:
            return self._out(x.index_select(0, self.order // copies))

        def back(gradient: Tensor) -> Tensor:
            home = self._home(gradient).index_select(0, self.place)
            return home.view(rows, copies, home.shape[1]).sum(1)

        return linear(x, forth, back)

    def send_each(self, values: Tensor) -> Tensor:
        """Return beside the rows of `send` what each has for that expert, [R, C]; no gradient.

        Args:
            values: [n, k, C], in the order in which each row chose its experts.
        """
        return self._out(values.flatten(0, 1).index_select(0, self.order // self.axis.etp))

    def bring(self, y: Tensor) -> Tensor:
        """Return what each row's experts made of it, [n, k, H].

        Args:
            y: [R, H], of the rows that `send` returned; with several ranks to an expert, each rank's part.
        """
        made = linear(
            y,
            lambda y: self._home(y).index_select(0, self.place),
            lambda gradient: self._out(gradient.index_select(0, self.order)),
        )
        made = made.view(*self.chosen, self.axis.etp, made.shape[1])
        return made.squeeze(2) if self.axis.etp == 1 else made.sum(2)

    def _out(self, copies: Tensor) -> Tensor:
        found = self.axis.swap(copies, sent=self.sent, received=self.received)
        return found if self.regroup is None else found.index_select(0, self.regroup)

    def _home(self, rows: Tensor) -> Tensor:
        rows = rows if self.arrived is None else rows.index_select(0, self.arrived)
        return self.axis.swap(rows, sent=self.received, received=self.sent)


def _inverse(order: Tensor) -> Tensor:
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device=order.device)
    return found

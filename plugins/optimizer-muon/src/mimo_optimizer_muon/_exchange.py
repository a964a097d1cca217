"""The messages of Muon: pieces of matrices come together on each matrix's owner, and its update goes back in pieces.

Along one mesh axis after the other, and along each in one message that holds the pieces of all matrices. A rank sends
what it holds of a matrix to the rank along that axis which has the owner's index, so every element travels once along
each axis, and no group of more ranks than an axis has is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo_optimizer_muon._matrices import Matrix, Shape, piece_length, piece_shape


@attrs.frozen(kw_only=True, eq=False)
class Hop:
    """The way along one mesh axis. All ranks of ``group`` make theirs of the same matrices.

    Args:
        group: the ranks along the axis.
        index: this rank's place among them.
        shapes: of the matrices as they are once the pieces along this axis have come together.
        dims: along which dim the axis cuts each.
        owners: index along the axis of the rank that each goes to.
        like: gives device and dtype of the messages.
    """

    group: dist.ProcessGroup
    index: int
    shapes: tuple[Shape, ...]
    dims: tuple[int, ...]
    owners: tuple[int, ...]
    like: Tensor

    def gather(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the matrices that come together here, in order; ``pieces`` are this rank's of all matrices."""
        if not pieces:
            return []
        sent = torch.cat([pieces[at].reshape(-1) for at in self._by_owner])
        received = self._exchange(sent, self._lengths_by_owner, self._lengths_by_source)
        shapes = [shape for source in self._collected for shape in source]
        parts = [part.view(shape) for part, shape in zip(_split(received, shapes), shapes, strict=True)]
        mine = len(self._mine)
        return [torch.cat(parts[which::mine], self.dims[at]) for which, at in enumerate(self._mine)]

    def scatter(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's pieces of all matrices, in order; ``wholes`` are those that came together here."""
        if not self.shapes:
            return []
        cut = [
            whole.split(self._cuts(at), self.dims[at]) for whole, at in zip(wholes, self._mine, strict=True)
        ]  # each of them [rank along the axis]
        flat = [pieces[rank].reshape(-1) for rank in range(self.group.size()) for pieces in cut]
        sent = torch.cat(flat) if flat else self.like.new_empty(0)
        received = self._exchange(sent, self._lengths_by_source, self._lengths_by_owner)
        shapes = [self._piece(at, self.index) for at in self._by_owner]
        found = dict(zip(self._by_owner, _split(received, shapes), strict=True))
        return [found[at].view(self._piece(at, self.index)) for at in range(len(self.shapes))]

    def _exchange(self, sent: Tensor, outward: list[int], inward: list[int]) -> Tensor:
        received = self.like.new_empty(sum(inward))
        dist.all_to_all_single(received, sent, inward, outward, group=self.group)
        return received

    def _piece(self, at: int, rank: int) -> Shape:
        return piece_shape(self.shapes[at], (self.dims[at],), (self.group.size(),), (rank,))

    def _cuts(self, at: int) -> list[int]:
        length = self.shapes[at][self.dims[at]]
        return [piece_length(length, self.group.size(), rank) for rank in range(self.group.size())]

    @cached_property
    def _mine(self) -> list[int]:
        """Matrices that come together here."""
        return [at for at, owner in enumerate(self.owners) if owner == self.index]

    @cached_property
    def _by_owner(self) -> list[int]:
        """All matrices in the order in which their pieces stand in what this rank sends."""
        return sorted(range(len(self.owners)), key=lambda at: (self.owners[at], at))

    @cached_property
    def _collected(self) -> list[list[Shape]]:
        """Of each rank of the axis, its pieces of what comes together here."""
        return [[self._piece(at, rank) for at in self._mine] for rank in range(self.group.size())]

    @cached_property
    def _lengths_by_source(self) -> list[int]:
        return [sum(down * across for down, across in shapes) for shapes in self._collected]

    @cached_property
    def _lengths_by_owner(self) -> list[int]:
        lengths = [0] * self.group.size()
        for at, owner in enumerate(self.owners):
            down, across = self._piece(at, self.index)
            lengths[owner] += down * across
        return lengths


class Exchange:
    """The way there and back of matrices that the same mesh axes cut. All their ranks make them in the same way.

    Args:
        matrices: in the same order on each of these ranks.
        groups: this rank's group along each axis, outermost first; none where matrices lie here whole.
        like: gives device and dtype of the messages.
    """

    def __init__(self, matrices: Sequence[Matrix], groups: Sequence[dist.ProcessGroup], *, like: Tensor) -> None:
        sizes, place = [group.size() for group in groups], [group.rank() for group in groups]
        self._hops: list[Hop] = []  # innermost axis first, the order of the way there
        for axis in reversed(range(len(groups))):
            self._hops.append(
                Hop(
                    group=groups[axis],
                    index=place[axis],
                    shapes=tuple(
                        piece_shape(one.shape, one.dims[:axis], sizes[:axis], place[:axis]) for one in matrices
                    ),
                    dims=tuple(one.dims[axis] for one in matrices),
                    owners=tuple(one.owner[axis] for one in matrices),
                    like=like,
                )
            )
            matrices = [one for one in matrices if one.owner[axis] == place[axis]]

    def gather(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole matrices that this rank owns, in order; ``pieces`` are its pieces of all."""
        for hop in self._hops:
            pieces = hop.gather(pieces)
        return list(pieces)

    def scatter(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's pieces of all matrices, in order; ``wholes`` are those that it owns."""
        for hop in reversed(self._hops):
            wholes = hop.scatter(wholes)
        return list(wholes)


def _split(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    return list(flat.split([down * across for down, across in shapes]))

"""The tensor axis: how activations go in and out of work that the tensor ranks of a module share.

One idea: work split over tensor ranks is bracketed by `TensorAxis.enter` and `TensorAxis.leave`, each the other's
adjoint. Where sequence parallelism keeps rows split outside of the bracket, the same two names gather and scatter.
Shapes: T rows, t tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from mimo.model.parallel.collectives import by_messages, exchange, linear
from mimo.topology.collectives import all_gather_single, reduce_scatter_single

_PAIR = 2
_HALVED = 1 << 20
"""Elements from which on two ranks combine half of them each; with fewer, the further message costs more."""


def chunk(total: int, *, size: int, rank: int) -> range:
    """Return which of ``total`` indices lie on ``rank`` of ``size`` when they are cut as `torch.chunk` does."""
    each = -(-total // size)
    return range(min(rank * each, total), min((rank + 1) * each, total))


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


@attrs.frozen(kw_only=True)
class TensorAxis:
    """This rank's place among the ranks that share a module's tensors. With ``size`` 1 every method does nothing.

    Args:
        group: the ranks, None for one.
        rank: position of this rank among them.
        size: how many they are.
        sequence_parallel: outside of shared work each rank holds ``T / size`` rows instead of all, and T is a
            multiple of ``size``.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False

    @property
    def name(self) -> str:
        """Name of the group, by which graphs know it."""
        assert self.group is not None
        return str(self.group.group_name)

    @classmethod
    def single(cls) -> TensorAxis:
        """Return the axis of a module that is not split."""
        return cls()

    @classmethod
    def of(cls, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> TensorAxis:
        """Return this rank's axis on its one-dimensional tensor ``mesh``."""
        if mesh.size() == 1:
            return cls()
        return cls(
            group=mesh.get_group(),
            rank=mesh.get_local_rank(),
            size=mesh.size(),
            sequence_parallel=sequence_parallel,
        )

    @property
    def splits_rows(self) -> bool:
        """Whether rows are split outside of shared work."""
        return self.sequence_parallel and self.size > 1

    def span(self, total: int) -> range:
        """Return which of ``total`` indices lie here when they are cut as `torch.chunk` does: uneven, even empty."""
        return chunk(total, size=self.size, rank=self.rank)

    def enter(self, x: Tensor) -> Tensor:
        """Bring ``x`` to all ranks before column-parallel work.

        Returns ``x`` itself, its gradient summed over ranks; with sequence parallelism [T/t, …] -> [T, …], its
        gradient summed and scattered.
        """
        if self.size == 1:
            return x
        if self.sequence_parallel:
            return linear(x, self.gather, self.scatter)
        return linear(x, _same, self.total)

    def leave(self, y: Tensor) -> Tensor:
        """Add up what each rank computed of ``y`` by row-parallel work.

        Returns the sum, on every rank; with sequence parallelism [T, …] -> [T/t, …], this rank's rows of the sum.
        """
        if self.size == 1:
            return y
        if self.sequence_parallel:
            return linear(y, self.scatter, self.gather)
        return linear(y, self.total, _same)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, of which each rank uses its own part: its gradient is summed too."""
        return x if self.size == 1 else linear(x, self.total, self.total)

    def share_out(self, x: Tensor) -> Tensor:
        """Return this rank's `span` of rows that are equal on all ranks, [T, …] -> [n, …].

        The gradient of all rows comes back on every rank.
        """
        total, span = len(x), self.span(len(x))
        if self.size == 1:
            return x
        return linear(x, lambda x: x[span.start : span.stop], lambda gradient: self._collect(gradient, total))

    def collect(self, x: Tensor, total: int) -> Tensor:
        """Return all ``total`` rows on every rank, of which each holds its `span`, [n, …] -> [T, …].

        The result's gradient is the same on all ranks, and each takes that of its rows.
        """
        span = self.span(total)
        if self.size == 1:
            return x
        return linear(x, lambda x: self._collect(x, total), lambda gradient: gradient[span.start : span.stop])

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, bitwise the same on each; no gradient of its own."""
        if torch.compiler.is_compiling():
            return cast("Tensor", _total(x, self.name))
        return self._reduce(x, dist.ReduceOp.SUM, torch.add)

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of all ranks' ``x``; no gradient."""
        return self._reduce(x, dist.ReduceOp.MAX, torch.maximum)

    def smallest(self, x: Tensor) -> Tensor:
        """Return the elementwise minimum of all ranks' ``x``; no gradient."""
        return self._reduce(x, dist.ReduceOp.MIN, torch.minimum)

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' equally many rows one after the other, [T/t, …] -> [T, …]; no gradient of its own."""
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return cast("Tensor", _gather(x, self.name))
        x = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape)
        if gathered.numel() == 0:
            return gathered.flatten(0, 1)
        if by_messages(x):
            gathered[self.rank] = x
            self._exchange(sent=lambda _peer: x, received=gathered.__getitem__)
        else:
            all_gather_single(gathered, x, self.group)
        return gathered.flatten(0, 1)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum of all ranks' ``x``, [T, …] -> [T/t, …]; no gradient of its own."""
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return cast("Tensor", _scatter(x, self.name))
        assert x.shape[0] % self.size == 0, f"{x.shape[0]} rows over {self.size} ranks"
        parts = x.contiguous().unflatten(0, (self.size, -1)) if len(x) else x.new_empty(self.size, *x.shape)
        if parts.numel() == 0:
            return parts[self.rank]
        if by_messages(x):
            others = parts.new_empty(self.size - 1, *parts.shape[1:])
            self._exchange(sent=parts.__getitem__, received=lambda peer: others[peer - (peer > self.rank)])
            total = others[0]
            for part in (*others[1:], parts[self.rank]):
                total += part
            return total
        scattered = torch.empty_like(parts[self.rank])
        reduce_scatter_single(scattered, parts, self.group)
        return scattered

    def _collect(self, x: Tensor, total: int) -> Tensor:
        padded = x.new_zeros(-(-total // self.size), *x.shape[1:])
        padded[: len(x)] = x
        return self.gather(padded)[:total]

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType, combine: Callable[..., Tensor]) -> Tensor:
        if self.size == 1:
            return x
        if self.size == _PAIR and x.numel() and by_messages(x):
            x = x.detach().contiguous()
            found = torch.empty_like(x)
            if x.numel() >= _HALVED:
                self._reduce_halves(x.view(-1).tensor_split(_PAIR), found.view(-1).tensor_split(_PAIR), combine)
                return found
            self._exchange(sent=lambda _peer: x, received=lambda _peer: found)
            return combine(x, found, out=found)  # the same bits on both: none of the three minds the order of two
        reduced = x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            dist.all_reduce(reduced, op=op, group=self.group)
        return reduced

    def _reduce_halves(self, x: Sequence[Tensor], found: Sequence[Tensor], combine: Callable[..., Tensor]) -> None:
        """Combine one half, and give it to the peer, which combines the other."""
        self._exchange(sent=x.__getitem__, received=lambda _peer: found[self.rank])
        combine(x[self.rank], found[self.rank], out=found[self.rank])
        self._exchange(sent=lambda _peer: found[self.rank], received=found.__getitem__)

    def _exchange(self, *, sent: Callable[[int], Tensor], received: Callable[[int], Tensor]) -> None:
        assert self.group is not None
        exchange(self.group, sent=sent, received=received)


def _axis(name: str) -> TensorAxis:
    group = _resolve_process_group(cast("Any", name))  # of a type of its own from 2.12 on
    return TensorAxis(group=group, rank=group.rank(), size=group.size())


# Nodes of a compiled layer's graph, which knows ranks by the name of their group.


@torch.library.custom_op("mimo::total", mutates_args=())
def _total(x: Tensor, name: str) -> Tensor:
    return _axis(name).total(x)


@_total.register_fake
def _total_fake(x: Tensor, _name: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mimo::gather", mutates_args=())
def _gather(x: Tensor, name: str) -> Tensor:
    return _axis(name).gather(x)


@_gather.register_fake
def _gather_fake(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape[0] * _axis(name).size, *x.shape[1:])


@torch.library.custom_op("mimo::scatter", mutates_args=())
def _scatter(x: Tensor, name: str) -> Tensor:
    return _axis(name).scatter(x)


@_scatter.register_fake
def _scatter_fake(x: Tensor, name: str) -> Tensor:
    return x.new_empty(x.shape[0] // _axis(name).size, *x.shape[1:])

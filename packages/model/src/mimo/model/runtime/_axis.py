"""The tensor axis: how activations go in and out of work that the tensor ranks of a module share.

One idea: work split over tensor ranks is bracketed by `TensorAxis.enter` and `TensorAxis.leave`, each the other's
adjoint. Where sequence parallelism keeps rows split outside of the bracket, the same two names gather and scatter.
Shapes: T rows, t tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_PAIR = 2


class _Adjoint(torch.autograd.Function):
    """A linear operation whose forward and backward are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


@attrs.frozen(kw_only=True)
class TensorAxis:
    """This rank's place among the ranks that share a module's tensors. With ``size`` 1 every method does nothing.

    Args:
        group: the ranks, None for one.
        rank: position of this rank among them.
        size: how many they are.
        sequence_parallel: outside of shared work each rank holds ``T / size`` rows instead of all; for language
            models only, and T is a multiple of ``size``.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False

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
        each = -(-total // self.size)
        return range(min(self.rank * each, total), min((self.rank + 1) * each, total))

    def enter(self, x: Tensor) -> Tensor:
        """Bring ``x`` to all ranks before column-parallel work.

        Returns ``x`` itself, its gradient summed over ranks; with sequence parallelism [T/t, …] -> [T, …], its
        gradient summed and scattered.
        """
        if self.size == 1:
            return x
        if self.sequence_parallel:
            return _apply(x, self.gather, self.scatter)
        return _apply(x, _same, self.total)

    def leave(self, y: Tensor) -> Tensor:
        """Add up what each rank computed of ``y`` by row-parallel work.

        Returns the sum, on every rank; with sequence parallelism [T, …] -> [T/t, …], this rank's rows of the sum.
        """
        if self.size == 1:
            return y
        if self.sequence_parallel:
            return _apply(y, self.scatter, self.gather)
        return _apply(y, self.total, _same)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, bitwise the same on each; no gradient of its own."""
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
        x = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape)
        if gathered.numel() == 0:
            return gathered.flatten(0, 1)
        if _by_messages(x):
            gathered[self.rank] = x
            self._exchange(lambda _peer: x, gathered.__getitem__)
        else:
            dist.all_gather_single(gathered, x, group=self.group)
        return gathered.flatten(0, 1)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum of all ranks' ``x``, [T, …] -> [T/t, …]; no gradient of its own."""
        if self.size == 1:
            return x
        assert x.shape[0] % self.size == 0, f"{x.shape[0]} rows over {self.size} ranks"
        parts = x.contiguous().unflatten(0, (self.size, -1)) if len(x) else x.new_empty(self.size, *x.shape)
        if parts.numel() == 0:
            return parts[self.rank]
        if _by_messages(x):
            others = parts.new_empty(self.size - 1, *parts.shape[1:])
            self._exchange(parts.__getitem__, lambda peer: others[peer - (peer > self.rank)])
            return parts[self.rank] + others.sum(0)
        scattered = torch.empty_like(parts[self.rank])
        dist.reduce_scatter_single(scattered, parts, group=self.group)
        return scattered

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        if self.size == 1:
            return x
        if self.size == _PAIR and x.numel() and _by_messages(x):
            x = x.contiguous()
            other = torch.empty_like(x)
            self._exchange(lambda _peer: x, lambda _peer: other)
            return combine(x, other)  # the same bits on both: none of the three minds the order of two
        reduced = x.clone(memory_format=torch.contiguous_format)
        if x.numel():
            dist.all_reduce(reduced, op=op, group=self.group)
        return reduced

    def _exchange(self, sent: Callable[[int], Tensor], received: Callable[[int], Tensor]) -> None:
        """Send each peer a tensor and receive one from it, straight into place."""
        assert self.group is not None
        peers = [peer for peer in range(self.size) if peer != self.rank]
        works = [dist.irecv(received(peer), group=self.group, group_src=peer) for peer in peers]
        works += [dist.isend(sent(peer), group=self.group, group_dst=peer) for peer in peers]
        for work in works:
            assert work is not None
            work.wait()


def _by_messages(x: Tensor) -> bool:
    # gloo's own gather and scatter take several times as long as sending the same bytes, its sum of two a fifth more.
    return x.device.type == "cpu"


def _apply(x: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    return cast("Tensor", _Adjoint.apply(x, forth, back))  # type: ignore[no-untyped-call]  # torch leaves it untyped

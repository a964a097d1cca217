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
        return self._reduce(x, dist.ReduceOp.SUM, lambda copies: copies.sum(0))

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of all ranks' ``x``; no gradient."""
        return self._reduce(x, dist.ReduceOp.MAX, lambda copies: copies.amax(0))

    def smallest(self, x: Tensor) -> Tensor:
        """Return the elementwise minimum of all ranks' ``x``; no gradient."""
        return self._reduce(x, dist.ReduceOp.MIN, lambda copies: copies.amin(0))

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' equally many rows one after the other, [T/t, …] -> [T, …]; no gradient of its own."""
        if self.size == 1:
            return x
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if gathered.numel() == 0:
            return gathered
        if _by_exchange(x):
            dist.all_to_all_single(gathered, self._repeat(x).flatten(0, 1), group=self.group)
        else:
            dist.all_gather_single(gathered, x.contiguous(), group=self.group)
        return gathered

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum of all ranks' ``x``, [T, …] -> [T/t, …]; no gradient of its own."""
        if self.size == 1:
            return x
        assert x.shape[0] % self.size == 0, f"{x.shape[0]} rows over {self.size} ranks"
        rows = x.shape[0] // self.size
        if x.numel() == 0:
            return x.new_empty(rows, *x.shape[1:])
        if _by_exchange(x):
            parts = x.new_empty(self.size, rows, *x.shape[1:])
            dist.all_to_all_single(parts.flatten(0, 1), x.contiguous(), group=self.group)
            return parts.sum(0)
        scattered = x.new_empty(rows, *x.shape[1:])
        dist.reduce_scatter_single(scattered, x.contiguous(), group=self.group)
        return scattered

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType, combine: Callable[[Tensor], Tensor]) -> Tensor:
        if self.size == 1:
            return x
        if x.numel() == 0:
            return x.clone()
        if _by_exchange(x):
            sent = self._repeat(x)
            copies = torch.empty_like(sent)
            dist.all_to_all_single(copies, sent, group=self.group)
            return combine(copies)
        reduced = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, op=op, group=self.group)
        return reduced

    def _repeat(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).expand(self.size, *x.shape).contiguous()


def _by_exchange(x: Tensor) -> bool:
    # gloo's all_to_all costs a third to a half of the CPU time of its other collectives, up to four ranks at least.
    return x.device.type == "cpu"


def _apply(x: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    return cast("Tensor", _Adjoint.apply(x, forth, back))  # type: ignore[no-untyped-call]  # torch leaves it untyped

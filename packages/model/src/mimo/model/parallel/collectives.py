"""What the axes have in common: linear operations with a given adjoint, and rows exchanged between peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

Operation: TypeAlias = Callable[[Tensor], Tensor]


class _Adjoint(torch.autograd.Function):
    """A linear operation whose forward and backward are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Operation, back: Operation) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def linear(x: Tensor, forth: Operation, back: Operation) -> Tensor:
    """Return ``forth(x)``, whose gradient is ``back`` of the result's."""
    return cast("Tensor", _Adjoint.apply(x, forth, back))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def by_messages(x: Tensor) -> bool:
    """Tell whether to send peer by peer: gloo's own gather and scatter take several times as long for the same bytes.

    Its sum of two takes a fifth more.
    """
    return x.device.type == "cpu"


def exchange(
    group: dist.ProcessGroup,
    *,
    sent: Callable[[int], Tensor],
    received: Callable[[int], Tensor],
) -> None:
    """Send each peer of ``group`` a tensor and receive one from it, straight into place; empty ones cost nothing."""
    rank = group.rank()
    peers = [peer for peer in range(group.size()) if peer != rank]
    coming = [(peer, received(peer)) for peer in peers]
    going = [(peer, sent(peer)) for peer in peers]
    # Sends first: while a large one holds the lock of a pair, gloo's thread spins over what the peer sends meanwhile.
    works = [group.send([x], peer, 0) for peer, x in going if x.numel()]
    works += [group.recv([x], peer, 0) for peer, x in coming if x.numel()]
    for work in works:
        work.wait()

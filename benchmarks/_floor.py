"""The least that a text model's step costs on ranks that share it: plain layers of their sizes, and bare messages.

Two pipeline stages of two tensor ranks each: layers, vocabulary and their sums as Megatron has them (Shoeybi et al.
2019, arXiv:1909.08053, section 3), one message for a microbatch's rows and one for their gradients.
Shapes: T rows, H hidden, v this rank's half of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import _plain
import torch
import torch.distributed as dist
from torch import Tensor, nn

TP, PP = 2, 2


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Sums:
    """Sums over the tensor ranks, where rows enter and leave what is shared."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """Return ``x``, whose gradient is summed."""
        return cast("Tensor", _Enter.apply(x, self.group))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of ``x``, in its place."""
        return cast("Tensor", _Leave.apply(x, self.group))  # type: ignore[no-untyped-call]  # torch leaves it untyped


class Stage(nn.Module):
    """This rank's half of the layers of a stage, with the embedding at the first and the head at the last."""

    def __init__(self, config: Any, index: int, half: int, sums: Sums) -> None:
        super().__init__()
        names = ("hidden", "head_width", "norm_eps", "rope_theta")
        shared = ("heads", "key_value_heads", "intermediate")
        cut = {name: getattr(config, name) // TP for name in shared}
        self.config = SimpleNamespace(**{name: getattr(config, name) for name in names}, **cut)
        self.sums, self.vocabulary = sums, config.vocabulary // TP
        self.start = half * self.vocabulary
        self.embedding = nn.Embedding(self.vocabulary, config.hidden) if index == 0 else None
        self.layers = nn.ModuleList(
            _plain.DecoderBlock(self.config, sums.enter, sums.leave) for _ in range(config.layers // PP)
        )
        last = index == PP - 1
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps) if last else None
        self.head = nn.Linear(config.hidden, self.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return rows [1, T, H] of rows or ids, or at the last stage the sum of the losses of ``labels`` [T]."""
        if self.embedding is not None:
            here = (x >= self.start) & (x < self.start + self.vocabulary)
            found = self.embedding((x - self.start).clamp(0, self.vocabulary - 1)).masked_fill(~here[..., None], 0.0)
            x = self.sums.leave(found)
        cos, sin = _plain.angles(self.config, x.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        if self.norm is None or self.head is None:
            return x
        (logits,) = self.head(self.sums.enter(self.norm(x)))
        return self._loss(logits, labels)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy over the halves of logits [T, v]."""
        top = logits.detach().amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.sums.group)
        logits = logits - top[:, None]
        here = (labels >= self.start) & (labels < self.start + self.vocabulary)
        own = logits.gather(1, (labels - self.start).clamp(0, self.vocabulary - 1)[:, None])[:, 0]
        both = torch.stack((logits.exp().sum(1), own.masked_fill(~here, 0.0)))
        total, target = self.sums.leave(both)
        loss: Tensor = (total.log() - target).sum()
        return loss


class Floor:
    """One rank of four."""

    def __init__(self, config: Any, rank: int) -> None:
        self.index, half = divmod(rank, TP)
        groups = [dist.new_group(list(range(stage * TP, (stage + 1) * TP))) for stage in range(PP)]
        self.stage = Stage(config, self.index, half, Sums(groups[self.index]))
        self.peer = rank + TP if self.index == 0 else rank - TP
        self.parameters = list(self.stage.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, betas=(0.9, 0.95), fused=True)
        self.hidden = config.hidden

    def step(self, samples: Sequence[Tensor]) -> None:
        """Do one step of samples of ids, each a microbatch."""
        self.optimizer.zero_grad()
        if self.index == 0:
            rows = [self.stage(sample[None, :-1], sample[1:]) for sample in samples]
            sends = [dist.isend(one.detach(), self.peer) for one in rows]
            for one in rows:
                gradient = torch.empty_like(one)
                dist.recv(gradient, self.peer)
                one.backward(gradient)
        else:
            sends = []
            for sample in samples:
                given = torch.empty(1, len(sample) - 1, self.hidden)
                dist.recv(given, self.peer)
                self.stage(given.requires_grad_(), sample[1:]).backward()
                assert given.grad is not None
                sends.append(dist.isend(given.grad, self.peer))
        for send in sends:
            assert send is not None
            send.wait()
        gradients = [cast("Tensor", parameter.grad) for parameter in self.parameters]
        squares = torch.stack(torch._foreach_norm(gradients)).square_().sum()  # noqa: SLF001 - as torch.nn.utils does
        dist.all_reduce(squares)
        count = sum(len(sample) - 1 for sample in samples)
        norm = float(squares) ** 0.5 / count
        torch._foreach_mul_(gradients, min(1.0, 1.0 / norm) / count)
        self.optimizer.step()

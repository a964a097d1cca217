"""The least that a step costs on ranks that share a model: plain layers of their sizes, and bare messages.

A text model on two pipeline stages of two tensor ranks each: layers, vocabulary and their sums as Megatron has them
(Shoeybi et al. 2019, arXiv:1909.08053, section 3), one message for a microbatch's rows and one for their gradients. And
pictures on two lanes before a text model on two tensor ranks.
Shapes: B samples, T rows, P rows of a picture, S text tokens, H hidden, v this rank's half of the vocabulary.
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

    def __init__(self, config: Any, index: int, half: int, sums: Sums, *, stages: int = PP) -> None:
        super().__init__()
        names = ("hidden", "head_width", "norm_eps", "rope_theta")
        shared = ("heads", "key_value_heads", "intermediate")
        cut = {name: getattr(config, name) // TP for name in shared}
        self.config = SimpleNamespace(**{name: getattr(config, name) for name in names}, **cut)
        self.sums, self.vocabulary = sums, -(-config.vocabulary // TP)
        self.start = half * self.vocabulary
        self.embedding = nn.Embedding(self.vocabulary, config.hidden) if index == 0 else None
        self.layers = nn.ModuleList(
            _plain.DecoderBlock(self.config, sums.enter, sums.leave) for _ in range(config.layers // stages)
        )
        last = index == stages - 1
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps) if last else None
        self.head = nn.Linear(config.hidden, self.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor, labels: Tensor, before: Tensor | None = None) -> Tensor:
        """Return rows [B, T, H] of rows or ids, or at the last stage the sum of the losses of the last ``labels``.

        Args:
            x: rows [B, T, H], or at the first stage ids [B, T].
            labels: of the last rows of each sample [B, S].
            before: rows [B, P, H] that stand before those of the ids.
        """
        if self.embedding is not None:
            here = (x >= self.start) & (x < self.start + self.vocabulary)
            found = self.embedding((x - self.start).clamp(0, self.vocabulary - 1)).masked_fill(~here[..., None], 0.0)
            x = self.sums.leave(found)
            x = x if before is None else torch.cat([before, x], 1)
        cos, sin = _plain.angles(self.config, x.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        if self.norm is None or self.head is None:
            return x
        logits = self.head(self.sums.enter(self.norm(x[:, -labels.shape[1] :])))
        return self._loss(logits.flatten(0, 1), labels.flatten())

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
            rows = [self.stage(sample[None, :-1], sample[None, 1:]) for sample in samples]
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
                self.stage(given.requires_grad_(), sample[None, 1:]).backward()
                assert given.grad is not None
                sends.append(dist.isend(given.grad, self.peer))
        for send in sends:
            assert send is not None
            send.wait()
        gradients = [cast("Tensor", parameter.grad) for parameter in self.parameters]
        _scale(gradients, sum(len(sample) - 1 for sample in samples))
        self.optimizer.step()


class SeeingFloor:
    """One rank of four: pictures on two lanes, and text on two tensor ranks, each of which hears from one lane."""

    def __init__(self, vision: Any, language: Any, rank: int) -> None:
        self.sees, half = rank < TP, rank % TP
        lanes, tensor = (dist.new_group(list(range(start, start + TP))) for start in (0, TP))
        self.group, self.peer, self.hidden = lanes if self.sees else tensor, (rank + TP) % (2 * TP), language.hidden
        self.module: Any = (
            _plain.Tower(vision, language.hidden) if self.sees else Stage(language, 0, half, Sums(tensor), stages=1)
        )
        self.half = half
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step(self, pictures: Tensor, tokens: Tensor, rows: int) -> None:
        """Do one step.

        Args:
            pictures: of this rank's half of the samples [B / 2, C, height, width].
            tokens: of all samples [B, S].
            rows: of a picture.
        """
        self.optimizer.zero_grad()
        if self.sees:
            self._see(pictures)
        else:
            self._read(tokens, rows)
        _scale([cast("Tensor", parameter.grad) for parameter in self.parameters], tokens.numel())
        self.optimizer.step()

    def _see(self, pictures: Tensor) -> None:
        made = self.module(pictures)
        send = dist.isend(made.detach(), self.peer)
        gradient = torch.empty_like(made)
        dist.recv(gradient, self.peer)
        made.backward(gradient)
        assert send is not None
        send.wait()
        gradients = [cast("Tensor", parameter.grad) for parameter in self.parameters]
        flat = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([one.numel() for one in gradients])
        torch._foreach_copy_(gradients, [part.view_as(one) for part, one in zip(parts, gradients, strict=True)])

    def _read(self, tokens: Tensor, rows: int) -> None:
        seen = torch.empty(TP, len(tokens) // TP, rows, self.hidden)
        dist.recv(seen[self.half], self.peer)
        dist.all_gather(list(seen.unbind()), seen[self.half].clone(), group=self.group)
        seen = seen.flatten(0, 1).requires_grad_()
        self.module(tokens[:, :-1], tokens, seen).backward()
        assert seen.grad is not None
        dist.send(seen.grad.view(TP, -1, rows, self.hidden)[self.half], self.peer)


def _scale(gradients: list[Tensor], count: int) -> None:
    """Divide gradients by the number of labels, and clip them by their norm over all ranks."""
    squares = torch.stack(torch._foreach_norm(gradients)).square_().sum()  # noqa: SLF001 - as torch.nn.utils does
    dist.all_reduce(squares)
    norm = float(squares) ** 0.5 / count
    torch._foreach_mul_(gradients, min(1.0, 1.0 / norm) / count)

"""The selective state space of Mamba-2 over packed samples (Dao and Gu 2024, arXiv:2405.21060).

Each head h keeps a state [P, S], zero before a sample's first row, which row t changes and reads:
``state = exp(step · rate) · state + step · x · B``, ``y = state · C + skip · x``. `scan_by_row` does just that. `scan`
cuts the rows into chunks, each of which is a product like attention's plus what the state before it adds (the paper's
section 6): the same numbers by large products, and one step of recurrence a chunk. Where `mamba_ssm` is installed, its
kernels do it on CUDA.
Shapes: T rows, N heads of P columns, G groups of heads that share B and C, S columns of the state; K chunks of Q rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional


@attrs.frozen(kw_only=True, eq=False)
class SampleChunks:
    """Packed samples cut into chunks of rows, wherever the samples end; make it with `SampleChunks.of`.

    Args:
        rows: of all samples, T.
        count: number of chunks, K, at least one; the last one is padded.
        size: rows of each, Q.
        wanted: rows of each that were asked for, where more than there are.
        samples: [T] number of each row's sample.
        ages: [T] of each row its place in its sample.
        seen: [K, Q, Q] whether a row (the first Q) sees another: one of its sample, itself or before it.
        enters: [K, Q] whether a row's sample began in an earlier chunk.
        leaves: [K, Q] whether a row's sample is that of the chunk's last row.
        passes: [K] whether one sample fills the chunk and began in an earlier one.
    """

    rows: int
    count: int
    size: int
    wanted: int
    samples: Tensor
    ages: Tensor
    seen: Tensor
    enters: Tensor
    leaves: Tensor
    passes: Tensor

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, chunk: int, before: int | None = None, device: torch.device | str = "cpu"
    ) -> SampleChunks:
        """Return the chunks of samples of these lengths, 0 included, one after the other.

        Args:
            lengths: of the samples.
            chunk: rows of a chunk, where there are as many.
            before: of one sample that is scanned bit by bit (`scan_on`), how many rows came before.
            device: where they will be run over.
        """
        assert before is None or len(lengths) == 1, f"{len(lengths)} samples are not one that goes on"
        rows = sum(lengths)
        size = max(1, min(chunk, rows))
        count = max(1, -(-rows // size))
        spans = torch.tensor([0, *lengths]).cumsum(0)
        samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
        ages = torch.arange(rows) - spans[samples] + (before or 0)
        # Padding is a sample of its own: nothing of it is read, and no state goes through it; or it is of the one that
        # goes on, whose state it leaves as it is.
        padding = len(lengths) if before is None else 0
        owner = functional.pad(samples, (0, count * size - rows), value=padding).view(count, size)
        earlier = torch.full((1,), 0 if before else -1)
        enters = owner == torch.cat((earlier, owner[:-1, -1])).unsqueeze(1)  # the last row before each chunk's
        seen = (owner.unsqueeze(2) == owner.unsqueeze(1)) & torch.ones(size, size, dtype=torch.bool).tril()
        found = {
            "samples": samples,
            "ages": ages,
            "seen": seen,
            "enters": enters,
            "leaves": owner == owner[:, -1:],
            "passes": enters[:, -1],
        }
        placed = {name: tensor.to(device) for name, tensor in found.items()}
        return cls(rows=rows, count=count, size=size, wanted=chunk, **placed)


def scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    chunks: SampleChunks,
    *,
    groups: Sequence[int] | None = None,
) -> Tensor:
    """Return what every row reads, [T, N, P], in float32 at least.

    Args:
        x: [T, N, P] what each row adds to the state.
        steps: [T, N] positive.
        rates: [N] negative.
        b: [T, G, S] where it is added.
        c: [T, G, S] where the state is read.
        skip: [N] how much of ``x`` is read beside the state.
        chunks: of the T rows.
        groups: [N] the group of each head, where they don't serve equally many heads in a row.
    """
    assert x.shape[0] == chunks.rows, f"{x.shape[0]} rows, chunks of {chunks.rows}"
    if groups is not None:
        b, c = b[:, groups], c[:, groups]
    if x.numel() and has_kernels(x.device, "mamba_ssm"):
        return scan_by_kernel(x, steps, rates, b, c, skip, chunks)
    return _scan_chunks(x, steps, rates, b, c, skip, chunks, None)[0]


def scan_on(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    chunks: SampleChunks,
    *,
    state: Tensor | None,
    groups: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what further rows of one sample read, [T, N, P], and the state [N, P, S] after the last; see `scan`.

    Args:
        x: [T, N, P], at least one row.
        steps: [T, N].
        rates: [N].
        b: [T, G, S].
        c: [T, G, S].
        skip: [N].
        chunks: of the T rows, made with ``before``.
        state: [N, P, S] after the row before these; None before the first.
        groups: [N] as for `scan`.
    """
    if groups is not None:
        b, c = b[:, groups], c[:, groups]
    run = _scan_rows if chunks.rows == 1 else _scan_chunks
    return run(x, steps, rates, b, c, skip, chunks, state)


def _scan_chunks(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    chunks: SampleChunks,
    begin: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what every row reads, and the state behind the last chunk."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, steps, b, c = x.to(wide), steps.to(wide), b.to(wide), c.to(wide)
    split = (b.shape[1], x.shape[1] // b.shape[1] if b.shape[1] else 1)  # groups, heads of each
    added = _cut(x * steps.unsqueeze(2), chunks)  # [K, Q, N, P]
    b, c = _cut(b, chunks), _cut(c, chunks)
    # [K, Q, N] of the decay since the chunk began, or the sample in it, so that no rounding goes from sample to sample.
    # As a product in float64, since one in float32 may be rounded to fewer digits (TF32).
    logs = (chunks.seen.double() @ _cut(steps * rates.to(wide), chunks).double()).to(wide)
    y = _within(added, logs, b, c, chunks.seen)
    left = added * _decay(logs[:, -1:] - logs, chunks.leaves).unsqueeze(3)
    made = torch.einsum("kqgs,kqghp->kghps", b, left.unflatten(2, split))
    through = _decay(logs[:, -1], chunks.passes).unflatten(1, split)[..., None, None]
    state = torch.zeros_like(made[0]) if begin is None else begin.unflatten(0, split)
    states = []
    for k in range(chunks.count):
        states.append(state)
        state = state * through[k] + made[k]
    read = torch.einsum("kqgs,kghps->kqghp", c, torch.stack(states)).flatten(2, 3)
    y = y + read * _decay(logs, chunks.enters).unsqueeze(3)
    return y.flatten(0, 1)[: chunks.rows] + x * skip.to(wide).unsqueeze(1), state.flatten(0, 1)


def _within(added: Tensor, logs: Tensor, b: Tensor, c: Tensor, seen: Tensor) -> Tensor:
    """Return what rows read of those in their own chunk, [K, Q, N, P]."""
    scores = torch.einsum("kqgs,kjgs->kgqj", c, b)
    logs = logs.transpose(1, 2)  # [K, N, Q]
    weights = _decay(logs.unsqueeze(3) - logs.unsqueeze(2), seen.unsqueeze(1))  # [K, N, Q, Q]
    if b.shape[2] != added.shape[2]:
        scores = scores.repeat_interleave(added.shape[2] // b.shape[2], 1)
    return torch.einsum("knqj,kjnp->kqnp", weights * scores, added)


def _decay(logs: Tensor, where: Tensor) -> Tensor:
    """Return the exponentials of ``logs``, 0 elsewhere; ``where`` has the first dims of ``logs``, or all of them."""
    where = where if where.dim() == logs.dim() else where.unsqueeze(-1)
    decay: Tensor = logs.masked_fill(~where, -torch.inf).exp()
    return decay


def _cut(x: Tensor, chunks: SampleChunks) -> Tensor:
    """Return rows chunk by chunk, [T, …] -> [K, Q, …], zero in the padding."""
    padding = chunks.count * chunks.size - chunks.rows
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)).reshape(chunks.count, chunks.size, *x.shape[1:])


def scan_by_row(
    x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor, chunks: SampleChunks
) -> Tensor:
    """Return the same row by row, as the recurrence says; see `scan`."""
    return _scan_rows(x, steps, rates, b, c, skip, chunks, None)[0]


def _scan_rows(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    chunks: SampleChunks,
    begin: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    x, steps, b, c = x.to(wide), steps.to(wide), b.to(wide), c.to(wide)
    each = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(each, 1), c.repeat_interleave(each, 1)
    decays = (steps * rates.to(wide)).exp() * (chunks.ages > 0).unsqueeze(1)  # [T, N]
    state, found = x.new_zeros(*x.shape[1:], b.shape[2]) if begin is None else begin, []
    writes = (steps.unsqueeze(2) * x).unsqueeze(3)  # [T, N, P, 1]
    for write, decay, into, out in zip(writes.unbind(), decays.unbind(), b.unbind(), c.unbind(), strict=True):
        state = decay.view(-1, 1, 1) * state + write * into.unsqueeze(1)
        found.append((state * out.unsqueeze(1)).sum(2))
    read = torch.stack(found) if found else x
    return read + x * skip.to(wide).unsqueeze(1), state


def has_kernels(device: torch.device, package: str) -> bool:
    """Tell whether an optional package's kernels can run there."""
    return device.type == "cuda" and importlib.util.find_spec(package) is not None


def scan_by_kernel(
    x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor, chunks: SampleChunks
) -> Tensor:
    """Return the same by the kernels of `mamba_ssm`; see `scan`."""
    kernels: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    found: Tensor = kernels.mamba_chunk_scan_combined(
        x.unsqueeze(0),
        steps.unsqueeze(0),
        rates,
        b.unsqueeze(0),
        c.unsqueeze(0),
        chunk_size=chunks.wanted,
        D=skip,
        seq_idx=chunks.samples.int().unsqueeze(0),
    )
    return found.squeeze(0).to(torch.promote_types(x.dtype, torch.float32))

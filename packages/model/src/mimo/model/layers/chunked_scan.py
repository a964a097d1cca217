"""The selective state space of Mamba-2 over packed samples (Dao and Gu 2024, arXiv:2405.21060).

Each head h keeps a state [P, S], zero before a sample's first row, which row t changes and reads:
``state = exp(step · rate) · state + step · x · B``, ``y = state · C + skip · x``. `scan_by_row` does just that.
`scan_by_chunks` cuts the rows into chunks, each of which is a product like attention's plus what the state before it
adds (the paper's section 6): the same results by large products, and one step of recurrence a chunk. Where `mamba_ssm`
is installed, its kernels do it on CUDA.
Shapes: T rows, N heads of P columns, G groups of heads that share B and C, S columns of the state; K chunks of Q rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mimo.topology.device_copies import to_device

_GONE = -64.0
"""What is left of a state after that, 2e-28 of it, counts as nothing: products with it would leave the normal range."""


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
        placed = {name: to_device(tensor, device) for name, tensor in found.items()}
        return cls(rows=rows, count=count, size=size, wanted=chunk, **placed)


@attrs.frozen(kw_only=True, eq=False)
class ScanInputs:
    """What a scan takes of T packed rows.

    Args:
        x: [T, N, P] what each row adds to the state.
        steps: [T, N] positive.
        rates: [N] negative.
        b: [T, G, S] where it is added; each group serves equally many heads in a row.
        c: [T, G, S] where the state is read.
        skip: [N] how much of ``x`` is read beside the state.
    """

    x: Tensor
    steps: Tensor
    rates: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor

    def widened(self) -> ScanInputs:
        """Return the same in float32 at least."""
        wide = torch.promote_types(self.x.dtype, torch.float32)
        return ScanInputs(**{name: value.to(wide) for name, value in attrs.asdict(self, recurse=False).items()})


def scan(inputs: ScanInputs, chunks: SampleChunks) -> Tensor:
    """Return what every row reads, [T, N, P], in float32 at least, by the quickest form that there is."""
    return _quickest(inputs)(inputs, chunks)[0]


def scan_on(inputs: ScanInputs, chunks: SampleChunks, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what more rows of one sample read, [T, N, P], and the state [N, P, S] after the last; see `scan`.

    Args:
        inputs: of at least one row.
        chunks: made with ``before``.
        state: [N, P, S] after the row before these; None before the first.
    """
    form = scan_by_row if chunks.rows == 1 else _quickest(inputs)
    return form(inputs, chunks, state)


def scan_single(inputs: ScanInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return what one more row of each sample reads, [C, N, P], and its state after it, [C, N, P, S].

    Args:
        inputs: of C rows, one of each sample.
        states: [C, N, P, S] after the rows before; 0 before the first.
    """
    inputs = inputs.widened()
    x, steps = inputs.x, inputs.steps
    each = x.shape[1] // inputs.b.shape[1]
    b, c = (part.repeat_interleave(each, 1).unsqueeze(2) for part in (inputs.b, inputs.c))  # [C, N, 1, S]
    decays = (steps * inputs.rates).exp()[..., None, None]
    states = decays * states + (steps.unsqueeze(2) * x).unsqueeze(3) * b
    return (states * c).sum(3) + x * inputs.skip.unsqueeze(1), states


def _quickest(inputs: ScanInputs) -> Callable[..., tuple[Tensor, Tensor]]:
    return scan_by_kernel if inputs.x.numel() and has_kernels(inputs.x.device, "mamba_ssm") else scan_by_chunks


def scan_by_chunks(inputs: ScanInputs, chunks: SampleChunks, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what every row reads, and the state behind the last chunk, of which `scan_on` makes use."""
    assert inputs.x.shape[0] == chunks.rows, f"{inputs.x.shape[0]} rows, chunks of {chunks.rows}"
    inputs = inputs.widened()
    x, steps = inputs.x, inputs.steps
    b, c = _cut(inputs.b, chunks), _cut(inputs.c, chunks)
    split = (b.shape[2], x.shape[1] // b.shape[2] if b.shape[2] else 1)  # groups, heads of each
    added = _cut(x * steps.unsqueeze(2), chunks)  # [K, Q, N, P]
    # [K, Q, N] of the decay since the chunk began, or the sample in it, so that no rounding goes from sample to sample.
    # As a product in float64, since one in float32 may be rounded to fewer digits (TF32).
    logs = (chunks.seen.double() @ _cut(steps * inputs.rates, chunks).double()).to(x.dtype)
    y = _within(added, logs, b, c, chunks.seen)
    left = added * _decay(logs[:, -1:] - logs, chunks.leaves).unsqueeze(3)
    made = torch.einsum("kqgs,kqghp->kghps", b, left.unflatten(2, split))
    through = _decay(logs[:, -1], chunks.passes).unflatten(1, split)[..., None, None]
    last = torch.zeros_like(made[0]) if state is None else state.unflatten(0, split)
    before = []
    for k in range(chunks.count):
        before.append(last)
        last = last * through[k] + made[k]
    read = torch.einsum("kqgs,kghps->kqghp", c, torch.stack(before)).flatten(2, 3)
    y = y + read * _decay(logs, chunks.enters).unsqueeze(3)
    return y.flatten(0, 1)[: chunks.rows] + x * inputs.skip.unsqueeze(1), last.flatten(0, 1)


def _within(added: Tensor, logs: Tensor, b: Tensor, c: Tensor, seen: Tensor) -> Tensor:
    """Return what rows read of those in their own chunk, [K, Q, N, P]."""
    scores = torch.einsum("kqgs,kjgs->kgqj", c, b)
    logs = logs.transpose(1, 2)  # [K, N, Q]
    weights = _decay(logs.unsqueeze(3) - logs.unsqueeze(2), seen.unsqueeze(1))  # [K, N, Q, Q]
    if b.shape[2] != added.shape[2]:
        scores = scores.repeat_interleave(added.shape[2] // b.shape[2], 1)
    return torch.einsum("knqj,kjnp->kqnp", weights * scores, added)


class _Decay(torch.autograd.Function):
    """Exponentials, but 0 where CPUs would take many times as long: of minus infinity, and of what comes to nothing."""

    @staticmethod
    def forward(ctx: Any, logs: Tensor, where: Tensor) -> Tensor:
        gone = ~where | (logs < _GONE)
        decay = logs.masked_fill(gone, 0.0).exp_().masked_fill_(gone, 0.0)
        ctx.save_for_backward(decay)
        return decay

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (decay,) = ctx.saved_tensors
        return gradients[0] * decay, None


def _decay(logs: Tensor, where: Tensor) -> Tensor:
    """Return the exponentials of ``logs``, 0 elsewhere; ``where`` has the first dims of ``logs``, or all of them."""
    where = where if where.dim() == logs.dim() else where.unsqueeze(-1)
    return cast("Tensor", _Decay.apply(logs, where))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _cut(x: Tensor, chunks: SampleChunks) -> Tensor:
    """Return rows chunk by chunk, [T, …] -> [K, Q, …], zero in the padding."""
    padding = chunks.count * chunks.size - chunks.rows
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)).reshape(chunks.count, chunks.size, *x.shape[1:])


def scan_by_row(inputs: ScanInputs, chunks: SampleChunks, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the same row by row, as the recurrence says, and the state after the last one."""
    inputs = inputs.widened()
    x, steps = inputs.x, inputs.steps
    each = x.shape[1] // inputs.b.shape[1]
    b, c = inputs.b.repeat_interleave(each, 1), inputs.c.repeat_interleave(each, 1)
    decays = (steps * inputs.rates).exp() * (chunks.ages > 0).unsqueeze(1)  # [T, N]
    last, found = x.new_zeros(*x.shape[1:], b.shape[2]) if state is None else state, []
    writes = (steps.unsqueeze(2) * x).unsqueeze(3)  # [T, N, P, 1]
    for write, decay, into, out in zip(writes.unbind(), decays.unbind(), b.unbind(), c.unbind(), strict=True):
        last = decay.view(-1, 1, 1) * last + write * into.unsqueeze(1)
        found.append((last * out.unsqueeze(1)).sum(2))
    read = torch.stack(found) if found else x
    return read + x * inputs.skip.unsqueeze(1), last


def has_kernels(device: torch.device, package: str) -> bool:
    """Tell whether an optional package's kernels can run there."""
    return device.type == "cuda" and importlib.util.find_spec(package) is not None


def scan_by_kernel(inputs: ScanInputs, chunks: SampleChunks, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the same by the kernels of `mamba_ssm`."""
    kernels: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    found, last = kernels.mamba_chunk_scan_combined(
        inputs.x.unsqueeze(0),
        inputs.steps.unsqueeze(0),
        inputs.rates,
        inputs.b.unsqueeze(0),
        inputs.c.unsqueeze(0),
        chunk_size=chunks.wanted,
        D=inputs.skip,
        initial_states=None if state is None else state.unsqueeze(0),
        seq_idx=chunks.samples.int().unsqueeze(0),
        return_final_states=True,
    )
    return found.squeeze(0).to(torch.promote_types(inputs.x.dtype, torch.float32)), last.squeeze(0)

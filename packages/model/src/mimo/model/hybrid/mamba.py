"""A Mamba-2 layer over packed samples (Dao and Gu 2024, arXiv:2405.21060, section 7).

It reads as if it ran on one rank: `parallelize.py` says how its heads are split over tensor ranks; with several
context ranks each runs over whole samples for a share of these (`Sequences`).
Shapes: T rows, R rows of whole samples, H hidden, N heads of P columns, G groups of heads, S columns of the state; with
several tensor ranks N and G are this rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias, cast

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.hybrid.config import HybridConfig
from mimo.model.hybrid.sequences import Sequences
from mimo.model.language import LayerCache
from mimo.model.layers import Linear, ScanInputs, convolve, convolve_continued, scan, scan_on, scan_single
from mimo.model.parallel import TensorAxis

Follow: TypeAlias = Callable[[Tensor, int], Iterable[Tensor]]
"""Of new rows and a number, those of each run of sequences behind as many earlier ones."""
_STEPS = (1e-3, 1e-1)
"""Between which the first steps are drawn."""
_STEP_FLOOR = 1e-4


class Convolution(nn.Module):
    """A convolution of each column by itself, with the weight [columns, taps].

    Attributes:
        columns: those of its piece that this rank computes, None for all; see `Linear.outputs`.
    """

    def __init__(self, columns: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, taps))
        self.bias = nn.Parameter(torch.empty(columns)) if bias else None
        self.columns: slice | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `torch.nn.Conv1d` does, clear the bias."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, sequences: Sequences, columns: slice, follow: Follow | None = None) -> Tensor:
        """Return [R, W] of ``x`` [R, W], which are some of the columns here.

        With ``follow``, which puts so many earlier rows before those of each sequence, they continue these.
        """
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.columns is not None:
            weight, bias = weight[self.columns], None if bias is None else bias[self.columns]
        weight, bias = weight[columns], None if bias is None else bias[columns]
        if follow is not None:
            runs = [convolve_continued(seen, weight, bias).flatten(0, 1) for seen in follow(x, weight.shape[1] - 1)]
            return torch.cat(runs) if len(runs) > 1 else runs[0]
        return convolve(x, weight, bias, sequences.chunks)


class GatedNorm(nn.Module):
    """Gated by SiLU, then divided by the root mean square of its group of columns, and scaled.

    Attributes:
        axis: over which heads are split.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.mamba_width))
        self.eps = config.norm_eps
        self.heads, self.groups, self.head_width = config.mamba_heads, config.mamba_groups, config.mamba_head_dim
        self.axis = TensorAxis.single()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return [T, N·P] of both."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        y = y.to(wide) * functional.silu(gate.to(wide))
        each, heads = self.heads // self.groups, self.axis.span(self.heads)
        by_head = y.unflatten(1, (-1, self.head_width))
        squares = by_head.square().sum(2)  # [T, N]
        if self.groups % self.axis.size:
            # A group's columns lie on several ranks: the sums of each rank's go to all, and so do their gradients.
            group = torch.arange(heads.start, heads.stop, device=y.device) // each
            sums = squares.new_zeros(len(y), self.groups).index_add(1, group, squares)
            squares = self.axis.sum(sums)[:, group]
        else:
            squares = squares.unflatten(1, (-1, each)).sum(2).repeat_interleave(each, 1)
        scales = (squares / (each * self.head_width) + self.eps).rsqrt()
        normed: Tensor = (by_head * scales.unsqueeze(2)).flatten(1)
        return normed.to(gate.dtype) * self.weight


class Mamba(nn.Module):
    """Convolution and scan between an input product of five parts and an output product.

    The parts are parameters of their own: cut by heads, one for all would be no plain piece.

    Attributes:
        axis: over which heads are split.
        heads: those here, of all.
        groups: those here that they belong to.
    """

    stays_eager = "how the scan is cut depends on the lengths of samples"

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        width, shared = config.mamba_width, config.mamba_groups * config.mamba_state
        self.head_width, self.state = config.mamba_head_dim, config.mamba_state
        self.heads_each = config.mamba_heads // config.mamba_groups
        self.step_range = (config.mamba_step_low, config.mamba_step_high)
        bias, taps = config.mamba_bias, config.mamba_taps
        self.gate = Linear(config.hidden, width, bias=bias)
        self.input = Linear(config.hidden, width, bias=bias)
        self.write = Linear(config.hidden, shared, bias=bias)
        self.read = Linear(config.hidden, shared, bias=bias)
        self.step = Linear(config.hidden, config.mamba_heads, bias=bias)
        self.input_conv = Convolution(width, taps, bias=config.mamba_conv_bias)
        self.write_conv = Convolution(shared, taps, bias=config.mamba_conv_bias)
        self.read_conv = Convolution(shared, taps, bias=config.mamba_conv_bias)
        self.rate_log = nn.Parameter(torch.empty(config.mamba_heads))
        self.step_bias = nn.Parameter(torch.empty(config.mamba_heads))
        self.skip = nn.Parameter(torch.empty(config.mamba_heads))
        self.norm = GatedNorm(config)
        self.output = Linear(width, config.hidden, bias=bias)
        self.axis = TensorAxis.single()
        self.heads, self.groups = range(config.mamba_heads), range(config.mamba_groups)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set rates to 1, 2, … (its section 7.1), draw steps evenly in their logarithm, and let inputs skip as one."""
        heads = len(self.rate_log)
        low, high = map(math.log, _STEPS)
        with torch.no_grad():
            self.rate_log.copy_(torch.arange(1, heads + 1).log())
            steps = (torch.rand(heads) * (high - low) + low).exp().clamp(min=_STEP_FLOOR)
            self.step_bias.copy_(steps + (-(-steps).expm1()).log())  # the inverse of softplus
        nn.init.ones_(self.skip)

    def forward(self, x: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """Return [T, H] of ``x`` [T, H]; with ``cache`` its rows go on from those that it has seen."""
        x = self.axis.enter(x)
        shares = [self._share(heads) for heads in sequences.context.spans(len(self.heads))]
        parts = self.input(x), self.write(x), self.read(x), self.step(x)
        packed = [torch.cat([part[:, cut] for part, cut in zip(parts, share, strict=True)], 1) for share in shares]
        y = self.mix(sequences.take(packed), sequences, cache)
        y = sequences.put(y, [share[0].stop - share[0].start for share in shares])
        return cast("Tensor", self.output(self.norm(y, self.gate(x)), leave=self.axis))

    def mix(self, packed: Tensor, sequences: Sequences, cache: LayerCache | None = None) -> Tensor:
        """Return what a context rank's share of the heads reads, [R, N·P]: cheap to compute again, beside its keeping.

        Args:
            packed: [R, ...] its columns of the input, of where it is written and read, and of the steps.
            sequences: whose rows they are.
            cache: of the rows before them.
        """
        here = sequences.context.spans(len(self.heads))[sequences.context.rank]
        inputs, writes, reads, heads = self._share(here)
        x, b, c, steps = packed.split([cut.stop - cut.start for cut in (inputs, writes, reads, heads)], 1)
        follow = [None if cache is None else partial(cache.follow, name) for name in ("input", "write", "read")]
        x = self.input_conv(x, sequences, inputs, follow[0])
        x = x.unflatten(1, (x.shape[1] // self.head_width, self.head_width))
        b = self.write_conv(b, sequences, writes, follow[1])
        b = b.unflatten(1, (b.shape[1] // self.state, self.state))
        c = self.read_conv(c, sequences, reads, follow[2])
        c = c.unflatten(1, (c.shape[1] // self.state, self.state))
        wide = torch.promote_types(steps.dtype, torch.float32)
        steps = functional.softplus(steps.to(wide) + self.step_bias[heads].to(wide)).clamp(*self.step_range)
        rates = -self.rate_log[heads].to(wide).exp()
        groups = self._groups(here)
        if groups is not None:
            b, c = b[:, groups], c[:, groups]
        given = ScanInputs(x=x, steps=steps, rates=rates, b=b, c=c, skip=self.skip[heads])
        if cache is None:
            return scan(given, sequences.chunks).flatten(1)
        return _continue(given, sequences, cache).flatten(1)

    def _share(self, heads: range) -> tuple[slice, slice, slice, slice]:
        """Return which columns go with some heads: of the input, of where it is written and read, and of the steps."""
        seen = [self._group(head) for head in heads] or [0, -1]
        groups = slice(seen[0] * self.state, (seen[-1] + 1) * self.state)
        inputs = slice(heads.start * self.head_width, heads.stop * self.head_width)
        return inputs, groups, groups, slice(heads.start, heads.stop)

    def _group(self, head: int) -> int:
        """Return which of the groups here a head of those here belongs to."""
        return (self.heads.start + head) // self.heads_each - self.groups.start

    def _groups(self, heads: range) -> tuple[int, ...] | None:
        """Return the group of each of some heads among theirs, None where all have equally many in a row."""
        seen = [self._group(head) for head in heads]
        if not seen:
            return None
        each, rest = divmod(len(seen), seen[-1] - seen[0] + 1)
        found = tuple(group - seen[0] for group in seen)
        return None if not rest and found == tuple(head // each for head in range(len(seen))) else found


def _continue(given: ScanInputs, sequences: Sequences, cache: LayerCache) -> Tensor:
    """Return what the rows of cached sequences read, [R, N, P], and save the states behind them."""
    wide = torch.promote_types(given.x.dtype, torch.float32)
    like = given.x.new_empty(0, dtype=wide)
    states = cache.state("state", (*given.x.shape[1:], given.b.shape[2]), like)
    found = []
    for run, chunks in zip(cache.runs, sequences.pieces, strict=True):
        rows = {name: getattr(given, name)[run.span] for name in ("x", "steps", "b", "c")}
        piece = attrs.evolve(given, **rows)
        if chunks is None:
            y, states[run.sequences] = scan_single(piece, states[run.sequences])
        else:
            y, states[run.first] = scan_on(piece, chunks, states[run.first])
        found.append(y)
    return torch.cat(found) if len(found) > 1 else found[0]

"""The chunked scan of Mamba-2 against its recurrence, the convolution before it, and the columns of context ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mimo.model.layers import convolution
from mimo.model.layers.chunked_scan import scan_by_kernel
from mimo.model.layers.convolution import convolve_by_kernel
from mimo.model.runtime import (
    ContextAxis,
    SampleChunks,
    ScanInputs,
    Sequences,
    convolve,
    scan,
    scan_by_chunks,
    scan_by_row,
)
from mimo.topology import context_spans

HEADS, WIDTH, GROUPS, STATE = 6, 3, 2, 5
SAMPLES = [(11,), (1, 1, 1), (4, 4), (5, 0, 1, 9, 2), (0,), (), (3, 13, 1)]


def _inputs(rows: int, *, dtype: torch.dtype = torch.float64) -> ScanInputs:
    generator = torch.Generator().manual_seed(rows)
    x, b, c = (
        torch.randn(rows, *shape, generator=generator, dtype=dtype)
        for shape in ((HEADS, WIDTH), (GROUPS, STATE), (GROUPS, STATE))
    )
    steps = torch.rand(rows, HEADS, generator=generator, dtype=dtype) + 0.01
    rates = -torch.rand(HEADS, generator=generator, dtype=dtype) * 3
    skip = torch.randn(HEADS, generator=generator, dtype=dtype)
    found = ScanInputs(x=x, steps=steps, rates=rates, b=b, c=c, skip=skip)
    for value in _all(found):
        value.requires_grad_()
    return found


def _all(inputs: ScanInputs) -> tuple[Tensor, ...]:
    return attrs.astuple(inputs, recurse=False)


def _each(inputs: ScanInputs, change: Callable[[Tensor], Tensor]) -> ScanInputs:
    return ScanInputs(**{name: change(value) for name, value in attrs.asdict(inputs, recurse=False).items()})


def _rows(inputs: ScanInputs, rows: slice) -> ScanInputs:
    return attrs.evolve(inputs, x=inputs.x[rows], steps=inputs.steps[rows], b=inputs.b[rows], c=inputs.c[rows])


@pytest.mark.parametrize("lengths", SAMPLES)
@pytest.mark.parametrize("chunk", [1, 4, 128])
def test_chunks_are_the_recurrence(lengths: tuple[int, ...], chunk: int) -> None:
    """What rows read and all gradients, wherever samples end in the chunks."""
    chunks = SampleChunks.of(lengths, chunk=chunk)
    given, same = _inputs(sum(lengths)), _inputs(sum(lengths))
    found, expected = scan(given, chunks), scan_by_row(same, chunks)[0]
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights + 0 * sum(value.sum() for value in _all(same))).sum().backward()
    for value, other in zip(_all(given), _all(same), strict=True):
        torch.testing.assert_close(value.grad, other.grad)


def test_a_state_ends_with_its_sample() -> None:
    """A sample reads the same whatever was packed before it."""
    inputs = _inputs(12)
    whole = scan(inputs, SampleChunks.of((5, 7), chunk=4))
    alone = scan(_rows(inputs, slice(5, 12)), SampleChunks.of((7,), chunk=4))
    torch.testing.assert_close(whole[5:], alone)
    joined = scan(inputs, SampleChunks.of((12,), chunk=4))
    assert not torch.allclose(joined[5:], alone, atol=1e-2)


def test_steps_of_a_sample_leave_no_rounding_to_the_next() -> None:
    """However large they are, in outputs and gradients, in a chunk that both lie in."""
    chunks = SampleChunks.of((9, 20), chunk=16)

    def run(factor: float) -> list[Tensor]:
        given = _inputs(29, dtype=torch.float32)
        scale = torch.ones(29, 1)
        scale[:9] = factor
        y = scan(attrs.evolve(given, steps=given.steps * scale), chunks)
        by_row = (given.x, given.steps, given.b, given.c)
        return [y.detach()[9:], *(each[9:] for each in torch.autograd.grad(y[9:].square().sum(), by_row))]

    for found, expected in zip(run(1e6), run(1.0), strict=True):
        assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


def test_what_decays_to_nothing_is_as_in_the_recurrence() -> None:
    """By steps so long that little or nothing of a state is left within a chunk, gradients too."""
    given, chunks = _inputs(40), SampleChunks.of((28, 12), chunk=16)

    def run(form: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        steps = given.steps * torch.linspace(1, 200, 40).unsqueeze(1)
        y = form(attrs.evolve(given, steps=steps), chunks)[0]
        return y, *torch.autograd.grad(y.square().sum(), _all(given))

    torch.testing.assert_close(run(scan_by_chunks), run(scan_by_row))


def test_the_scan_computes_in_single_precision_at_least() -> None:
    """Rows of half the precision are read as what they are, and nothing more is rounded."""
    rounded = _each(_inputs(40, dtype=torch.float32), Tensor.bfloat16)
    chunks = SampleChunks.of((30, 10), chunk=8)
    found = scan(rounded, chunks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, scan(_each(rounded, Tensor.float), chunks), rtol=0, atol=0)


@pytest.mark.parametrize("lengths", SAMPLES)
@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("biased", [True, False])
def test_the_convolution_is_pytorchs_in_each_sample(lengths: tuple[int, ...], taps: int, biased: bool) -> None:
    """With zeros before the first row of each."""
    rows, columns = sum(lengths), 7
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(rows, columns, generator=generator), torch.randn(columns, taps, generator=generator)
    bias = torch.randn(columns, generator=generator) if biased else None
    found = convolve(x, weight, bias, SampleChunks.of(lengths, chunk=4))
    expected = [
        functional.conv1d(sample.T, weight[:, None], bias, padding=taps - 1, groups=columns)[:, : len(sample)].T
        for sample in x.split(lengths)
        if len(sample)
    ]
    torch.testing.assert_close(found, functional.silu(torch.cat([x[:0], *expected])))


def test_kernels_are_asked_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optional packages would be given means the same by their documented arguments; theirs never ran here."""

    def scanned(
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        chunk_size: int,
        D: Tensor,  # noqa: N803 - the kernel's name
        initial_states: Tensor | None,
        seq_idx: Tensor,
        return_final_states: bool,
    ) -> tuple[Tensor, Tensor]:
        assert seq_idx.dtype == torch.int32
        assert chunk_size == 5
        assert return_final_states
        inputs = ScanInputs(x=x[0], steps=dt[0], rates=a, b=b[0], c=c[0], skip=D)
        if initial_states is None:
            y, last = scan_by_row(inputs, _chunks(seq_idx))
        else:  # those of the sample numbered 0
            assert not seq_idx.any()
            assert initial_states.dtype == torch.float32
            y, last = scan_by_row(inputs, SampleChunks.of((x.shape[1],), chunk=3, before=1), initial_states[0])
        return y.unsqueeze(0), last.unsqueeze(0)

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, *, seq_idx: Tensor, activation: str) -> Tensor:
        assert x.stride(1) == 1 < x.stride(2), "the kernel takes samples only where columns lie side by side"
        assert not any(number % 8 for number in (x.shape[1], x.stride(0), x.stride(2))), "and only eights of them"
        assert 2 <= weight.shape[1] <= 4
        assert {x.dtype, weight.dtype} <= {torch.float32, torch.bfloat16, torch.float16}
        assert activation == "silu"
        return convolve(x[0].T, weight, bias, _chunks(seq_idx)).T.unsqueeze(0)

    fakes: dict[str, Any] = {name: ModuleType(name) for name in ("causal_conv1d", "mamba_ssm.ops.triton.ssd_combined")}
    fakes["causal_conv1d"].causal_conv1d_fn = convolved
    fakes["mamba_ssm.ops.triton.ssd_combined"].mamba_chunk_scan_combined = scanned
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    inputs = _inputs(11, dtype=torch.float32)
    chunks = SampleChunks.of((4, 7), chunk=5)
    torch.testing.assert_close(scan_by_kernel(inputs, chunks)[0], scan_by_chunks(inputs, chunks)[0])
    last: Tensor | None = None
    for start, stop in ((0, 3), (3, 11)):
        piece, more = _rows(inputs, slice(start, stop)), SampleChunks.of((stop - start,), chunk=5, before=start)
        found, expected = scan_by_kernel(piece, more, last), scan_by_chunks(piece, more, last)
        torch.testing.assert_close(found, expected)
        last = found[1]
    rows, weight, bias = torch.randn(11, 16), torch.randn(16, 4), torch.randn(16)
    torch.testing.assert_close(convolve_by_kernel(rows, weight, bias, chunks), convolve(rows, weight, bias, chunks))


@pytest.mark.parametrize(
    ("rows", "columns", "taps", "dtype", "taken"),
    [
        (5, 8, 2, torch.float32, True),
        (5, 24, 4, torch.bfloat16, True),
        (5, 8, 1, torch.float32, False),
        (5, 8, 5, torch.float32, False),
        (5, 12, 4, torch.float32, False),
        (1, 8, 4, torch.float32, False),
        (5, 8, 4, torch.float64, False),
    ],
)
def test_the_kernel_of_the_convolution_gets_only_what_it_takes(
    rows: int, columns: int, taps: int, dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules that its source checks: taps, columns in eights, types; the rest is computed without it."""
    asked: list[Tensor] = []

    def asks(x: Tensor, *_others: object) -> Tensor:
        asked.append(x)
        return x

    chunks = SampleChunks.of((rows,), chunk=4)
    x, weight = torch.randn(rows, columns, dtype=dtype), torch.randn(columns, taps, dtype=dtype)
    expected = convolve(x, weight, None, chunks)
    monkeypatch.setattr(convolution, "has_kernels", lambda *_: True)
    monkeypatch.setattr(convolution, "convolve_by_kernel", asks)
    found = convolve(x, weight, None, chunks)
    assert bool(asked) == taken
    assert taken or torch.equal(found, expected)


def _chunks(numbers: Tensor) -> SampleChunks:
    return SampleChunks.of(torch.bincount(numbers[0]).tolist(), chunk=3)


def _exchange(rank: int, lengths: Sequence[int], widths: Sequence[int], padding: int) -> None:
    size, total = dist.get_world_size(), sum(widths)
    whole = torch.arange(sum(lengths) * total, dtype=torch.float64).view(-1, total) + 1
    places, first = [], 0
    for length in lengths:
        places += [first + row for span in context_spans(length, size=size, rank=rank) for row in range(*span)]
        first += length
    assert dist.group.WORLD is not None
    axis = ContextAxis.of(dist.group.WORLD)
    rows = len(places) + padding
    sequences = Sequences.of(lengths, rows=rows, chunk=4, context=axis)
    mine = functional.pad(whole[places], (0, 0, 0, padding), value=7.0).requires_grad_()
    taken = sequences.take(list(mine.split(list(widths), 1)))
    start = sum(widths[:rank])
    torch.testing.assert_close(taken, whole[:, start : start + widths[rank]])
    back = sequences.put(taken * 2, widths)
    torch.testing.assert_close(back[: len(places)], 2 * mine[: len(places)])
    assert not back[len(places) :].any()
    (back * back.detach()).sum().backward()
    torch.testing.assert_close(mine.grad, functional.pad(4 * whole[places], (0, 0, 0, padding)))


@pytest.mark.parametrize("widths", [(2, 3), (4, 0)])
@pytest.mark.parametrize("lengths", [(8, 0, 3, 1), (1,), ()])
def test_context_ranks_exchange_rows_for_columns(
    run_ranks: Callable[..., list[Any]], lengths: tuple[int, ...], widths: tuple[int, ...]
) -> None:
    """Each gets whole samples in order of its columns, gives them back to whose they are, and gradients likewise."""
    run_ranks(len(widths), _exchange, lengths, widths, 2)

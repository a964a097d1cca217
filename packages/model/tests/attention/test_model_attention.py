"""Attention over packed segments against attention with an explicit mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from mimo.model.attention import calls, kernels, padded, varlen
from mimo.model.attention.batches import CALL_COSTS, CallCost, batch
from mimo.model.attention.chunks import Chunk, cut_rows, cut_segments, keys_of_chunks
from mimo.model.runtime import ContextAxis, Segments, attend
from mimo.model.testing.varlen import varlen_attention

LENGTHS = [
    (5, 5, 5),
    (3, 5, 4, 1, 0, 5, 2),
    (40, 33, 7, 35, 90, 0, 41, 90),
    (1,),
    (0, 0),
    (),
]


WINDOWS = (1, 4, 36, 90)
KINDS = ((True, True), (True, False), (False, True), (False, False))
"""Whether attention is causal, and whether ranks hold slices of all rows at once."""


@attrs.frozen(kw_only=True)
class Shape:
    """Heads, and rows of padding; ``served`` names each query head's key-value head; ``sinks`` has one for each."""

    heads: int
    kv_heads: int
    padding: int = 0
    served: tuple[int, ...] | None = None
    value_width: int = 8
    scale: float | None = None
    soft_cap: float | None = None
    sinks: tuple[float, ...] | None = None


SHAPES = [
    Shape(heads=4, kv_heads=4),
    Shape(heads=4, kv_heads=2, padding=3),
    Shape(heads=6, kv_heads=1, padding=1),
    Shape(heads=3, kv_heads=2, padding=2, served=(0, 0, 1)),
    Shape(heads=4, kv_heads=2, value_width=6, scale=0.3),
    Shape(heads=4, kv_heads=2, padding=1, value_width=10, soft_cap=2.0, sinks=(0.5, -1.0, 3.0, 0.0)),
]


Spans = Sequence[tuple[int, int]]
ITEMS: Sequence[tuple[tuple[int, ...], Sequence[Spans]]] = [
    ((5, 5, 5), [[(0, 3)], [], [(1, 2), (3, 5)]]),
    ((3, 5, 4, 1, 0, 5, 2), [[(0, 3)], [(1, 4)], [], [(0, 1)], [], [(0, 5)], [(0, 1)]]),
    ((40, 33, 7, 35, 90, 0, 41, 90), [[(3, 20), (25, 39)], [], [(1, 7)], [(0, 2)], [(1, 81)], [], [], [(40, 50)]]),
    ((300,), [[(50, 190), (200, 210)]]),
]
"""Lengths, and which rows of each segment are one item's: at its ends, of one row, wider than a piece of a call."""


def _masked(
    inputs: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    causal: bool,
    window: int = 0,
    shape: Shape = SHAPES[0],
    items: Sequence[Spans] = (),
) -> Tensor:
    """Attention of query, key and value [T, N, D] with a [T, T] mask; rows beyond the segments give zeros."""
    query, key, value = inputs
    rows, heads, width = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    segment = torch.full((rows,), -1)
    segment[: sum(lengths)] = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long)
    )
    sees = (segment.unsqueeze(1) == segment) & (segment >= 0)
    if causal:
        earlier = torch.ones(rows, rows, dtype=torch.bool).tril()
        for number, spans in enumerate(items):
            for low, high in spans:
                item = slice(sum(lengths[:number]) + low, sum(lengths[:number]) + high)
                earlier[item, item] = True
        sees &= earlier
    if window:
        sees &= torch.arange(rows).unsqueeze(1) - torch.arange(rows) < window
    scores = torch.einsum("tnd,snd->nts", query, key) * (shape.scale or 1 / math.sqrt(width))
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    scores = torch.where(sees, scores, -1e30)
    if shape.sinks:
        sinks = torch.tensor(shape.sinks, dtype=scores.dtype).view(-1, 1, 1).expand(-1, rows, 1)
        scores = torch.cat((scores, sinks), 2)
    weights = scores.softmax(-1)[..., :rows] * sees
    return torch.einsum("nts,snd->tnd", weights, value)


def _held(lengths: Sequence[int], held: Sequence[Chunk]) -> Tensor:
    """Return which of the packed rows these chunks are."""
    firsts = [sum(lengths[:segment]) for segment in range(len(lengths))]
    rows = [firsts[chunk.segment] + at for chunk in held for at in range(chunk.start, chunk.stop)]
    return torch.tensor(rows, dtype=torch.long)


def _check_case(
    lengths: Sequence[int],
    context: ContextAxis,
    *,
    causal: bool,
    sliced: bool,
    shape: Shape,
    window: int = 0,
    items: Sequence[Spans] = (),
) -> None:
    total = sum(lengths)
    torch.manual_seed(total)
    sizes = ((shape.heads, 8), (shape.kv_heads, 8), (shape.kv_heads, shape.value_width))
    plain = [torch.randn(total, *size, dtype=torch.float64) for size in sizes]
    gradient = torch.randn(total, shape.heads, shape.value_width, dtype=torch.float64)
    if sliced:
        rows = -(-(total + shape.padding) // context.size)
        here = _held(lengths, cut_rows(lengths, rows=rows, size=context.size)[context.rank])
        segments = Segments.sliced(lengths, causal=causal, rows=rows, context=context)
    else:
        here = _held(lengths, cut_segments(lengths, size=context.size)[context.rank])
        rows = len(here) + shape.padding
        segments = Segments.of(lengths, causal=causal, window=window, rows=rows, context=context, items=items)
    padded = (0, 0, 0, 0, 0, rows - len(here))
    ours = [pad(x[here], padded, value=1e9).requires_grad_() for x in plain]
    theirs = [x.clone().requires_grad_() for x in plain]
    query, key, value = ours
    sinks = None if shape.sinks is None else torch.tensor(shape.sinks, dtype=torch.float64)
    found = attend(
        query,
        key,
        value,
        segments,
        heads=shape.served,
        scale=shape.scale,
        soft_cap=shape.soft_cap,
        sinks=sinks,
    )
    query, key, value = theirs
    if shape.served is not None:
        key, value = key[:, shape.served], value[:, shape.served]
    wanted = _masked((query, key, value), lengths, causal=causal, window=window, shape=shape, items=items)
    torch.testing.assert_close(found[: len(here)], wanted[here], rtol=0, atol=1e-12)
    assert not found[len(here) :].any()
    found.backward(pad(gradient[here], padded, value=1.0))
    wanted.backward(gradient)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad[: len(here)], other.grad[here], rtol=0, atol=1e-12)
        assert not one.grad[len(here) :].any()


AS_ON_GPUS: dict[str, dict[Any, dict[str, Any]]] = {
    "cpu": {},
    "one call": {
        kernels: {"takes_varlen": lambda _device, _dtype: True},
        varlen: {"varlen_attn": varlen_attention},
    },
    "one call, torch 2.11": {
        kernels: {"takes_varlen": lambda _device, _dtype: True},
        varlen: {"varlen_attn": partial(varlen_attention, enable_gqa=False), "_KNOWS_GROUPS": False},
    },
    "no math kernel": {
        padded: {"needs_alignment": lambda _query: True, "CALL_COSTS": {"cpu": CALL_COSTS["cuda"]}},
        calls: {"_knows_corner_masks": lambda _device: True},
    },
}
"""What a GPU answers where attention asks which kernels it has; the CPU's flash attention stands in for its own."""


def _check_attention(_rank: int, *, whole: bool = False, answers: str = "cpu") -> None:
    with ExitStack() as patches:
        for module, names in AS_ON_GPUS[answers].items():
            patches.enter_context(patch.multiple(module, **names))
        _check_shapes(whole=whole)


def _check_shapes(*, whole: bool) -> None:
    assert dist.group.WORLD is not None
    context = ContextAxis.of(dist.group.WORLD)
    for one, lengths in enumerate(LENGTHS):
        for other, shape in enumerate(SHAPES):
            kinds = KINDS if whole else (KINDS[(one + other + context.size) % len(KINDS)],)
            for causal, sliced in kinds:
                _check_case(lengths, context, causal=causal, sliced=sliced, shape=shape)
        for window in WINDOWS:
            for shape in (SHAPES[1], SHAPES[-1]):
                _check_case(lengths, context, causal=True, sliced=False, shape=shape, window=window)
    for lengths, items in ITEMS:
        for window in (0, *WINDOWS[1::2]):
            for shape in (SHAPES[1], SHAPES[-1]):
                _check_case(lengths, context, causal=True, sliced=False, shape=shape, window=window, items=items)


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=() if ranks in (1, 3) else pytest.mark.soak) for ranks in (1, 2, 3, 4)]
)
def test_equals_attention_with_a_mask(run_ranks: Callable[..., list[Any]], ranks: int) -> None:
    """Values and gradients are those of masked attention over any context ranks.

    Any lengths, empty ones, ranks without a row, shared heads, padding at the end, windows back, items whose rows see
    each other wherever the ranks cut them. Each number of ranks meets each shape in all kinds, at some lengths; and
    each shape meets all kinds at all lengths, on one number of ranks.
    """
    run_ranks(ranks, _check_attention)


@pytest.mark.parametrize(
    ("answers", "ranks"),
    [
        *(("one call", 3), ("no math kernel", 2)),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (("one call", 1), ("one call, torch 2.11", 2))),
    ],
)
def test_equals_attention_with_a_mask_by_the_kernels_of_gpus(
    run_ranks: Callable[..., list[Any]], answers: str, ranks: int
) -> None:
    """The same where all is one call without padding, and in calls that leave nothing to the kernel without limits."""
    run_ranks(ranks, partial(_check_attention, answers=answers))


@pytest.mark.soak
@pytest.mark.parametrize("answers", AS_ON_GPUS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_attention_with_a_mask_in_every_kind(
    run_ranks: Callable[..., list[Any]], ranks: int, answers: str
) -> None:
    """The whole product of numbers of ranks, lengths, shapes, kinds and kernels."""
    run_ranks(ranks, partial(_check_attention, whole=True, answers=answers))


def _check_pieces(_rank: int) -> None:
    assert dist.group.WORLD is not None
    context = ContextAxis.of(dist.group.WORLD)
    for window in (0, 100, 300):
        shape = Shape(heads=2, kv_heads=1, padding=1)
        _check_case((521, 3), context, causal=True, sliced=False, shape=shape, window=window)


def test_long_segments(run_ranks: Callable[..., list[Any]]) -> None:
    """The same where late rows attend in pieces."""
    run_ranks(2, _check_pieces)


def _check_message(_rank: int) -> None:
    sent: list[int] = []

    class Counting(ContextAxis):
        def share(self, x: Tensor, counts: Sequence[int]) -> Tensor:
            sent.append(x.numel())
            return super().share(x, counts)

    world = dist.get_world_size()
    context = Counting(group=dist.group.WORLD, rank=dist.get_rank(), size=world)
    segments = Segments.of((8, 4), causal=True, rows=6 + 1, context=context)
    query, key = torch.randn(7, 6, 2), torch.randn(7, 3, 2)
    attend(query, key, key, segments, heads=(0, 0, 1, 1, 1, 2))
    assert sent == [6 * 2 * 3 * 2]


def test_only_key_and_value_heads_travel(run_ranks: Callable[..., list[Any]]) -> None:
    """One message a layer: keys and values of the key-value heads alone, without padding."""
    run_ranks(2, _check_message)


def _shapes(segments: Segments) -> list[tuple[int, int, int]]:
    return [(call.chunks, call.queries, call.keys) for call in segments.padded.calls]


def test_equal_lengths_are_one_call_in_place() -> None:
    """Segments of one length need no reordering."""
    segments = Segments.of((4, 4, 4), causal=False, rows=13)
    assert _shapes(segments) == [(3, 4, 4)]
    assert segments.padded.query_index is None
    assert segments.padded.key_index is None
    assert segments.padded.inverse_index is None


FREE = CallCost(call=0, row=0, masked=1)
DEAR = CallCost(call=10**9, row=1, masked=1)


def _batches(lengths: Sequence[int], *, causal: bool, cost: CallCost = CALL_COSTS["cpu"]) -> list[list[int]]:
    (chunks,) = cut_segments(lengths, size=1)
    calls = batch(chunks, keys_of_chunks(chunks, lengths, causal=causal), causal=causal, cost=cost)
    return [[chunks[i].segment for i in call] for call in calls]


@pytest.mark.parametrize("causal", [True, False])
def test_segments_share_a_call_where_their_padding_costs_less_than_another(causal: bool) -> None:
    """What a call costs on each kind of device decides; segments of one length always share one."""
    lengths = (100, 98, 70, 100, 30, 5)
    like = [[0, 1, 3]] if causal else [[0, 3], [1]]  # a mask over all of a call's keys costs more than their padding
    assert _batches(lengths, causal=causal) == [*like, [2], [4], [5]]
    assert _batches(lengths, causal=causal, cost=CALL_COSTS["cuda"]) == [[0, 1, 2, 3], [4, 5]]
    assert _batches(lengths, causal=causal, cost=FREE) == [[0, 3], [1], [2], [4], [5]]
    assert _batches(lengths, causal=causal, cost=DEAR) == [[0, 1, 2, 3, 4, 5]]


CHAT = (
    271,
    450,
    389,
    105,
    117,
    198,
    185,
    429,
    719,
    207,
    86,
    126,
    487,
    386,
    168,
    554,
    194,
    328,
    1376,
    158,
    474,
    560,
    226,
)
IMAGES = (
    276,
    189,
    180,
    342,
    506,
    100,
    368,
    90,
    374,
    340,
    152,
    418,
    143,
    207,
    238,
    180,
    400,
    230,
    286,
    320,
    252,
    336,
    380,
    180,
    130,
    180,
    120,
    299,
    272,
    96,
    399,
    216,
    216,
    440,
    400,
    220,
    460,
    126,
    140,
    286,
    198,
    99,
    96,
    209,
    80,
    280,
    192,
    361,
    253,
    253,
    506,
    391,
    120,
    198,
    368,
    312,
    112,
    456,
    96,
    408,
    160,
    456,
    247,
    360,
)


@pytest.mark.parametrize(
    ("lengths", "causal", "expected"),
    [(CHAT, True, {"cpu": (23, 1.0), "cuda": (11, 1.0205)}), (IMAGES, False, {"cpu": (50, 1.0), "cuda": (40, 1.0061)})],
    ids=["23 chat samples in 8,192 rows", "64 images of free size"],
)
def test_how_many_calls_the_costs_of_each_kind_of_device_give(
    lengths: tuple[int, ...], causal: bool, expected: dict[str, tuple[int, float]]
) -> None:
    """And their area over that of the segments: a CPU makes a call more rather than compute what is padded."""
    found = {}
    for device, cost in CALL_COSTS.items():
        calls = _batches(lengths, causal=causal, cost=cost)
        area = sum(len(call) * max(lengths[i] for i in call) ** 2 for call in calls)
        found[device] = len(calls), round(area / sum(length**2 for length in lengths), 4)
    assert found == expected


def _price(lengths: Sequence[int], calls: Sequence[Sequence[int]], *, causal: bool, cost: CallCost) -> float:
    def masked(call: Sequence[int]) -> bool:
        return not causal and len({lengths[i] for i in call}) > 1

    longest = [max(lengths[i] for i in call) for call in calls]
    return sum(cost.of(len(call), most, most, masked=masked(call)) for call, most in zip(calls, longest, strict=True))


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=9),
    causal=st.booleans(),
    cost=st.sampled_from([*CALL_COSTS.values(), FREE, CallCost(call=3_000, row=0, masked=1)]),
)
def test_no_cut_of_the_sorted_lengths_costs_less(lengths: list[int], causal: bool, cost: CallCost) -> None:
    """All ways to cut at most nine lengths, 256 of them, are tried."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    prices = []
    for cuts in product((False, True), repeat=len(lengths) - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        calls = [order[start:stop] for start, stop in pairwise(ends)]
        prices.append(_price(lengths, calls, causal=causal, cost=cost))
    found = _price(lengths, _batches(lengths, causal=causal, cost=cost), causal=causal, cost=cost)
    assert found == pytest.approx(min(prices))


def test_early_and_late_chunks_are_calls_of_their_own() -> None:
    """Late chunks see all rows before them, early ones no more than themselves; those of like length share a call."""
    segments = Segments.of((100, 98, 99), causal=True, context=ContextAxis(rank=0, size=2))
    assert _shapes(segments) == [(3, 26, 100), (3, 25, 25)]
    assert [[piece.mask is None for piece in call.pieces] for call in segments.padded.calls] == [[False], [True]]
    middle = Segments.of((100, 98, 99), causal=True, context=ContextAxis(rank=1, size=2))
    assert _shapes(middle) == [(3, 50, 75)]


def test_long_chunks_run_in_pieces() -> None:
    """Queries late in a segment look at what is before them in pieces, so that little is computed and masked."""
    (call,) = Segments.of((1030,), causal=True, context=ContextAxis(rank=1, size=2)).padded.calls
    assert (call.queries, call.keys) == (515, 773)
    assert [(piece.queries, piece.keys) for piece in call.pieces] == [
        (slice(0, 128), slice(0, 386)),
        (slice(128, 257), slice(0, 515)),
        (slice(257, 386), slice(0, 644)),
        (slice(386, 515), slice(0, 773)),
    ]


def test_a_window_leaves_out_what_no_row_sees() -> None:
    """Pieces begin where their first row's window does, so that long segments cost what they look at."""
    (call,) = Segments.of((1024,), causal=True, window=200).padded.calls
    assert [(piece.queries, piece.keys) for piece in call.pieces] == [
        (slice(128 * piece, 128 * piece + 128), slice(max(0, 128 * piece - 199), 128 * piece + 128))
        for piece in range(8)
    ]
    assert all(piece.mask is not None and piece.mask.any(1).all() for piece in call.pieces)
    assert Segments.of((200,), causal=True, window=200).padded.calls[0].pieces[0].mask is None


@pytest.mark.parametrize(
    ("rows", "part", "parts", "calls"),
    [
        (12, 0, 1, [(1, 3, 90), (3, 3, 40)]),
        (5, 1, 3, [(1, 1, 90), (2, 3, 40)]),
        (5, 2, 3, [(1, 2, 40)]),
        (12, 1, 2, []),
    ],
)
def test_queries_of_like_segments_share_a_call(
    rows: int, part: int, parts: int, calls: list[tuple[int, int, int]]
) -> None:
    """Three rows for each of four segments look at its 40 or 90 others: chunks, queries, keys of a slice's calls."""
    segments = Segments.crossed([40, 90, 40, 40], queries=3, rows=rows, part=part, parts=parts)
    assert [(call.chunks, call.queries, call.keys) for call in segments.padded.calls] == calls
    assert segments.cut.rows == min(rows, max(0, 12 - part * rows))


def test_slices_cut_segments_anywhere() -> None:
    """Each rank's slice of the rows looks at all of the segments that it touches."""
    calls = [
        _shapes(Segments.sliced((60, 60, 20), causal=False, rows=50, context=ContextAxis(rank=rank, size=3)))
        for rank in range(3)
    ]
    assert calls == [[(1, 50, 60)], [(1, 40, 60), (1, 10, 60)], [(1, 20, 60), (1, 20, 20)]]


@given(
    lengths=st.lists(st.integers(0, 60), max_size=30),
    causal=st.booleans(),
    size=st.integers(1, 5),
    sliced=st.booleans(),
)
def test_every_row_is_in_one_chunk_and_one_call(lengths: list[int], causal: bool, size: int, sliced: bool) -> None:
    """No row is lost or held twice, and empty segments cost no call."""
    rows = -(-sum(lengths) // size)
    held = cut_rows(lengths, rows=rows, size=size) if sliced else cut_segments(lengths, size=size)
    packed = torch.cat([_held(lengths, chunks) for chunks in held])
    assert sorted(packed.tolist()) == list(range(sum(lengths)))
    for chunks in held:
        assert all(chunk.rows > 0 for chunk in chunks)
        assert not sliced or sum(chunk.rows for chunk in chunks) <= rows
        keys = keys_of_chunks(chunks, lengths, causal=causal)
        calls = batch(chunks, keys, causal=causal, cost=CALL_COSTS["cpu"])
        assert sorted(index for call in calls for index in call) == list(range(len(chunks)))


def test_rows_must_hold_the_segments() -> None:
    """More rows of segments than rows is our own mistake."""
    with pytest.raises(AssertionError, match="7 rows of segments in 6"):
        Segments.of((3, 4), causal=True, rows=6)


@pytest.mark.parametrize(("before", "window"), [(0, 0), (0, 3), (4, 0), (4, 3)])
def test_an_item_is_seen_whole_where_its_segment_is_read_in_parts(before: int, window: int) -> None:
    """Its rows see each other behind what was read before; an item that was read then changes nothing."""
    torch.manual_seed(1)
    items = [(1, 4), (5, 8)]
    inputs = [torch.randn(9, 2, 8, dtype=torch.float64) for _ in range(3)]
    segments = Segments.continued([9 - before], before=[before], window=window, items=[items])
    found = attend(inputs[0][before:], inputs[1], inputs[2], segments)
    wanted = _masked(inputs, (9,), causal=True, window=window, items=[items])[before:]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)

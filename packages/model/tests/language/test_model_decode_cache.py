"""A language model that remembers: a sample read bit by bit gives the logits of the whole, by no more than it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import attrs
import pytest
import torch
from torch import Tensor

from mimo.model import DecoderConfig, HybridConfig, Stage
from mimo.model.decoder.model import Decoder
from mimo.model.hybrid.model import Hybrid
from mimo.model.runtime import (
    NO_LABEL,
    DecodeCache,
    LanguageBatch,
    SampleChunks,
    ScanInputs,
    Segments,
    SupportsDecodeCache,
    attend,
    convolve,
    convolve_continued,
    scan_by_row,
    scan_on,
    scan_single,
)

VOCABULARY = 31
ROWS = 23
SIZES: dict[str, Any] = {"vocabulary": VOCABULARY, "hidden": 24, "heads": 6, "kv_heads": 2, "intermediate": 20}
MIXED: dict[str, Any] = {"experts": 4, "experts_per_token": 2}
STATES: dict[str, Any] = {"mamba_heads": 6, "mamba_head_dim": 4, "mamba_groups": 2, "mamba_state": 5, "mamba_chunk": 4}
MODELS: Mapping[str, DecoderConfig | HybridConfig] = {
    "grouped queries": DecoderConfig(**SIZES, layers=2),
    "window": DecoderConfig(**SIZES, layers=2, sliding_window=5),
    "window of itself": DecoderConfig(**SIZES, layers=2, sliding_window=1),
    "grid positions": DecoderConfig(**SIZES, layers=2, mrope_section=(1, 1, 0)),
    "experts": DecoderConfig(**SIZES, **MIXED, layers=3, dense_layers=1, shared_intermediate=7),
    "tied, norms, biases": DecoderConfig(**SIZES, layers=2, tied=True, query_key_norm=True, qkv_bias=True),
    "further tokens": DecoderConfig(**SIZES, layers=2, next_tokens=2),
    "hybrid": HybridConfig(**SIZES, **STATES, **MIXED, pattern="M*E-M"),
    "states alone": HybridConfig(vocabulary=VOCABULARY, hidden=24, **STATES, pattern="MM", mamba_taps=2),
}
CUTS: Mapping[str, Sequence[int]] = {
    "at once": (ROWS,),
    "row by row": (1,) * ROWS,
    "long, then rows": (13,) + (1,) * 10,
    "pieces": (3, 1, 8, 2, 5, 4),
}


def build(config: DecoderConfig | HybridConfig) -> Decoder | Hybrid:
    """Return a model of random weights, whose norms and biases matter too."""
    torch.manual_seed(3)
    model = Decoder(config, Stage()) if isinstance(config, DecoderConfig) else Hybrid(config, Stage())
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.2, 1)
    return model


def sample(grid: bool) -> LanguageBatch:
    """Return a sample of text whose rows 4 to 9 are an image, in a grid of two by three if asked for."""
    tokens = torch.arange(ROWS) * 7 % VOCABULARY
    places = torch.arange(ROWS).unsqueeze(1).repeat(1, 3)
    places[4:10] = torch.tensor([[4, 4 + row // 3, 4 + row % 3] for row in range(6)])
    places[10:] = torch.arange(7, ROWS - 3).unsqueeze(1)
    return LanguageBatch.of(
        tokens,
        torch.full_like(tokens, NO_LABEL),
        torch.arange(ROWS),
        lengths=[ROWS],
        placeholders={"vision": torch.arange(4, 10)},
        grid_positions=places if grid else None,
    )


def pieces(whole: LanguageBatch, cuts: Sequence[int], cache: object) -> Iterator[tuple[LanguageBatch, slice]]:
    """Yield the rows of a sample bit by bit, and which of the image's rows each piece has."""
    stops = torch.tensor([0, *cuts]).cumsum(0).tolist()
    for start, stop in pairwise(stops):
        here = slice(max(start, 4) - 4, max(min(stop, 10), 4) - 4)
        places = whole.grid_positions
        piece = LanguageBatch.of(
            whole.tokens[start:stop],
            whole.labels[start:stop],
            whole.positions[start:stop],
            lengths=[stop - start],
            placeholders={"vision": whole.placeholders["vision"][here] - start},
            grid_positions=None if places is None else places[start:stop],
        )
        yield attrs.evolve(piece, decode_cache=cache), here


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_sample_in_pieces_has_the_logits_of_the_whole(name: str, cuts: str) -> None:
    """With the rows of an image in it, wherever it is cut; and the likeliest tokens are the same."""
    model, whole = build(MODELS[name]), sample(grid=name == "grid positions")
    image = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    expected = model.logits(model(whole, {"vision": image}, None))
    cache = model.new_decode_cache()
    found = [
        model.logits(model(piece, {"vision": image[here]}, None)) for piece, here in pieces(whole, CUTS[cuts], cache)
    ]
    assert cache.seen == (ROWS,)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
    assert torch.cat(found).argmax(1).equal(expected.argmax(1))


Text = tuple[list[int], int]
"""A sample's ids, and how many the cache has read of them."""


def forward(model: Decoder | Hybrid, texts: Sequence[Text], counts: Sequence[int], cache: object) -> list[Tensor]:
    """Return the logits [n, V] of so many more rows of each sample that a cache holds, or begins."""
    ids = [row[seen : seen + count] for (row, seen), count in zip(texts, counts, strict=True)]
    positions = [torch.arange(seen, seen + count) for (_, seen), count in zip(texts, counts, strict=True)]
    tokens = torch.tensor([token for own in ids for token in own])
    batch = LanguageBatch.of(tokens, torch.full_like(tokens, NO_LABEL), torch.cat(positions), lengths=counts)
    batch = attrs.evolve(batch, decode_cache=cache, grid_positions=batch.positions.unsqueeze(1).repeat(1, 3))
    return list(model.logits(model(batch, {}, None)).split(list(counts)))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_sequences_begin_wait_and_end_beside_each_other(name: str) -> None:
    """Each has the logits of its whole sample, whatever runs beside it, waits, takes its place or comes after it."""
    model, cache = build(MODELS[name]), build(MODELS[name]).new_decode_cache()
    generator = torch.Generator().manual_seed(7)
    lengths = (9, 3, 30, 14, 1, 22, 6, 80)
    samples = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    expected = [forward(model, [(ids, 0)], [len(ids)], None)[0] for ids in samples]
    found: list[list[Tensor]] = [[] for _ in samples]
    waiting, running = list(range(len(samples))), list[int]()
    turns = 0
    while waiting or running:
        turns += 1
        begun, waiting = waiting[: 4 - len(running)], waiting[4 - len(running) :]
        left = [lengths[n] - sum(map(len, found[n])) for n in [*running, *begun]]
        if begun and turns % 2:  # those that run wait
            counts = [*(0 for _ in running), *(max(1, rest // 2) for rest in left[len(running) :])]
        else:
            counts = [1 if turns % 5 or index % 2 else min(rest, 3) for index, rest in enumerate(left)]
        running += begun
        texts = [(samples[n], sum(map(len, found[n]))) for n in running]
        for n, logits in zip(running, forward(model, texts, counts, cache), strict=True):
            found[n].append(logits)
        assert cache.seen == tuple(sum(map(len, found[n])) for n in running)
        stay = [index for index, n in enumerate(running) if sum(map(len, found[n])) < lengths[n]]
        if len(stay) > 1 and turns % 3 == 0:
            stay = [stay[-1], *stay[:-1]]
        cache.keep(stay)
        running = [running[index] for index in stay]
    for wanted, parts in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-5, atol=1e-5)


def test_our_language_models_remember_and_others_need_not() -> None:
    """A module without the methods of a decode cache does not support one."""
    assert isinstance(build(MODELS["window"]), SupportsDecodeCache)
    assert not isinstance(torch.nn.Linear(1, 1), SupportsDecodeCache)


@torch.no_grad()
def test_what_is_kept_follows_from_what_is_looked_at() -> None:
    """A window keeps itself, states stay of one size, other attention keeps all rows, in room for twice as many."""
    held: dict[str, list[int]] = {}
    for name in ("window", "states alone", "grouped queries"):
        model = build(MODELS[name])
        cache = model.new_decode_cache()
        held[name] = []
        for start in range(0, 800, 50):
            tokens = torch.arange(50) % VOCABULARY
            labels = torch.full((50,), NO_LABEL)
            batch = LanguageBatch.of(tokens, labels, torch.arange(start, start + 50), lengths=[50])
            model(attrs.evolve(batch, decode_cache=cache), {}, None)
            held[name].append(cache.bytes)
    each = 2 * 2 * 2 * 4 * 4  # keys and values, layers, heads, columns, bytes
    assert set(held["window"]) == {5 * each}
    assert len(set(held["states alone"])) == 1
    assert all(50 * n * each <= size <= max(64, 100 * n) * each for n, size in enumerate(held["grouped queries"], 1))


def test_what_ends_gives_its_room_to_what_begins() -> None:
    """However many sequences come one after the other, there is room for as many as ran at once."""
    cache = DecodeCache()
    layer = cache.layer("0")

    def read(*lengths: int) -> None:
        cache.begin(lengths, torch.device("cpu"))
        layer.extend("key", torch.zeros(sum(lengths), 2, 4))
        cache.end()

    read(30, 30, 30)
    for _ in range(9):
        for _ in range(8):
            read(1, 1, 1)
        cache.keep([2, 1])  # the last one takes the place of the first
        read(0, 0, 30)
        cache.keep([1, 0, 2])
    assert max(cache.seen) > 40
    assert cache.bytes == 3 * 64 * 2 * 4 * 4


def test_a_scan_continues_from_its_state() -> None:
    """By chunks or by one row: what the recurrence over all rows reads, and leaves."""
    generator = torch.Generator().manual_seed(2)
    rows, heads, width, state = 19, 6, 3, 5

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, b, c, skip = draw(rows, heads, width), draw(rows, 2, state), draw(rows, 2, state), draw(heads)
    steps, rates = draw(rows, heads).exp(), -draw(heads).exp()
    inputs = ScanInputs(x=x, steps=steps, rates=rates, b=b, c=c, skip=skip)
    expected, after = scan_by_row(inputs, SampleChunks.of((rows,), chunk=4))
    found, last, at = [], None, 0
    for count in (1, 6, 1, 8, 3):
        here = slice(at, at + count)
        chunks = SampleChunks.of((count,), chunk=4, before=at)
        piece = attrs.evolve(inputs, x=x[here], steps=steps[here], b=b[here], c=c[here])
        y, last = scan_on(piece, chunks, last)
        found.append(y)
        at += count
    torch.testing.assert_close(torch.cat(found), expected)
    torch.testing.assert_close(last, after)
    assert after.shape == (heads, width, state)


def test_one_more_row_of_each_scan() -> None:
    """At once for all samples: what the recurrence of each reads, and leaves."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = {"x": draw(3, 6, 4), "b": draw(3, 2, 5), "c": draw(3, 2, 5), "skip": draw(6)}
    inputs = ScanInputs(**given, steps=draw(3, 6).exp(), rates=-draw(6).exp())
    states = draw(3, 6, 4, 5)
    found, after = scan_single(inputs, states)
    for row in range(3):
        own = {name: getattr(inputs, name)[row : row + 1] for name in ("x", "steps", "b", "c")}
        chunks = SampleChunks.of((1,), chunk=4, before=8)
        y, last = scan_by_row(attrs.evolve(inputs, **own), chunks, states[row])
        torch.testing.assert_close(found[row : row + 1], y)
        torch.testing.assert_close(after[row], last)


def test_a_convolution_continues_from_the_last_rows() -> None:
    """Those that its cache puts before new ones, zeros before the first, of each sequence its own."""
    generator = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((12, 6), (6, 4), (6,)))
    expected = convolve(x, weight, bias, SampleChunks.of((12,), chunk=4))
    cache = DecodeCache()
    parts: list[Tensor] = []
    other = torch.full((1, 6), 9.0)
    for part in x.split((1, 2, 6, 3)):
        cache.begin((1, len(part)), torch.device("cpu"))
        runs = list(cache.layer("0").follow("x", torch.cat((other, part)), 3))
        rows = torch.cat([convolve_continued(seen, weight, bias).flatten(0, 1) for seen in runs])
        parts.append(rows[1:])
        cache.end()
    torch.testing.assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize(
    ("before", "rows"), [((0,), (1,)), ((0, 7), (9, 2)), ((6, 3, 0), (1, 0, 3)), ((6, 0, 40), (2, 5, 33))]
)
def test_attention_of_the_last_rows_is_that_of_all(window: int, before: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """They look at keys of theirs that came before them, and a window at no others; samples without rows have none."""
    generator = torch.Generator().manual_seed(5)
    held = [earlier + own if own else 0 for earlier, own in zip(before, rows, strict=True)]
    query, key, value = (
        torch.randn(sum(held), heads, 8, generator=generator, dtype=torch.float64) for heads in (6, 2, 2)
    )
    here = torch.cat([torch.arange(own) >= own - count for own, count in zip(held, rows, strict=True)])
    whole = attend(query, key, value, Segments.of(held, causal=True, window=window))
    last = attend(query[here], key, value, Segments.continued(rows, before=before, window=window))
    torch.testing.assert_close(last, whole[here])


@pytest.mark.parametrize("extra", [{}, {"soft_cap": 3.0}, {"sinks": torch.arange(6.0)}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("heads", [None, (0, 0, 1, 1, 1, 1)])
@pytest.mark.parametrize("window", [0, 3])
def test_attention_of_single_rows_is_that_of_the_last(
    window: int, heads: tuple[int, ...] | None, extra: dict[str, Any]
) -> None:
    """Whatever lies in the room behind their keys."""
    held, room = (5, 1, 9), 9
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(3, 6, 8, generator=generator)
    key, value = (torch.randn(3, 2, room, 8, generator=generator) for _ in range(2))
    segments = Segments.single_rows(held, keys=room, window=window)
    found = attend(query, key, value, segments, heads=heads, **extra)
    for row, count in enumerate(held):
        own = Segments.continued([1], before=[count - 1], window=window)
        keys, values = key[row, :, :count].transpose(0, 1), value[row, :, :count].transpose(0, 1)
        torch.testing.assert_close(
            found[row : row + 1], attend(query[row : row + 1], keys, values, own, heads=heads, **extra)
        )


def test_a_cache_takes_rows_of_its_sequences_alone() -> None:
    """Not of fewer than it holds, nor padding; and it is of the model that made it."""
    ids = torch.zeros(4, dtype=torch.long)
    batch = LanguageBatch.of(ids, ids, ids, lengths=[4])
    with pytest.raises(AssertionError, match="rows of 1 sequences, of 2 that are cached"):
        DecodeCache.of(attrs.evolve(batch, decode_cache=DecodeCache(seen=(1, 1))))
    with pytest.raises(AssertionError, match="without padding"):
        DecodeCache.of(attrs.evolve(batch, lengths=(3,), decode_cache=DecodeCache()))
    with pytest.raises(AssertionError, match=r"rows 2 \.\. 6 of a sequence, which cut its item of rows \(1, 3\)"):
        DecodeCache.of(attrs.evolve(batch, decode_cache=DecodeCache(seen=(2,))), items=[[(1, 3)]])
    with pytest.raises(AssertionError, match="made by another model"):
        DecodeCache.of(attrs.evolve(batch, decode_cache=cast("Any", object())))

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
    LayerCache,
    SampleChunks,
    ScanInputs,
    Segments,
    SupportsDecodeCache,
    attend,
    convolve,
    convolve_continued,
    scan_by_row,
    scan_on,
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
    assert cache.seen == ROWS
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
    assert torch.cat(found).argmax(1).equal(expected.argmax(1))


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
    assert max(held["window"]) <= 128 * each
    assert len(set(held["states alone"])) == 1
    assert all(50 * n * each <= size <= max(64, 100 * n) * each for n, size in enumerate(held["grouped queries"], 1))


@pytest.mark.parametrize("most", [None, 0, 1, 4, 90])
def test_rows_that_are_kept_are_the_last_ones(most: int | None) -> None:
    """Whatever comes at once, and wherever room ends."""
    cache, came = LayerCache(most), torch.empty(0)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, 70, 1, 1, 200, 5, *(1,) * 300):
        new = torch.rand(count, generator=generator)
        before = came if most is None else came[len(came) - min(most, len(came)) :]
        assert cache.extend("key", new).equal(torch.cat((before, new)))
        came = torch.cat((came, new))


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


def test_a_convolution_continues_from_the_last_rows() -> None:
    """Those that its cache puts before new ones, zeros before the first."""
    generator = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((12, 6), (6, 4), (6,)))
    expected = convolve(x, weight, bias, SampleChunks.of((12,), chunk=4))
    cache = LayerCache()
    parts = [convolve_continued(cache.follow("x", part, 3), weight, bias) for part in x.split((1, 2, 6, 3))]
    torch.testing.assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize(("before", "rows"), [(0, 1), (0, 9), (6, 1), (6, 2), (2, 9)])
def test_attention_of_the_last_rows_is_that_of_all(window: int, before: int, rows: int) -> None:
    """They look at keys that came before them, and a window at no others."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(before + rows, heads, 8, generator=generator, dtype=torch.float64) for heads in (6, 2, 2)
    )
    whole = attend(query, key, value, Segments.of([before + rows], causal=True, window=window))
    last = attend(query[before:], key, value, Segments.continued(rows, before=before, window=window))
    torch.testing.assert_close(last, whole[before:])


def test_rows_of_several_samples_are_not_one_that_continues() -> None:
    """A cache is of one sample, and of the model that made it."""
    ids = torch.zeros(4, dtype=torch.long)
    batch = LanguageBatch.of(ids, ids, ids, lengths=[2, 2])
    with pytest.raises(AssertionError, match="rows of one sample"):
        DecodeCache.of(attrs.evolve(batch, decode_cache=DecodeCache()))
    with pytest.raises(AssertionError, match="made by another model"):
        DecodeCache.of(attrs.evolve(batch, decode_cache=cast("Any", object())))

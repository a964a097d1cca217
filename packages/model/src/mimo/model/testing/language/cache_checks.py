"""What generation rests on: samples read in pieces, with a decode cache, have the rows of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from mimo.model.language import NO_LABEL, LanguageBatch, SupportsDecodeCache
from mimo.model.testing.checks import SkippedError
from mimo.model.testing.compare import compare_rows
from mimo.model.testing.language.samples import Microbatch, Sample
from mimo.model.testing.language.subject import LanguageSubject

_CUT = 3
"""Rows of a sample that are read before the others come one by one; no item has some of them alone."""
_TURNS = (
    ((1, 1),),
    ((1, 0), (0, 3), (2, 3)),  # two with items begin while one waits
    ((1, 1), (0, 1), (2, 1)),
    ((2, 1), (0, 2)),  # one has ended, and the last has its place
    ((0, 1), (1, 3)),  # another begins beside one that continues
)
"""How several samples are read: in each forward the sequences, by the number of the sample, with rows of each."""


@torch.no_grad()
def check_cache(subject: LanguageSubject) -> None:
    """Samples read in pieces, with a decode cache, have the rows of the whole, alone and beside others."""
    # No piece ends in an item where rows of one see each other.
    built, samples = subject.build(), subject.samples()
    if not isinstance(built.parts[0].module, SupportsDecodeCache):
        raise SkippedError("the module has no new_decode_cache")
    wholes = [built.run(subject.pack([sample])) for sample in samples]
    sample, length = samples[0], len(samples[0])
    single = () if subject.reads_items else ((1,) * length,)
    for cuts in (*single, (_CUT, *(1,) * (length - _CUT)), (1, length - 1), (length,)):
        cache, found, start = built.parts[0].module.new_decode_cache(), list[Tensor](), 0
        for count in cuts:
            found.append(built.run(_pieces(subject, [(sample, start, start + count)]), cache=cache))
            start += count
        compare_rows(torch.cat(found), wholes[0], f"rows of a sample in pieces of {cuts}", "those of the whole")
    cache, read = built.parts[0].module.new_decode_cache(), dict[int, int]()
    for turn in _TURNS:
        running = list(read)
        cache.keep([running.index(number) for number, _ in turn if number in read])
        spans = {number: (read.get(number, 0), read.get(number, 0) + count) for number, count in turn}
        rows = built.run(_pieces(subject, [(samples[number], *span) for number, span in spans.items()]), cache=cache)
        whole = torch.cat([wholes[number][start:stop] for number, (start, stop) in spans.items()])
        compare_rows(rows, whole, "rows of a sample beside others", "those of the whole")
        read = {number: stop for number, (_, stop) in spans.items()}


def _pieces(subject: LanguageSubject, pieces: Sequence[tuple[Sample, int, int]]) -> Microbatch:
    """Return some rows of samples, from one of each to another, as they continue what a decode cache has read."""
    whole = subject.pack([sample for sample, _, _ in pieces])
    batch, grid = whole.batch, whole.batch.grid_positions
    taken, first = list[Tensor](), 0
    for sample, start, stop in pieces:
        taken.append(torch.arange(first + start, first + stop))
        first += len(sample)
    index = torch.cat(taken)
    place = torch.full((len(batch.tokens),), -1)
    place[index] = torch.arange(len(index))
    here = {name: place[own] >= 0 for name, own in batch.placeholders.items()}
    piece = LanguageBatch.of(
        batch.tokens[index],
        torch.full((len(index),), NO_LABEL),
        batch.positions[index],
        lengths=[stop - start for _, start, stop in pieces],
        placeholders={name: place[own[here[name]]] for name, own in batch.placeholders.items()},
        grid_positions=None if grid is None else grid[index],
        items=batch.items,
    )
    rows = {name: own[here[name]] for name, own in whole.rows.items()}
    return attrs.evolve(whole, batch=piece, rows=rows)

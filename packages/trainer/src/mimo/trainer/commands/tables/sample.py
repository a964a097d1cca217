"""The table of one sample: its tokens in runs that are read, learnt, or the rows of an item."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mimo.data import NO_LABEL, Dataset, SampleLayout, sizes_of
from mimo.hooks import plain_text
from mimo.trainer.job.job import Job


def show_sample(job: Job, dataset: Dataset, sample: int, *, ids: bool) -> Iterator[RenderableType]:
    """Yield a line on a sample, and the table of its tokens.

    Args:
        job: whose tokenizer, encoders and limit hold.
        dataset: of the sample.
        sample: its number.
        ids: whether to show the ids of text.

    Raises:
        DataError: the sample can't be read.
    """
    layout = job.lay_out(dataset, sample)
    rows = sum(item.rows for item in layout.items)
    known = sizes_of(dataset, [sample])
    source = "headers" if known is None else "the index"
    broken = ", broken and left out" if known is not None and known.broken[0] else ""
    cut = f", cut at data.max_tokens = {job.settings.data.max_tokens}" if layout.truncated else ""
    yield Text(
        f"sample {sample} of {len(dataset)}, {plain_text(dataset.where(sample))}: {len(layout.tokens)} tokens, "
        f"{np.count_nonzero(layout.targets)} learnt, {len(layout.items)} items in {rows} rows{cut}{broken}; "
        f"sizes from {source}"
    )
    table = Table("tokens", "", "weight", "text", *(["ids"] if ids else []), box=None, pad_edge=False)
    items = {begin: item for item in layout.items for begin, end in item.runs if begin < end}
    for begin, end, weight in _runs(layout):
        place = f"{begin}-{end - 1}" if end - begin > 1 else str(begin)
        if begin in items:
            info = items[begin].info
            size = " x ".join(map(str, info.size))
            table.add_row(place, info.modality, "", f"{size}: {end - begin} rows", style="cyan")
            continue
        piece = layout.tokens[begin:end].tolist()
        text = Text(plain_text(job.tokenizer.decode(piece)))
        shown = [" ".join(map(str, piece))] if ids else []
        if weight:
            table.add_row(place, "learnt", f"{weight:g}", text, *shown, style="bold green")
        else:
            table.add_row(place, "read", "", text, *shown)
    yield table


def _runs(layout: SampleLayout) -> Iterator[tuple[int, int, float]]:
    """Yield begin and end of the tokens that belong together, and how much each of them is learnt."""
    weights = _token_weights(layout)
    owners = np.full(len(layout.tokens), -1)
    for number, item in enumerate(layout.items):
        for begin, end in item.runs:
            owners[begin:end] = number
    begin = 0
    for (_, weight), run in groupby(zip(owners.tolist(), weights.tolist(), strict=True)):
        end = begin + len(list(run))
        yield begin, end, weight
        begin = end


def _token_weights(layout: SampleLayout) -> NDArray[np.float32]:
    """Return [S], how much each token is learnt: what the row before it has as its label's weight."""
    labels = (layout.labels != NO_LABEL).astype(np.float32) if layout.weights is None else layout.weights
    return np.concatenate([np.zeros(1, dtype=np.float32), labels])[: len(labels)]

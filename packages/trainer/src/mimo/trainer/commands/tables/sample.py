"""The table of one sample: its tokens in runs that are read, learnt, the rows of an item, or call for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mimo.data import NO_LABEL, Dataset, PlacedItem, SampleLayout, Tokenizer, sizes_of
from mimo.hooks import plain_text
from mimo.trainer.job.job import Job
from mimo.trainer.job.measured_dataset import encodes

_END = "[end]"


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
    made = sum(item.asked is not None for item in layout.items)
    makes = f", {made} of them made" if made else ""
    known = sizes_of(dataset, [sample])
    source = "headers" if known is None else "the index"
    is_broken = known is not None and bool(known.broken[0])
    broken = ", broken and left out" if is_broken else ""
    kept = "" if is_broken or encodes(dataset, sample) else " and ids"
    cut = f", cut at data.max_tokens = {job.settings.data.max_tokens}" if layout.truncated else ""
    yield Text(
        f"sample {sample} of {len(dataset)}, {plain_text(dataset.where(sample))}: {len(layout.tokens)} tokens, "
        f"{np.count_nonzero(layout.targets)} learnt, {len(layout.items)} items in {rows} rows{makes}{cut}{broken}; "
        f"sizes{kept} from {source}"
    )
    table = Table("tokens", "", "weight", "text", *(["ids"] if ids else []), box=None, pad_edge=False)
    items = {begin: item for item in layout.items for begin, end in _spans(item) if begin < end}
    for begin, end, weight in _runs(layout):
        place = _place(begin, end)
        learnt = f"{weight:g}" if weight else ""
        style = "bold green" if learnt else ""
        if begin in items:
            item = items[begin]
            size = " x ".join(map(str, item.info.size))
            what = f"{end - begin} rows"
            if item.made_from is not None and (begin, end) == item.asked:
                what = f"made from {_place(*item.made_from)}"
            table.add_row(
                place, item.info.modality, learnt, ": ".join(filter(None, (size, what))), style=style or "cyan"
            )
            continue
        piece = layout.tokens[begin:end].tolist()
        text = Text(plain_text(_text(job.tokenizer, piece)))
        shown = [" ".join(map(str, piece))] if ids else []
        table.add_row(place, "learnt" if learnt else "read", learnt, text, *shown, style=style)
    yield table


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of tokens with the end, which decoding leaves out, as ``[end]``."""
    runs = groupby(ids, lambda number: number == tokenizer.end)
    return "".join(_END * len(list(run)) if is_end else tokenizer.decode(list(run)) for is_end, run in runs)


def _place(begin: int, end: int) -> str:
    """Return the positions of some tokens."""
    if begin == end:
        return "nothing"
    return f"{begin}-{end - 1}" if end - begin > 1 else str(begin)


def _spans(item: PlacedItem) -> Sequence[tuple[int, int]]:
    """Return begin and end of what an item is in its sample: what calls for it, and each run of its rows."""
    return item.runs if item.asked is None else (item.asked, *item.runs)


def _runs(layout: SampleLayout) -> Iterator[tuple[int, int, float]]:
    """Yield begin and end of the tokens that belong together, and how much each of them is learnt."""
    weights = _token_weights(layout)
    owners = np.full(len(layout.tokens), -1)
    for number, (begin, end) in enumerate(span for item in layout.items for span in _spans(item)):
        owners[begin:end] = number
        weights[begin:end] = weights[begin : begin + 1]  # all that calls for an item is learnt by its first row
    begin = 0
    for (_, weight), run in groupby(zip(owners.tolist(), weights.tolist(), strict=True)):
        end = begin + len(list(run))
        yield begin, end, weight
        begin = end


def _token_weights(layout: SampleLayout) -> NDArray[np.float32]:
    """Return [S], how much each token is learnt: what the row before it has as its label's weight."""
    labels = (layout.labels != NO_LABEL).astype(np.float32) if layout.weights is None else layout.weights
    return np.concatenate([np.zeros(1, dtype=np.float32), labels])[: len(labels)]

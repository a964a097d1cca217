"""What `mimo data index` prints: counts, percentiles, histograms, and what is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mimo.data import Dataset, origin_of, sources_of
from mimo.hooks import plain_text
from mimo.trainer.commands.indexing.statistics import Distribution, Statistics
from mimo.trainer.job.measured_dataset import MeasuredDataset
from mimo.trainer.job.sample_index import index_path

_PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_BINS = 12
_BAR = 40
_BROKEN = 10


def show_statistics(statistics: Statistics, max_tokens: int) -> Iterator[RenderableType]:
    """Yield counts, percentiles, and a histogram of each of `Statistics.distributions`."""
    tokens = statistics.tokens
    summary = Table(box=None, show_header=False, pad_edge=False)
    summary.add_row("samples", f"{statistics.samples:,}, {statistics.broken:,} of them broken")
    learnt = f"{statistics.targets:,} learnt"
    weighed = "" if statistics.weight == statistics.targets else f", of weight {statistics.weight:,.6g}"
    summary.add_row("tokens", f"{tokens.total:,}, {learnt}{weighed}")
    for name, items in statistics.items.items():
        summary.add_row(name, f"{items.rows.count:,} items, {items.kept_rows:,} rows, {items.cut:,} items cut off")
    for name, made in statistics.made.items():
        count = made.losses.count
        summary.add_row(
            f"{name}, made",
            f"{count:,} items, {made.asked:,} rows, {made.losses.total:,} losses, {made.cut:,} items cut off",
        )
    summary.add_row("cut", f"{statistics.cut:,} samples at data.max_tokens = {max_tokens:,}")
    yield summary
    shown = statistics.distributions()
    if not shown:
        return
    yield Text()
    table = Table("percentile", *(_percent(each) for each in _PERCENTILES), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, each in shown.items():
        table.add_row(name, *(f"{each.percentile(percent):,}" for percent in _PERCENTILES))
    yield table
    for name, each in shown.items():
        yield Text()
        yield Text(name)
        yield _histogram(each)


def show_index(dataset: Dataset) -> Iterator[str]:
    """Yield in a line what the index of each source of a dataset says, if it has one."""
    known = dataset.known if isinstance(dataset, MeasuredDataset) else None
    if known is None:
        return
    for (name, source), index in zip(sources_of(dataset), known.parts, strict=True):
        if index is None:
            yield f"{name}: none"
            continue
        found = Statistics.of(index.sizes)
        items = "".join(f", {each.rows.count:,} {modality} items" for modality, each in found.items.items())
        items += "".join(f", {each.losses.count:,} {modality} items to make" for modality, each in found.made.items())
        origin = origin_of(source)
        place = "" if origin is None else f" ({index_path(origin)})"
        yield (
            f"{found.tokens.total:,} tokens, {found.targets:,} learnt{items}, {found.cut:,} samples cut, "
            f"{found.broken:,} broken{place}"
        )


def show_broken(path: Path, count: int) -> Iterator[RenderableType]:
    """Yield the first of what a file says is broken, and where the rest is."""
    table = Table("broken", "item", "what is wrong", box=None, pad_edge=False)
    with path.open(encoding="utf-8") as lines:
        for line in islice(lines, _BROKEN):
            found = json.loads(line)
            table.add_row(*(Text(plain_text(found[key])) for key in ("where", "item", "reason")))
    yield table
    yield Text(f"{count:,} broken samples; {plain_text(str(path))} has all that is wrong, a line of JSON each")


def _histogram(distribution: Distribution) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    bins = list(distribution.bins(_BINS))
    most = max(count for _, _, count in bins)
    for first, last, count in bins:
        span = f"{first:,}-{last:,}" if first < last else f"{first:,}"
        bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
        table.add_row(span, bar, f"{count:,}")
    return table


def _percent(percent: int) -> str:
    return {0: "least", 50: "median", 100: "most"}.get(percent, f"{percent}%")

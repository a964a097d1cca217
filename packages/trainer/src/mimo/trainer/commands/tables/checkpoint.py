"""What `mimo checkpoint` prints: a checkpoint's modules, tensors, values and settings, and what differs between two."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mimo.hooks import plain_text
from mimo.topology import AXES, show_ranks
from mimo.trainer.commands.tables.memory import show_bytes
from mimo.trainer.config.names import OPTIMIZER

if TYPE_CHECKING:
    from mimo.checkpoint import Differences, Manifest, TensorEntry


def show_manifest(console: Console, folder: Path, manifest: Manifest) -> None:
    """Print what a checkpoint holds: where it comes from, its modules, each tensor and value, and its settings."""
    count, size = sum(map(_elements, manifest.tensors.values())), sum(map(_bytes, manifest.tensors.values()))
    console.print(
        f"{plain_text(str(folder))}: step {manifest.step}, {len(manifest.tensors)} tensors of {count:,} elements "
        f"in {len(manifest.shards)} shards, {show_bytes(size)}",
        markup=False,
    )
    _print(console, ("module", "tensors", "elements", "size", "optimizer state", "ranks", *AXES), _modules(manifest))
    _print(
        console,
        ("tensor", "type", "shape", "pieces"),
        (
            (name, entry.dtype, " x ".join(map(str, entry.shape)) or "-", str(len(entry.pieces)))
            for name, entry in sorted(manifest.tensors.items())
        ),
    )
    values = [(name, "all", repr(value)) for name, value in sorted(manifest.common.items())]
    values += [(name, owned.module, repr(owned.value)) for name, owned in sorted(manifest.owned.items())]
    _print(console, ("value", "of", "content"), values)
    _print(console, ("setting", "saved with"), _settings(manifest.config))


def show_differences(console: Console, first: Path, second: Path, found: Differences) -> None:
    """Print what differs between two checkpoints."""
    both = plain_text(f"{first} and {second}")
    if not found:
        console.print(f"{both}: the same names, elements and values", soft_wrap=True, markup=False)
        return
    console.print(f"{both} differ", soft_wrap=True, markup=False)
    _print(console, ("only in the first",), ((name,) for name in found.only_first))
    _print(console, ("only in the second",), ((name,) for name in found.only_second))
    _print(console, ("entry", "first", "second"), ((one.path, one.first, one.second) for one in found.kinds))
    _print(
        console,
        ("tensor", "elements that differ", "of", "by at most", "relative"),
        (
            (one.name, f"{one.differing:,}", f"{one.elements:,}", f"{one.absolute:.3g}", f"{one.relative:.3g}")
            for one in found.tensors
        ),
    )
    _print(console, ("value", "first", "second"), ((one.path, one.first, one.second) for one in found.values))


def _print(console: Console, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table after an empty line, if it has any row."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain_text(cell)) for cell in row))
    if table.row_count:
        console.print()
        console.print(table)


def _modules(manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """Yield a row for each module of the topology that saved, and one for tensors of no module."""
    groups: dict[tuple[str, bool], list[TensorEntry]] = {}
    for name, entry in manifest.tensors.items():
        first, _, rest = name.partition(".")
        is_state = first == OPTIMIZER
        owner = rest.partition(".")[0] if is_state else first
        groups.setdefault((owner if owner in manifest.topology else "", is_state), []).append(entry)
    for owner in (*manifest.topology, ""):
        own, state = groups.get((owner, False), []), groups.get((owner, True), [])
        if not owner and not own and not state:
            continue
        grid = manifest.topology.get(owner)
        yield (
            owner or "-",
            str(len(own)),
            f"{sum(map(_elements, own)):,}",
            show_bytes(sum(map(_bytes, own))),
            show_bytes(sum(map(_bytes, state))) if state else "-",
            *_layout(grid),
        )


def _layout(grid: Any) -> Iterator[str]:
    known = grid if isinstance(grid, dict) else {}
    ranks = known.get("ranks")
    yield show_ranks(ranks) if isinstance(ranks, list) and all(type(rank) is int for rank in ranks) else "-"
    for axis in AXES:
        yield str(known.get(axis, "-"))


def _settings(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", json.dumps(value)


def _elements(entry: TensorEntry) -> int:
    return math.prod(entry.shape)


def _bytes(entry: TensorEntry) -> int:
    return sum(piece.end - piece.begin for piece in entry.pieces)

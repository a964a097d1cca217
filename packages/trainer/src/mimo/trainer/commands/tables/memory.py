"""Tables of `mimo check` of the memory of ranks and machines, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from mimo.topology import show_ranks

if TYPE_CHECKING:
    from mimo.trainer.cost.memory import RankMemory

_MEBIBYTE = 2**20


def show_bytes(count: int) -> str:
    """Return a number of bytes in MiB."""
    return f"{count / _MEBIBYTE:,.1f} MiB"


def show_on_device(memory: RankMemory) -> str:
    """Return in words what lies on the device."""
    return f"{'at most' if memory.at_most else 'about'} {show_bytes(memory.device)}"


def show_memory(memory: Mapping[int, RankMemory], world: int, machine: int) -> Iterator[Table | Text]:
    """Yield what ranks hold by kind, and what their machines hold; those that hold the same stand together.

    Args:
        memory: by rank.
        world: number of processes.
        machine: processes of a machine.
    """
    hosts, ahead = any(one.host for one in memory.values()), any(one.ahead for one in memory.values())
    kinds = (
        *("weights", "gathered", "gradients", "optimizer", "activations"),
        *(["made ahead"] if ahead else []),
        "on the device",
        *(["in host memory"] if hosts else []),
    )
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, one in memory.items():
        counts = (
            *(one.weights, one.gathered, one.gradients, one.state, one.activations),
            *([one.ahead] if ahead else []),
            one.device,
            *([one.host] if hosts else []),
        )
        rows.setdefault(tuple(map(show_bytes, counts)), []).append(rank)
    yield _table(("ranks",), kinds, ((show_ranks(ranks), *cells) for cells, ranks in rows.items()))
    if any(one.at_most for one in memory.values()):
        yield Text("The run finds by trial what of the optimizer lies where: each of both is the most that it can be.")
    if hosts:
        yield _machines(memory, world, machine)


def _machines(memory: Mapping[int, RankMemory], world: int, each: int) -> Table:
    machines: dict[str, list[range]] = {}
    for first in range(0, world, each):
        ranks = range(first, min(first + each, world))
        held = sum(memory[rank].host for rank in ranks if rank in memory)
        machines.setdefault(show_bytes(held), []).append(ranks)
    rows = (
        (str(len(found)), show_ranks([rank for ranks in found for rank in ranks]), held)
        for held, found in machines.items()
    )
    return _table(("machines", "ranks"), ("host memory of each",), rows)


def _table(words: Iterable[str], numbers: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in words:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table

"""The table of `mimo check` of parameters and operations, by module and part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from mimo.trainer.cost.module_stats import ModuleStats

_TERA = 1e12


def show_module_stats(stats: Sequence[ModuleStats]) -> Table:
    """Return a table of parameters and operations by part, operations in units of 10^12."""
    table = Table(box=None, pad_edge=False)
    for heading in ("module", "part"):
        table.add_column(heading)
    for heading in ("parameters", "trained", "forward", "backward", "once more"):
        table.add_column(heading, justify="right")
    for one in stats:
        table.add_row(one.module, one.part, *_cells(one))
    table.add_row("all", "", *_cells(sum(stats[1:], stats[0])))
    return table


def _cells(one: ModuleStats) -> tuple[str, ...]:
    operations = (one.forward, one.backward, one.repeated)
    return (f"{one.parameters:,}", f"{one.trained:,}", *(f"{each / _TERA:,.4g}" for each in operations))

"""Tables of published families: which plugins read them, and along which axes they can be split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mimo.hooks import plain_text
from mimo.trainer.convert.families import ReadFamily, TriedFamily, axes_in_words


def show_families(families: Sequence[ReadFamily]) -> Iterator[RenderableType]:
    """Yield the table of families that can be trained or have yet to be tried, and lines on the others."""
    table = Table("model_type", "plugin", "as", "axes", "as in the library", box=None, pad_edge=False)
    for one in families:
        if one.problem:
            continue
        plugin = one.plugin if one.first else f"--plugin {one.plugin}"
        axes = "tried when it is built" if one.axes is None else axes_in_words(one.axes)
        table.add_row(one.model_type, plugin, one.part, axes, one.tested.version if one.tested else "not recorded")
    yield table
    if open_plugins := sorted({one.plugin for one in families if not one.named}):
        yield Text(
            f"\n{' and '.join(open_plugins)} read any family that a trial passes, on a small model of it and by its "
            "config; above is what was recorded of the library's own. `mimo models MODEL_TYPE` tries one now."
        )
    for plugin in open_plugins:
        refused = [one.model_type for one in families if one.plugin == plugin and one.problem]
        if refused:
            yield Text(f"\n{plugin} refuses {len(refused)}: {', '.join(refused)}")


def show_trials(trials: Sequence[TriedFamily]) -> Iterator[RenderableType]:
    """Yield what was tried of one family, a table a plugin."""
    for trial in trials:
        read = trial.read
        how = "" if read.first else f", by --plugin {read.plugin}"
        recorded = f"; recorded as in the library: {read.tested.version}" if read.tested and not read.problem else ""
        yield Text(f"{read.model_type}: {read.plugin}, {read.part}{how}{recorded}", style="bold")
        if trial.problem:
            yield Text(f"  can't be trained: {plain_text(trial.problem)}")
            continue
        table = Table("axis", "", "why not", box=None, pad_edge=False)
        table.add_row("dp", "yes", "")
        for axis, reason in trial.refused.items():
            table.add_row(axis, "no" if reason else "yes", plain_text(reason))
        yield table

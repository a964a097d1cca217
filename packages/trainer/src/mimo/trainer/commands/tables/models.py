"""Tables of published families: which plugins read them, and along which axes they can be split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mimo.hooks import plain_text
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.published.families import ReadFamily, TriedFamily, axes_in_words


def show_families(families: Sequence[ReadFamily]) -> Iterator[RenderableType]:
    """Yield the table of families that can be trained as far as is known, and lines on the others."""
    table = Table("model_type", "plugin", "as", "axes", "as in the library", box=None, pad_edge=False)
    for one in families:
        if one.problem or one.axes is None:
            continue
        plugin = _plugins(one) if one.first else f"--plugin {one.plugin}"
        tested = one.tested.version if one.tested else "not recorded"
        table.add_row(one.model_type, plugin, _parts(one), axes_in_words(one.axes), tested)
    yield table
    if open_plugins := sorted({one.plugin for one in families if not one.named}):
        yield Text(
            f"\n{' and '.join(open_plugins)} read any family that a trial passes, on a small model of it and by its "
            "config; above is what was recorded of the library's own. `mimo models MODEL_TYPE` tries one now, "
            "`mimo models DIR` those of a published folder."
        )
    if whole := sorted({one.plugin for one in families if one.language}):
        yield Text(
            f"\n{' and '.join(whole)} read whole models: what makes rows of items, of which axes are shown, with the "
            "plugin of the language model behind it."
        )
    for plugin in open_plugins:
        refused = [one.model_type for one in families if one.plugin == plugin and one.problem]
        if refused:
            yield Text(f"\n{plugin} refuses {len(refused)}: {', '.join(refused)}")
        untried = [one.model_type for one in families if one.plugin == plugin and one.axes is None]
        if untried:
            yield Text(
                f"\n{plugin} was never tried with {len(untried)}, and tries one before it is built: "
                f"{', '.join(untried)}"
            )


def show_trials(trials: Sequence[TriedFamily]) -> Iterator[RenderableType]:
    """Yield what was tried of one family, a table a plugin."""
    for trial in trials:
        read = trial.read
        how = "" if read.first or not read.plugin else f", by --plugin {read.plugin}"
        names = f"{_plugins(read)}, {_parts(read)}" if trial.untried else f"{read.plugin or 'no plugin'}, {read.part}"
        recorded = f"; recorded as in the library: {read.tested.version}" if read.tested and not read.problem else ""
        yield Text(f"{read.model_type}: {names}{how}{recorded}", style="bold")
        if trial.untried:
            yield Text(f"  not tried now: {trial.untried}")
        if trial.problem:
            says = "" if trial.untried and read.tested is None else "can't be trained: "
            yield Text(f"  {says}{plain_text(trial.problem)}")
            continue
        table = Table("axis", "", "why not", box=None, pad_edge=False)
        table.add_row("dp", "yes", "")
        for axis, reason in trial.refused.items():
            table.add_row(axis, "no" if reason else "yes", plain_text(reason))
        yield table


def _plugins(read: ReadFamily) -> str:
    return f"{read.plugin} + {read.language}" if read.language else read.plugin


def _parts(read: ReadFamily) -> str:
    return f"{read.part} + {LANGUAGE}" if read.language else read.part

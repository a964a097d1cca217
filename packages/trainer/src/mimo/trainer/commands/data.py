"""``mimo data``: what the model sees of a dataset."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App


def make_data_app() -> App:
    """Return ``mimo data`` with its subcommands."""
    app = App(name="data", help="Look at the samples that a model is trained on.", help_format="plaintext")
    app.command(show)
    return app


def show(
    file: Path, /, *overrides: str, sample: int = 0, count: int = 1, evaluation: bool = False, ids: bool = False
) -> None:
    """Print samples as the model sees them: tokens, what of them is learnt, in colour, and items with their rows.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        sample: number of the first one, from 0.
        count: how many to print.
        evaluation: of the held-out samples instead of those to train on.
        ids: print the tokens' ids too.
    """
    from rich.text import Text

    from mimo.hooks import ConfigError
    from mimo.trainer.commands.tables.console import make_console
    from mimo.trainer.commands.tables.sample import show_sample
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resolving.resolve import resolve

    job = resolve(read_settings(file, overrides))
    dataset = job.evaluation if evaluation else job.train
    if dataset is None:
        raise ConfigError("data", expected="held-out samples" if evaluation else "samples to train on", got="none")
    if count < 1:
        raise ConfigError("--count", expected="1 or more", got=str(count))
    last = sample + count - 1
    if not (0 <= sample <= last < len(dataset)):
        asked = str(sample) if count == 1 else f"{sample} to {last}"
        raise ConfigError("--sample", expected=f"numbers from 0 to {len(dataset) - 1}", got=asked)
    console = make_console()
    for number in range(sample, last + 1):
        for part in show_sample(job, dataset, number, ids=ids):
            console.print(part, soft_wrap=isinstance(part, Text))

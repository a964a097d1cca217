"""``mimo data``: what the model sees of a dataset, an index of it, and shards of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import App, Parameter


def make_data_app() -> App:
    """Return ``mimo data`` with its subcommands."""
    app = App(
        name="data",
        help="Look at samples, index them, and build shards of them.",
        help_format="plaintext",
    )
    app.command(show)
    app.command(index)
    app.command(build)
    return app


def show(
    file: Path, /, *overrides: str, sample: int = 0, count: int = 1, evaluation: bool = False, ids: bool = False
) -> None:
    """Print samples as the model sees them: tokens, what of them is learnt, in colour, and items with their rows.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        sample: number of the first one, from 0.
        count: how many to print at most; those that can't be read are named, and the command ends with 3.
        evaluation: of the held-out samples instead of those to train on.
        ids: print the tokens' ids too.
    """
    from rich.text import Text

    from mimo.hooks import ConfigError, DataError
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
    if not 0 <= sample < len(dataset):
        raise ConfigError("--sample", expected=f"a number from 0 to {len(dataset) - 1}", got=str(sample))
    console = make_console()
    unread: list[DataError] = []
    for number in range(sample, min(sample + count, len(dataset))):
        try:
            for part in show_sample(job, dataset, number, ids=ids):
                console.print(part, soft_wrap=isinstance(part, Text))
        except DataError as error:
            unread.append(error)
            console.print(Text(f"sample {number} of {len(dataset)}, {error}", style="red"), soft_wrap=True)
    if unread:
        raise unread[0]


def index(
    file: Path,
    /,
    *overrides: str,
    decode: Annotated[bool, Parameter(negative="")] = False,
    tokens: Annotated[bool, Parameter(negative="")] = False,
    jobs: int = 0,
    evaluation: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Read texts and headers once, write the sizes of all samples beside the data, and report what is in them.

    Runs then open the data sooner. A command that was ended resumes when it is started again. Ends with 0 where all
    samples are sound, with 3 where some are broken.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        decode: decode and prepare every item, too.
        tokens: keep the tokens' ids, too, so that runs need not encode texts.
        jobs: processes that read; 0: as many as it may use cores.
        evaluation: of the held-out samples instead of those to train on.
    """
    import numpy as np
    from rich.markup import escape
    from rich.progress import Progress

    from mimo.hooks import ConfigError, DataError, count_cores, lifecycle
    from mimo.trainer.commands.indexing.index import index_info, index_sources
    from mimo.trainer.commands.indexing.statistics import Statistics
    from mimo.trainer.commands.tables.console import make_console
    from mimo.trainer.commands.tables.data_index import show_broken, show_statistics
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.run.end import report_failures

    if jobs < 0:
        raise ConfigError("--jobs", expected="0 or more", got=str(jobs))
    job = resolve(read_settings(file, overrides), purpose="evaluate" if evaluation else "train", writes_index=True)
    cut = attrs.evolve(job.settings.data, longer="cut")  # what becomes of longer samples changes no sizes
    job = attrs.evolve(job, settings=attrs.evolve(job.settings, data=cut))
    dataset = job.evaluation if evaluation else job.train
    assert dataset is not None
    console = make_console()
    plugins = lifecycle()
    broken: dict[str, str] = {}
    with Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def on_progress(name: str, there: int, blocks: int, _broken: int) -> None:
            progress.update(task, description=escape(name), completed=there, total=blocks, refresh=True)

        made = index_sources(
            job, dataset, jobs=jobs or count_cores(), decodes=decode, keeps_tokens=tokens, on_progress=on_progress
        )
        for found in made:
            resumed = f" ({found.resumed} blocks were there from an earlier command)" if found.resumed else ""
            console.print(f"{found.name}: {found.path} written{resumed}", markup=False, soft_wrap=True)
            if found.tokens is not None:
                console.print(f"{found.name}: {found.tokens} written", markup=False, soft_wrap=True)
            statistics = Statistics.of(found.sizes)
            for part in show_statistics(statistics, job.settings.data.max_tokens):
                console.print(part)
            report_failures(plugins.indexed(index_info(found, statistics)))
            if count := int(np.count_nonzero(found.sizes.broken)):
                for part in show_broken(found.broken, count):
                    console.print(part)
                broken[found.name] = f"{count:,} of {len(found.sizes):,} that are broken"
    if broken:
        raise DataError(
            ", ".join(broken),
            expected="samples that can be read",
            got=", ".join(broken.values()),
            fix='Mend them and start the command again, or set data.broken = "skip" to train without them.',
        )


def build(
    source: Path,
    out: Path,
    /,
    *,
    form: Annotated[str, Parameter(name="--format")] = "webdataset",
    shard_bytes: int = 1 << 28,
) -> None:
    """Write samples as shards: a jsonl file with its items, or a folder of items with a text beside each.

    Items are copied unchanged, the same samples give the same files, and a command that was ended resumes when it is
    started again. In a folder, files with one name up to the first dot are a sample: cat.png and cat.txt, or cat.json
    with a record as a line of jsonl has it.

    Args:
        source: the file or the folder.
        out: folder of the shards, made if need be.
        form: dataset plugin that reads them again.
        shard_bytes: of a shard at most, but for one with a single larger sample.
    """
    from mimo.data import DATASETS, read_members
    from mimo.hooks import ConfigError, discover

    spec = discover(DATASETS).find(form, where="--format")
    if spec.build is None:
        raise ConfigError(
            "--format", expected="a dataset plugin that writes shards, such as webdataset", got=repr(form)
        )
    if shard_bytes < 1:
        raise ConfigError("--shard-bytes", expected="1 or more", got=str(shard_bytes))
    paths = spec.build(read_members(source), out, max_bytes=shard_bytes)
    print(f"{out}: {len(paths)} shards of {sum(path.stat().st_size for path in paths):,} bytes, for {form}")

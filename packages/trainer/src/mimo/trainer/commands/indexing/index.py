"""Indexing what a dataset is made of: each source's blocks are read where they are missing, and joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from mimo.data import Dataset, SampleSizes, origin_of, sources_of
from mimo.hooks import ConfigError, DataError, IndexInfo
from mimo.trainer.commands.indexing.blocks import Blocks
from mimo.trainer.commands.indexing.statistics import Statistics
from mimo.trainer.commands.indexing.workers import make_blocks
from mimo.trainer.job.job import Job
from mimo.trainer.job.sample_index import BROKEN, TOKENS, IndexRules, index_path

OnProgress = Callable[[str, int, int, int], None]
"""Called with a source's name, how many of its blocks are there, of how many, and the broken samples just found."""


@attrs.frozen(kw_only=True, eq=False)
class Indexed:
    """A source with its index.

    Args:
        name: of the data.
        path: of the index.
        broken: of the file that says what is broken; it is there only where something is.
        tokens: of the ids; None where they aren't kept.
        sizes: what the index holds.
        resumed: blocks that an earlier command had left.
    """

    name: str
    path: Path
    broken: Path
    tokens: Path | None
    sizes: SampleSizes
    resumed: int


def index_sources(
    job: Job, dataset: Dataset, *, jobs: int, decodes: bool, keeps_tokens: bool, on_progress: OnProgress
) -> Iterator[Indexed]:
    """Make the index of each source of a dataset, and yield it.

    Args:
        job: resolved with ``writes_index``.
        dataset: that of the job to train on, or its held-out one.
        jobs: processes that read.
        decodes: whether items are decoded and prepared by their encoders and generators.
        keeps_tokens: whether the ids of samples are kept, too.
        on_progress: called when a block is there.

    Raises:
        ConfigError: the dataset has no place for an index, or it can't be written; a setting is wrong.
        DataError: the data were changed meanwhile.
    """
    rules = rules_of(job)
    sources = [(name, source, origin_of(source)) for name, source in sources_of(dataset)]
    made: dict[Path, Mapping[str, str]] = {}
    for name, source, origin in sources:
        if origin is None and any(other is not None for _, _, other in sources):
            continue  # its sizes are found as its samples are read
        if origin is None:
            raise ConfigError(
                f"data.sources.{name}.plugin" if name else "data.plugin",
                expected="a dataset that says where its samples come from",
                got=repr(job.settings.data.plugin),
                fix="It needs no index, or its author gives it a method origin().",
            )
        blocks = Blocks(
            job=job,
            dataset=source,
            origin=origin,
            rules=rules,
            about=rules.about(origin),
            decodes=decodes,
            keeps_tokens=keeps_tokens,
        )
        if made.setdefault(blocks.folder, blocks.about) != blocks.about:
            raise ConfigError(
                f"data.sources.{name}.index",
                expected="a folder of its own, as another source reads the same data with other settings",
                got="the same place for both indexes",
                fix=f'Set data.sources.{name}.index = "index-{name}".',
            )
        with blocks.held() as lock:
            missing = blocks.missing()
            there = resumed = len(blocks) - len(missing)
            on_progress(origin.name, there, len(blocks), 0)
            for _, broken in make_blocks(blocks, missing, jobs=jobs, closed=(lock,)):
                there += 1
                on_progress(origin.name, there, len(blocks), broken)
            if rules.about(origin) != blocks.about:
                raise DataError(
                    origin.name,
                    expected="data that stay as they are while they are read",
                    got="others at the end than at the beginning",
                    fix="Start the command again when nobody writes them.",
                )
            sizes = blocks.join()
        yield Indexed(
            name=origin.name,
            path=index_path(origin),
            broken=index_path(origin, BROKEN),
            tokens=index_path(origin, TOKENS) if keeps_tokens else None,
            sizes=sizes,
            resumed=resumed,
        )


def index_info(indexed: Indexed, statistics: Statistics) -> IndexInfo:
    """Return what lifecycle plugins hear of a source with its index."""
    return IndexInfo(
        name=indexed.name,
        path=indexed.path,
        samples=statistics.samples,
        broken=statistics.broken,
        distributions={name: each.pairs() for name, each in statistics.distributions().items()},
    )


def rules_of(job: Job) -> IndexRules:
    """Return what of a job decides sizes."""
    return IndexRules.of(
        job.modules,
        job.tokenizer,
        settings=job.plain["tokenizer"],
        max_tokens=job.settings.data.max_tokens,
    )

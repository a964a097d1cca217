"""One sample, looked at for the index: its sizes, or what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attrs
import numpy as np

from mimo.data import Dataset, SampleSize
from mimo.hooks import DataError, ItemInfo
from mimo.trainer.job.job import Job
from mimo.trainer.job.sample_index import IndexRules

LEFT_OUT = SampleSize(tokens=1, ids=1, targets=0, weight=0.0, broken=True)
"""A sample that is broken, as a run lays it out that skips it."""


@attrs.frozen(kw_only=True)
class Broken:
    """Something that can't be read.

    Args:
        sample: its number.
        where: its place: file or shard, and line or key.
        item: its modality and number, empty where it is the sample itself, or a header.
        reason: what is wrong.
    """

    sample: int
    where: str
    item: str
    reason: str

    @classmethod
    def of(cls, sample: int, error: DataError, item: str = "") -> Broken:
        """Return what an error says."""
        return cls(sample=sample, where=error.where, item=item, reason=f"expected {error.expected}, got {error.got}")

    def line(self) -> bytes:
        """Return it as a line of JSON."""
        return f"{json.dumps(attrs.asdict(self))}\n".encode()


def examine(
    job: Job, dataset: Dataset, sample: int, rules: IndexRules, *, decodes: bool
) -> tuple[SampleSize, tuple[Broken, ...]]:
    """Return the size of a sample, and what of it is broken.

    Args:
        job: whose encoders, generators and limits hold.
        dataset: of the sample, with sizes of all items.
        sample: its number.
        rules: of the job.
        decodes: whether items are decoded and prepared, too.

    Raises:
        UserError: a setting is wrong, so that no sample can be read.
    """
    try:
        layout = job.lay_out(dataset, sample)
        infos = tuple(dataset.infos(sample))
    except DataError as error:
        return LEFT_OUT, (Broken.of(sample, error),)
    if decodes and (broken := tuple(_undecodable(job, dataset, infos, rules))):
        return LEFT_OUT, broken
    kept = {(item.info.modality, item.info.index): item for item in layout.items}
    targets = layout.targets
    return (
        SampleSize(
            tokens=len(layout.tokens),
            ids=len(dataset.tokens(sample)),
            targets=int(np.count_nonzero(targets)),
            weight=float(np.count_nonzero(targets) if layout.weights is None else layout.weights.sum(dtype=np.float64)),
            cut=layout.truncated,
            items=tuple(rules.size_of(info, kept.get((info.modality, info.index))) for info in infos),
        ),
        (),
    )


def _undecodable(job: Job, dataset: Dataset, infos: tuple[ItemInfo, ...], rules: IndexRules) -> Iterator[Broken]:
    from mimo.trainer.items.prepared import prepare_item  # loads torch, which nothing else here needs

    readers, makers = ({one.modality: one for one in some} for some in (job.encoders_of(job.language), job.generators))
    for info in infos:
        modules = zip((readers, makers), rules.uses(info), strict=True)
        try:
            for module in [found[info.modality] for found, is_used in modules if is_used]:
                prepare_item(dataset, module, info)
        except DataError as error:
            yield Broken.of(info.sample, error, f"{info.modality} {info.index}")

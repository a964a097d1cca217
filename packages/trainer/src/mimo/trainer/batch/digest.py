"""Whether all ranks take the samples of a step to be the same ones: a digest beforehand, and the difference by name.

Routes follow from the samples at both ends of an edge, so ends that read other data would send what nobody awaits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mimo.data import Dataset, SampleLayout
from mimo.hooks import DataError
from mimo.optimizer.runtime import WORD_BITS, WORDS
from mimo.topology import Edge
from mimo.topology.collectives import all_gather_single
from mimo.topology.device_copies import to_device
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.job.job import Job
from mimo.trainer.job.measured_dataset import index_command

_COLUMNS = 4
_FIX = "Give the machines of these ranks the same data."


def digest_of(data: StepData) -> tuple[int, ...]:
    """Return `WORDS` numbers below ``2**WORD_BITS`` that stand for every sample of a step and where its rows lie.

    Where samples are placed by cost, also for the lanes of all samples and items: an index that another rank lacks may
    say of them what they aren't.
    """
    found = _fingerprint(data.layouts)
    for microbatch in data.microbatches:
        if microbatch.placed is not None:
            found.update(repr(microbatch.placed).encode())
    number = int.from_bytes(found.digest(), "big")
    return tuple(number >> (WORD_BITS * word) & (2**WORD_BITS - 1) for word in range(WORDS))


def check_length(length: int, *, where: str, device: torch.device) -> None:
    """Refuse data of which ranks hold more or fewer samples than others. Call it on every rank of the world.

    Args:
        length: samples that this rank holds.
        where: names the data.
        device: where the process group works.

    Raises:
        DataError: ranks do not hold equally many; two of them are named.
    """
    found = _counts(length, device)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise DataError(
                where,
                expected="equally many samples on all ranks",
                got=f"{found[0]} on rank 0, and {other} on rank {rank}",
                fix=_FIX,
            )


def difference(job: Job, dataset: Dataset | None, data: StepData, *, where: str, device: torch.device) -> DataError:
    """Return what is wrong where ranks do not agree on the samples of a step. Call it on every rank of the world.

    Args:
        job: the job.
        dataset: has the samples; None on a rank without data.
        data: what this rank takes the step to be; on a rank that holds no module it is not looked at.
        where: names the step.
        device: where the process group works.
    """
    layouts = data.layouts if dist.get_rank() in job.graph.ranks else []
    mine = torch.full((max(_counts(len(layouts), device)), _COLUMNS), -1, dtype=torch.long, device=device)
    if layouts:
        rows = torch.from_numpy(np.stack([_row(layout) for layout in layouts]))
        mine[: len(layouts)] = to_device(rows, device)
    everybody = mine.new_empty(dist.get_world_size() * len(mine), _COLUMNS)
    all_gather_single(everybody, mine)
    found = everybody.view(-1, *mine.shape).cpu().numpy()
    pair = _first_difference(job, found)
    if pair is None:
        return DataError(
            where,
            expected="samples that all ranks place on the same lanes",
            got="the same samples, placed by sizes that differ",
            fix=f"Give all machines the same index of the data; run {index_command(dataset)} again.",
        )
    at = int(np.flatnonzero((found[pair[0].rank] != found[pair[1].rank]).any(1))[0])
    edge = f"{where}, edge {pair[0].edge}" if pair[0].edge else where
    return DataError(
        edge,
        expected=f"the same samples at both ends; sample {at + 1} of the step is the first that differs",
        got=f"{_describe(pair[0], found[pair[0].rank][at])}, and {_describe(pair[1], found[pair[1].rank][at])}",
        fix=_FIX,
    )


def _counts(mine: int, device: torch.device) -> list[int]:
    """Return the numbers of all ranks. Collective."""
    everybody = torch.empty(dist.get_world_size(), dtype=torch.long, device=device)
    all_gather_single(everybody, to_device(torch.tensor([mine]), device))
    found: list[int] = everybody.tolist()
    return found


@attrs.frozen
class _End:
    rank: int
    module: str
    edge: str


def _first_difference(job: Job, found: NDArray[np.int64]) -> tuple[_End, _End] | None:
    """Return two ranks that hold other samples: of an edge between modules if there is one, else of any two stages."""
    edges: Sequence[Edge] = sorted(job.graph.edges, key=job.is_inside)
    for edge in edges:
        sources, targets = (job.graph.stage_ranks(end) for end in (edge.source, edge.target))
        for source in sources:
            for target in targets:
                if (found[source] != found[target]).any():
                    return _End(source, edge.source.module, edge.name), _End(target, edge.target.module, edge.name)
    first, *others = job.graph.ranks
    for rank in others:
        if (found[first] != found[rank]).any():
            return tuple(_End(it, job.graph.role(it).stages[0].module, "") for it in (first, rank))  # type: ignore[return-value]  # of two
    return None


def _describe(end: _End, row: NDArray[np.int64]) -> str:
    sample, tokens, rows, _ = row.tolist()
    if sample < 0:
        return f"none on rank {end.rank} of {end.module}"
    return f"sample {sample} ({tokens} tokens, {rows} of them rows of encoders) on rank {end.rank} of {end.module}"


def _row(layout: SampleLayout) -> NDArray[np.int64]:
    """Return what to compare of one sample: its number, tokens, encoder rows, and all of it in short."""
    short = int.from_bytes(_fingerprint([layout]).digest()[:7], "big")
    rows = sum(item.rows for item in layout.items)
    return np.array([layout.sample, len(layout.tokens), rows, short], dtype=np.int64)


def _fingerprint(layouts: Iterable[SampleLayout]) -> hashlib.blake2b:
    found = hashlib.blake2b(digest_size=-(-WORDS * WORD_BITS // 8))
    for layout in layouts:
        found.update(f"{layout.sample} {len(layout.tokens)};".encode())
        found.update(layout.tokens.tobytes())
        if layout.weights is not None:
            found.update(b"weights;" + layout.weights.tobytes())
        for item in layout.items:
            found.update(f"{item.info.modality} {item.runs} {item.info.size};".encode())
            if item.asked is not None:
                found.update(f"made {item.asked} {item.made_from};".encode())
    return found

"""The samples of one step: where every token, row and item of each microbatch lies, and the routes that follow.

Everything here is computed from token ids and headers, alike on every rank; items are decoded by encoder ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import attrs
import numpy as np
from torch import Tensor

from mimo.data import Dataset, Packed, PlacedItem, SampleLayout, lay_out, pack
from mimo.hooks import DataError
from mimo.model import EncoderSpec
from mimo.schedule import Route, boundary_route, pipeline_route
from mimo.topology import Edge, Ownership
from mimo.trainer._resolved import Job, JobModule


class Microbatch:
    """One microbatch of a job: the layouts of its samples, and who owns them."""

    def __init__(self, job: Job, dataset: Dataset, samples: Sequence[int]) -> None:
        self._job = job
        self._dataset = dataset
        self._samples = tuple(samples)
        self._packed: dict[tuple[int, int], Packed] = {}

    @cached_property
    def layouts(self) -> tuple[SampleLayout, ...]:
        """The layout of every sample, in order."""
        job = self._job
        rows = {
            module.modality: partial(module.spec.rows, module.config)
            for module in job.encoders
            if isinstance(module.spec, EncoderSpec)
        }
        return tuple(
            lay_out(self._dataset, sample, tokenizer=job.tokenizer, rows=rows, max_tokens=job.settings.data.max_tokens)
            for sample in self._samples
        )

    def owners(self, module: JobModule) -> Ownership:
        """Return which lane of ``module`` owns which sample."""
        return Ownership.even(len(self._samples), module.grid.dp)

    def items(self, module: JobModule, lane: int) -> tuple[PlacedItem, ...]:
        """Return the items that a lane of an encoder reads, in order."""
        return tuple(
            item
            for position in self.owners(module).span(lane)
            for item in self.layouts[position].items
            if item.info.modality == module.modality
        )

    def prepare(self, module: JobModule, lane: int) -> list[Mapping[str, Tensor]]:
        """Decode the items that a lane of an encoder reads.

        Raises:
            DataError: an item cannot be decoded; its file and line are named.
        """
        assert isinstance(module.spec, EncoderSpec)
        prepared = []
        for item in self.items(module, lane):
            raw = self._dataset.raw(item.info.sample, item.info.index)
            try:
                prepared.append(module.spec.prepare(module.config, raw))
            except (ValueError, OSError) as error:
                raise DataError(
                    self._dataset.where(item.info.sample),
                    expected=f"an item that the {module.spec.name} encoder can read",
                    got=f"{item.info.modality} {item.info.index} of size {item.info.size}: {error}",
                ) from error
        return prepared

    def packed(self, lane: int, context_rank: int = 0) -> Packed:
        """Return the packed tokens of one language lane that a context rank holds, padded as its tensor ranks need."""
        if (lane, context_rank) not in self._packed:
            language = self._job.language
            layouts = [self.layouts[position] for position in self.owners(language).span(lane)]
            self._packed[lane, context_rank] = pack(
                layouts,
                multiple=language.grid.tp if language.sequence_parallel else 1,
                context_size=language.grid.cp,
                context_rank=context_rank,
            )
        return self._packed[lane, context_rank]

    def route(self, edge: Edge, rank: int) -> Route:
        """Return what ``rank`` sends and receives on ``edge``."""
        module = self._job.module(edge.source.module)
        if edge.is_boundary:
            return self._boundary(module, self._job.module(edge.target.module), rank)
        lane = module.grid.coordinates(rank).dp
        if module is self._job.language:
            rows = len(self.packed(lane).tokens) // (module.grid.tp if module.sequence_parallel else 1)
        else:
            assert isinstance(module.spec, EncoderSpec)
            assert module.spec.stages is not None
            rows = sum(
                module.spec.stages.message_rows(module.config, item.info.size) for item in self.items(module, lane)
            )
        return pipeline_route(module.grid, rank=rank, stage=edge.source.stage, rows=rows)

    def _boundary(self, source: JobModule, target: JobModule, rank: int) -> Route:
        return boundary_route(
            rank=rank,
            source=source.grid,
            target=target.grid,
            source_owners=self.owners(source),
            target_owners=self.owners(target),
            rows=[
                sum(item.rows for item in layout.items if item.info.modality == source.modality)
                for layout in self.layouts
            ],
            cuts=self._cuts(source, target) if target.sequence_parallel else None,
        )

    def _cuts(self, source: JobModule, target: JobModule) -> Callable[[int], Sequence[int]]:
        """Return, for a lane, at which of its rows the tensor ranks' slices of the sequence begin and end."""

        def cuts(lane: int) -> Sequence[int]:
            packed = self.packed(lane)
            places = packed.placeholders.get(source.modality, np.empty(0, dtype=np.int64))
            share = len(packed.tokens) // target.grid.tp
            edges = np.arange(target.grid.tp + 1) * share
            return [int(row) for row in np.searchsorted(places, edges)]

        return cuts


@attrs.frozen(kw_only=True)
class StepData:
    """The microbatches of one step or of one evaluation batch."""

    microbatches: tuple[Microbatch, ...]
    samples: int

    @classmethod
    def cut(cls, job: Job, dataset: Dataset, samples: Sequence[int], *, microbatches: int) -> StepData:
        """Cut ``samples`` into ``microbatches`` of what the language lanes take at once; the last ones may be short."""
        each = job.settings.run.micro_batch * job.language.grid.dp
        assert len(samples) <= each * microbatches, (len(samples), each, microbatches)
        return cls(
            samples=len(samples),
            microbatches=tuple(
                Microbatch(job, dataset, samples[index * each : (index + 1) * each]) for index in range(microbatches)
            ),
        )

"""The samples of one step: where every token, row and item of each microbatch lies, and the routes that follow.

Everything here is computed from token ids and headers, alike on every rank; items are decoded by encoder ranks only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import attrs
from torch import Tensor

from mimo.data import Dataset, Packed, PlacedItem, SampleLayout, lay_out, pack
from mimo.hooks import DataError
from mimo.model import EncoderSpec
from mimo.schedule import Cut, End, Route, boundary_route, pipeline_route
from mimo.topology import Edge, Ownership, StageId
from mimo.trainer._resolved import Job, JobModule
from mimo.trainer._route_cache import RouteCache, Routes
from mimo.trainer._row_layout import encoder_cut, held_rows
from mimo.trainer._token_cut import TokenCut


class Microbatch:
    """One microbatch of a job: the layouts of its samples, and who owns them.

    Args:
        job: the whole.
        dataset: has the samples.
        samples: their numbers.
        routes: remembers the routes of microbatches of the same layout, of this job's alone.
    """

    def __init__(self, job: Job, dataset: Dataset, samples: Sequence[int], routes: RouteCache | None = None) -> None:
        self._job = job
        self._dataset = dataset
        self._samples = tuple(samples)
        self._cache = RouteCache(1) if routes is None else routes
        self._packed: dict[tuple[int, int], Packed] = {}
        self._owners: dict[int, Ownership] = {}
        self._token_cuts: dict[int, TokenCut] = {}

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
        lanes = module.grid.dp
        if lanes not in self._owners:
            self._owners[lanes] = Ownership.even(len(self._samples), lanes)
        return self._owners[lanes]

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
        key = (edge.name, rank)
        if key not in self._routes:
            self._routes[key] = self._boundary(edge, rank) if edge.is_boundary else self._pipeline(edge, rank)
        return self._routes[key]

    @cached_property
    def _routes(self) -> Routes:
        """What is known of routes; they depend on lengths, sizes and places alone, not on what the samples say."""
        return self._cache.of(
            tuple(
                (
                    len(layout.tokens),
                    *((item.info.modality, item.start, item.rows, item.info.size) for item in layout.items),
                )
                for layout in self.layouts
            )
        )

    @cached_property
    def _rows(self) -> defaultdict[str, list[int]]:
        """Rows of each sample, by modality."""
        found: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(self.layouts))
        for position, layout in enumerate(self.layouts):
            for item in layout.items:
                found[item.info.modality][position] += item.rows
        return found

    def _pipeline(self, edge: Edge, rank: int) -> Route:
        module = self._job.module(edge.source.module)
        place = module.grid.coordinates(rank)
        if module is self._job.language:
            tokens = len(self.packed(place.dp, place.cp).tokens)
            rows = tokens // (module.grid.tp if module.sequence_parallel else 1)
        else:
            assert isinstance(module.spec, EncoderSpec)
            assert module.spec.stages is not None
            sizes = [item.info.size for item in self.items(module, place.dp)]
            total = sum(module.spec.stages.message_rows(module.config, size) for size in sizes)
            _, rows = held_rows(module, place, total)
        ends = self._job.graph.by_name[module.name]
        source, target = (ends.pipeline_rank(stage.stage) for stage in (edge.source, edge.target))
        return pipeline_route(module.grid, rank=rank, source=source, target=target, rows=rows)

    def _boundary(self, edge: Edge, rank: int) -> Route:
        modality = self._job.module(edge.source.module).modality
        rows = self._rows[modality]
        source, target = (self._end(end, modality, rows) for end in (edge.source, edge.target))
        return boundary_route(rank=rank, source=source, target=target, rows=rows)

    def _end(self, stage: StageId, modality: str, rows: Sequence[int]) -> End:
        """Return where the ``rows`` of each sample of a modality lie in a stage."""
        module = self._job.module(stage.module)
        grid, owners = module.grid, self.owners(module)

        def cut(lane: int) -> Cut:
            span = owners.span(lane)
            if module is self._job.language:
                return self._token_cut(lane).rows([self.layouts[position] for position in span], modality)
            return encoder_cut(module, sum(rows[position] for position in span))

        return End(
            grid=grid,
            stage=stage.stage,
            owners=owners,
            sequence_parallel=module.sequence_parallel,
            cut=cut if grid.cp > 1 or module.sequence_parallel else None,
        )

    def _token_cut(self, lane: int) -> TokenCut:
        """Return how the tokens of a language lane lie in its ranks."""
        if lane not in self._token_cuts:
            language = self._job.language
            self._token_cuts[lane] = TokenCut.of(
                [len(self.layouts[position].tokens) for position in self.owners(language).span(lane)],
                context=language.grid.cp,
                slices=language.grid.tp if language.sequence_parallel else 1,
            )
        return self._token_cuts[lane]


@attrs.frozen(kw_only=True)
class StepData:
    """The microbatches of one step or of one evaluation batch."""

    microbatches: tuple[Microbatch, ...]
    samples: int

    @classmethod
    def cut(
        cls,
        job: Job,
        dataset: Dataset,
        samples: Sequence[int],
        *,
        microbatches: int,
        routes: RouteCache | None = None,
    ) -> StepData:
        """Cut ``samples`` into ``microbatches`` of what the language lanes take at once; the last ones may be short.

        Routes are remembered in ``routes``, for this step and later ones.
        """
        each = job.settings.run.micro_batch * job.language.grid.dp
        assert len(samples) <= each * microbatches, (len(samples), each, microbatches)
        return cls(
            samples=len(samples),
            microbatches=tuple(
                Microbatch(job, dataset, samples[index * each : (index + 1) * each], routes)
                for index in range(microbatches)
            ),
        )

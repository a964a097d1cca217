"""The samples of one step: where every token, row and item of each microbatch lies, and the routes that follow.

Everything here is computed from token ids and headers, the same on every rank; items are decoded by encoder ranks only.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import Protocol, TypeAlias

import attrs
from torch import Tensor

from mimo.data import Dataset, Packed, PlacedItem, PlacedMicrobatch, SampleLayout, is_read_failure, pack, retried
from mimo.hooks import DataError, ItemInfo, RunError, UserError
from mimo.model import EncoderSpec
from mimo.schedule import Cut, End, Route, boundary_route, pipeline_route
from mimo.topology import Coordinates, Edge, Ownership, StageId
from mimo.trainer.batch.finite_items import finite_item
from mimo.trainer.batch.handed_on import decoder_of, is_handed_on
from mimo.trainer.batch.route_cache import RouteCache, Routes
from mimo.trainer.batch.row_layout import encoder_cut, held_part, is_sliced
from mimo.trainer.batch.saved_samples import KeptSamples
from mimo.trainer.batch.token_shards import TokenCut
from mimo.trainer.cost.sample_costs import SampleCosts
from mimo.trainer.job.job import Job, JobModule

Prepare: TypeAlias = Callable[[], Mapping[str, Tensor]]
"""Returns what an encoder is given of an item."""


class ItemAhead(Protocol):
    """An item that is prepared before it is needed."""

    def take(self) -> Mapping[str, Tensor]:
        """Return what an encoder is given of it."""

    def wait(self) -> BaseException | None:
        """Return why it can't be prepared, None if it is."""


@attrs.frozen(kw_only=True)
class BrokenItem:
    """Why an item can't be decoded, and whether this rank is the first of those that decode it for its encoder."""

    error: DataError
    is_first: bool


class Microbatch:
    """One microbatch of a job: the layouts of its samples, and who owns them.

    Args:
        job: the whole.
        dataset: has the samples.
        samples: their numbers.
        routes: remembers the routes of microbatches of the same layout, of this job's alone.
        kept: has what encoders are given, or keeps it.
        placed: which lanes own its samples and items; None: by count, in order.
        layouts: of the samples, where they are known.
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        samples: Sequence[int],
        routes: RouteCache | None = None,
        kept: KeptSamples | None = None,
        placed: PlacedMicrobatch | None = None,
        layouts: tuple[SampleLayout, ...] | None = None,
    ) -> None:
        self._job = job
        self._kept = kept
        self._dataset = dataset
        self._samples = tuple(samples)
        self._cache = RouteCache(1) if routes is None else routes
        self._packed: dict[tuple[int, int], Packed] = {}
        self._placed = placed
        self._layouts = layouts
        self._owners: dict[str, Ownership] = {}
        self._token_cuts: dict[int, TokenCut] = {}
        self._passes: dict[str, tuple[Microbatch, ...]] = {}
        self._known: dict[str, Routes] = {}
        self._ahead: dict[tuple[str, int, int], ItemAhead] = {}

    def pass_with(self, module: str, microbatches: tuple[Microbatch, ...]) -> None:
        """Return which microbatches, this among them, one pass of a module serves; by default this one alone."""
        self._passes[module] = microbatches

    @cached_property
    def layouts(self) -> tuple[SampleLayout, ...]:
        """The layout of every sample, in order."""
        if self._layouts is not None:
            return self._layouts
        return tuple(self._job.lay_out(self._dataset, sample) for sample in self._samples)

    @cached_property
    def owners(self) -> Ownership:
        """Which language lane owns which sample."""
        if self._placed is not None:
            return self._placed.owners
        return Ownership.even(len(self._samples), self._job.language.grid.dp)

    def lane_layouts(self, lane: int) -> list[SampleLayout]:
        """Return the layouts of the samples of a language lane, in order."""
        return [self.layouts[position] for position in self.owners.span(lane)]

    def item_owners(self, module: JobModule) -> Ownership:
        """Return which lane of an encoder owns which of its items, numbered sample by sample."""
        if module.name not in self._owners:
            if self._placed is None:
                counts = [len(layout.items_of(module.modality)) for layout in self.layouts]
                self._owners[module.name] = Ownership.even(len(counts), module.grid.dp).scaled(counts)
            else:
                names = [encoder.name for encoder in self._job.encoders]
                self._owners[module.name] = self._placed.items[names.index(module.name)]
        return self._owners[module.name]

    def items(self, module: JobModule, lane: int) -> tuple[PlacedItem, ...]:
        """Return the items that a lane of an encoder reads, in order."""
        items = self._items[module.modality]
        return tuple(items[number] for number in self.item_owners(module).span(lane))

    def prepare(self, module: JobModule, lane: int) -> list[Mapping[str, Tensor]]:
        """Decode the items that a lane of an encoder reads.

        Raises:
            DataError: an item cannot be decoded, or has another size than it had; its file and line are named.
        """
        return [self.prepare_one(module, lane, number) for number in range(len(self.items(module, lane)))]

    def prepare_one(self, module: JobModule, lane: int, number: int) -> Mapping[str, Tensor]:
        """Decode one of the items that a lane of an encoder reads, as `prepare` does."""
        item = self.items(module, lane)[number]
        ahead = self._ahead.pop((module.name, lane, number), None)
        prepare = partial(self._blank if item.is_broken else self._prepare_item, module, item.info)
        if self._kept is None:
            return prepare() if ahead is None else ahead.take()
        return self._kept.item((module.name, item.info.sample, item.info.index), prepare)

    def own_items(self, module: JobModule, place: Coordinates) -> tuple[range | list[int], bool]:
        """Return the numbers of the items of a lane that one of its ranks decodes, and whether others do the rest."""
        items, ranks = self.items(module, place.dp), module.grid.cp * module.grid.tp
        if ranks == 1 or not is_handed_on(items, self._job.settings.data.hand_on):
            return range(len(items)), False
        rank = place.cp * module.grid.tp + place.tp
        return [number for number, item in enumerate(items) if decoder_of(item.info, ranks) == rank], True

    def prepare_ahead(self, module: JobModule, place: Coordinates, submit: Callable[[Prepare], ItemAhead]) -> None:
        """Have the items that a rank is to decode decoded before: once each, as what is prepared is handed over.

        Args:
            module: the encoder.
            place: where the rank stands in its grid.
            submit: has an item prepared, and returns what waits for it.
        """
        items = self.items(module, place.dp)
        for number in self.own_items(module, place)[0]:
            self._ahead[module.name, place.dp, number] = submit(partial(self._prepare_item, module, items[number].info))

    def find_broken(self, places: Sequence[tuple[JobModule, Coordinates]]) -> dict[int, BrokenItem]:
        """Return by position for which samples this rank can't decode an item, when all have been prepared ahead."""
        found: dict[int, BrokenItem] = {}
        for module, place in places:
            holders = [
                position for position, layout in enumerate(self.layouts) for _ in layout.items_of(module.modality)
            ]
            positions = [holders[item] for item in self.item_owners(module).span(place.dp)]
            numbers, is_shared = self.own_items(module, place)
            for number in numbers:
                error = self._ahead[module.name, place.dp, number].wait()
                if error is not None and not isinstance(error, Exception):
                    raise error  # an interrupt, which is for now
                if isinstance(error, DataError):
                    is_first = is_shared or place.cp == place.tp == 0
                    found.setdefault(positions[number], BrokenItem(error=error, is_first=is_first))
        return found

    def mark_broken(self, positions: Sequence[int]) -> None:
        """Have samples count for nothing, whose items can't be decoded here or elsewhere."""
        gone = set(positions)
        self.layouts = tuple(
            layout.broken() if position in gone else layout for position, layout in enumerate(self.layouts)
        )
        self.__dict__.pop("_items", None)  # those of the layouts before
        for module in self._job.encoders:
            for lane in range(module.grid.dp):
                for number, item in enumerate(self.items(module, lane)):
                    if item.is_broken and (ahead := self._ahead.pop((module.name, lane, number), None)) is not None:
                        with contextlib.suppress(Exception):  # it is known, and whatever was prepared is let go
                            ahead.take()

    def _blank(self, module: JobModule, info: ItemInfo) -> Mapping[str, Tensor]:
        """Return what stands in the place of an item that can't be decoded, until zeros take that of its rows."""
        assert isinstance(module.spec, EncoderSpec)
        assert module.spec.blank is not None
        return finite_item(module.spec.prepare(module.config, module.spec.blank(info.size)))

    def _read_item(self, module: JobModule, info: ItemInfo) -> tuple[tuple[int, ...], Mapping[str, Tensor] | None]:
        """Return the size of an item, and what an encoder is given of it if that is what it was."""
        assert isinstance(module.spec, EncoderSpec)
        raw = self._dataset.raw(info.sample, info.index)
        size = tuple(module.spec.measure(raw))
        return size, module.spec.prepare(module.config, raw) if size == tuple(info.size) else None

    def _prepare_item(self, module: JobModule, info: ItemInfo) -> Mapping[str, Tensor]:
        assert isinstance(module.spec, EncoderSpec)
        try:
            size, prepared = retried(partial(self._read_item, module, info))
            if prepared is not None:
                return finite_item(prepared)
        except UserError:
            raise  # the dataset's own, with its place
        except (ValueError, TypeError, OSError) as error:
            if is_read_failure(error):  # no fault of the item
                raise RunError(
                    self._dataset.where(info.sample),
                    expected="a file system that can be read",
                    got=f"{info.modality} {info.index}: {error}",
                ) from error
            raise DataError(
                self._dataset.where(info.sample),
                expected=f"an item that the {module.spec.name} encoder can read",
                got=f"{info.modality} {info.index} of size {info.size}: {error}",
            ) from error
        raise DataError(
            self._dataset.where(info.sample),
            expected=f"{info.modality} {info.index} of size {info.size}, as it was when its rows were counted",
            got=f"one of size {size}",
            fix="Leave files as they are while a run reads them; if nobody changed it, let the dataset's infos() "
            "tell what the encoder's measure() does.",
        )

    def packed(self, lane: int, context_rank: int = 0) -> Packed:
        """Return the packed tokens of one language lane that a context rank holds, padded as its tensor ranks need."""
        if (lane, context_rank) not in self._packed:
            language = self._job.language
            self._packed[lane, context_rank] = pack(
                self.lane_layouts(lane),
                multiple=language.grid.tp if language.sequence_parallel else 1,
                context_size=language.grid.cp,
                context_rank=context_rank,
                next_tokens=self._job.next_tokens,
            )
        return self._packed[lane, context_rank]

    def route(self, edge: Edge, rank: int) -> Route:
        """Return what ``rank`` sends and receives on ``edge``."""
        if edge.name not in self._known:
            self._known[edge.name] = self._cache.of(self._key(self._job.module(edge.source.module)))
        routes, key = self._known[edge.name], (edge.name, rank)
        if key not in routes:
            routes[key] = self._pipeline(edge, rank) if self._job.is_inside(edge) else self._boundary(edge, rank)
        return routes[key]

    def _key(self, source: JobModule) -> Hashable:
        """Return what the routes from a module follow from: for slices of a pass, that is all its microbatches."""
        if not is_sliced(source):
            return self._shape
        whole, index = self._pass(source)
        return self._shape if len(whole) == 1 else (index, *(microbatch._shape for microbatch in whole))  # noqa: SLF001 - its own class's

    @cached_property
    def _shape(self) -> Hashable:
        """What routes depend on: lengths, sizes and places alone, not what the samples say; and the placement."""
        placed = None if self._placed is None else (self._placed.owners, self._placed.items)
        return placed, tuple(
            (
                len(layout.tokens),
                *((item.info.modality, item.start, item.rows, item.info.size) for item in layout.items),
            )
            for layout in self.layouts
        )

    def _pass(self, module: JobModule) -> tuple[tuple[Microbatch, ...], int]:
        """Return the microbatches of the pass that serves this one, and which of them it is."""
        whole = self._passes.get(module.name, (self,))
        return whole, whole.index(self)

    @cached_property
    def _items(self) -> defaultdict[str, list[PlacedItem]]:
        """All items, sample by sample, by modality."""
        found: defaultdict[str, list[PlacedItem]] = defaultdict(list)
        for layout in self.layouts:
            for item in layout.items:
                found[item.info.modality].append(item)
        return found

    def _pipeline(self, edge: Edge, rank: int) -> Route:
        module = self._job.module(edge.source.module)
        place = module.grid.coordinates(rank)
        if module is self._job.language:
            tokens = len(self.packed(place.dp, place.cp).tokens)
            rows = tokens // (module.grid.tp if module.sequence_parallel else 1)
        else:
            whole, index = self._pass(module)
            count = partial(self._job.message_rows, edge)
            counts = [sum(count(item.info.size) for item in one.items(module, place.dp)) for one in whole]
            rows = held_part(module, place, counts, index)
        source, target = (self._pipeline_rank(stage) for stage in (edge.source, edge.target))
        return pipeline_route(module.grid, rank=rank, source=source, target=target, rows=rows)

    def _boundary(self, edge: Edge, rank: int) -> Route:
        modality = self._job.module(edge.source.module).modality
        source, target = (self._end(end, modality) for end in (edge.source, edge.target))
        return boundary_route(
            rank=rank, source=source, target=target, rows=[item.rows for item in self._items[modality]]
        )

    def _end(self, stage: StageId, modality: str) -> End:
        """Return where the rows of each item of a modality lie in a stage."""
        module = self._job.module(stage.module)
        grid = module.grid
        if module is self._job.language:
            owners = self.owners.scaled([len(layout.items_of(modality)) for layout in self.layouts])
        else:
            owners = self.item_owners(module)

        def cut(lane: int) -> Cut:
            if module is self._job.language:
                return self._token_cut(lane).rows(self.lane_layouts(lane), modality)
            whole, index = self._pass(module)
            return encoder_cut(module, [one._lane_rows(module, lane) for one in whole], index)  # noqa: SLF001 - its own class's

        return End(
            grid=grid,
            stage=self._pipeline_rank(stage),
            owners=owners,
            sequence_parallel=module.sequence_parallel,
            cut=cut if grid.cp > 1 or module.sequence_parallel else None,
        )

    def _pipeline_rank(self, stage: StageId) -> int:
        """Return the place of a stage along its module's grid."""
        built = self._job.built(stage)
        return self._job.model_graph.by_name[built.module].pipeline_rank(built.stage)

    def _lane_rows(self, module: JobModule, lane: int) -> int:
        """Return how many rows a lane of an encoder makes."""
        return sum(item.rows for item in self.items(module, lane))

    def _token_cut(self, lane: int) -> TokenCut:
        """Return how the tokens of a language lane lie in its ranks."""
        if lane not in self._token_cuts:
            language = self._job.language
            self._token_cuts[lane] = TokenCut.of(
                [len(layout.tokens) for layout in self.lane_layouts(lane)],
                context=language.grid.cp,
                slices=language.grid.tp if language.sequence_parallel else 1,
            )
        return self._token_cuts[lane]


@attrs.frozen(kw_only=True)
class StepData:
    """The microbatches of one step or of one evaluation batch, made when they are first needed.

    Args:
        samples: number of samples.
        make: makes the microbatches, and says where each of their samples stands in the step.
    """

    samples: int
    make: Callable[[], Sequence[tuple[Microbatch, Sequence[int]]]]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which samples of the dataset they are."""
        return tuple(layout.sample for microbatch in self.microbatches for layout in microbatch.layouts)

    @property
    def broken(self) -> tuple[int, ...]:
        """The places of those that count for nothing, as an item of them can't be decoded."""
        layouts = [layout for microbatch in self.microbatches for layout in microbatch.layouts]
        return tuple(place for place, layout in enumerate(layouts) if any(item.is_broken for item in layout.items))

    def find_broken(self, places: Sequence[tuple[JobModule, Coordinates]]) -> dict[int, BrokenItem]:
        """Return by place for which samples this rank can't decode an item, when all have been prepared ahead."""
        found, first = dict[int, BrokenItem](), 0
        for microbatch in self.microbatches:
            found |= {first + position: item for position, item in microbatch.find_broken(places).items()}
            first += len(microbatch.layouts)
        return found

    def mark_broken(self, places: Sequence[int]) -> None:
        """Have the samples at these places count for nothing."""
        first = 0
        for microbatch in self.microbatches:
            count = len(microbatch.layouts)
            microbatch.mark_broken([place - first for place in places if first <= place < first + count])
            first += count

    @classmethod
    def cut(
        cls,
        job: Job,
        dataset: Dataset,
        samples: Sequence[int],
        *,
        microbatches: int,
        routes: RouteCache | None = None,
        kept: KeptSamples | None = None,
        costs: SampleCosts | None = None,
    ) -> StepData:
        """Cut ``samples`` into ``microbatches`` of what the language lanes take at once.

        Args:
            job: the whole.
            dataset: has the samples.
            samples: their numbers.
            microbatches: how many.
            routes: remembers routes, for this step and later ones.
            kept: has what encoders are given, or keeps it.
            costs: by which samples and items are placed, from all headers of the step. None: they are cut in order,
                by count, and the last microbatches may be short.
        """
        each = job.settings.run.micro_batch * job.language.grid.dp
        assert len(samples) <= each * microbatches, (len(samples), each, microbatches)

        def by_count() -> Sequence[tuple[Microbatch, Sequence[int]]]:
            spans = [range(len(samples))[index * each : (index + 1) * each] for index in range(microbatches)]
            return [(Microbatch(job, dataset, samples[span.start : span.stop], routes, kept), span) for span in spans]

        def by_cost(costs: SampleCosts) -> Sequence[tuple[Microbatch, Sequence[int]]]:
            layouts = [job.lay_out(dataset, sample) for sample in samples]
            return [
                (
                    Microbatch(
                        job,
                        dataset,
                        [samples[position] for position in placed.samples],
                        routes,
                        kept,
                        placed,
                        tuple(layouts[position] for position in placed.samples),
                    ),
                    placed.samples,
                )
                for placed in costs.place(layouts, microbatches=microbatches)
            ]

        def make() -> Sequence[tuple[Microbatch, Sequence[int]]]:
            found = by_count() if costs is None else by_cost(costs)
            for module in job.model_graph.modules:
                for served in module.passes(microbatches):
                    whole = tuple(found[index][0] for index in served)
                    for microbatch in whole[1:] and whole:
                        microbatch.pass_with(module.name, whole)
            return found

        return cls(samples=len(samples), make=make)

    @cached_property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """All of them, in the order of the step.

        Raises:
            DataError: a sample can't be laid out, where they are placed by cost.
        """
        return tuple(microbatch for microbatch, _ in self._made)

    @property
    def layouts(self) -> list[SampleLayout]:
        """The layouts of all samples, in the order of the step, wherever they are placed."""
        found = [
            pair for microbatch, positions in self._made for pair in zip(positions, microbatch.layouts, strict=True)
        ]
        return [layout for _, layout in sorted(found, key=itemgetter(0))]

    @cached_property
    def _made(self) -> Sequence[tuple[Microbatch, Sequence[int]]]:
        return self.make()

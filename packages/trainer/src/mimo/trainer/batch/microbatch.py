"""One microbatch: where its tokens, rows and items lie, and the routes that follow.

Everything here is computed from token ids and headers, the same on every rank; items are decoded by encoder ranks only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from mimo.data import Dataset, Packed, PlacedItem, PlacedMicrobatch, SampleLayout, pack
from mimo.hooks import DataError
from mimo.model import LanguageModelSpec
from mimo.schedule import Cut, End, Route, boundary_route, pipeline_route
from mimo.topology import Coordinates, Edge, Ownership, StageId
from mimo.trainer.batch.route_cache import RouteCache, Routes
from mimo.trainer.batch.row_layout import chosen, encoder_cut, held_part, is_sliced
from mimo.trainer.batch.saved_samples import KeptSamples
from mimo.trainer.batch.token_shards import TokenCut
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.cost.step_sizes import check_placed
from mimo.trainer.items.handed_on import decoder_of, is_handed_on
from mimo.trainer.items.prepared import Item, ItemAhead, Prepare, blank_item, prepare_item
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.job.taught import (
    fed_rows,
    feeding_spans,
    is_read,
    is_taught,
    own_items,
    rows_of,
    sent_items,
    taught_rows,
)


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
        self._packed: dict[tuple[str, int, int], Packed] = {}
        self.placed = placed
        self._layouts = layouts
        self._owners: dict[str, Ownership] = {}
        self._items: dict[str, tuple[tuple[int, PlacedItem], ...]] = {}
        self._lane_items: dict[tuple[str, int], tuple[tuple[int, PlacedItem], ...]] = {}
        self._rows: dict[str, list[Sequence[int]]] = {}
        self._token_cuts: dict[tuple[str, int, int], TokenCut] = {}
        self._crossings: dict[str, tuple[Sequence[int], Sequence[Ownership]]] = {}
        self._passes: dict[str, tuple[Microbatch, ...]] = {}
        self._known: dict[str, Routes] = {}
        self._ahead: dict[tuple[str, int, int], list[ItemAhead]] = {}

    def pass_with(self, module: str, microbatches: tuple[Microbatch, ...]) -> None:
        """Return which microbatches, this among them, one pass of a module serves; by default this one alone."""
        self._passes[module] = microbatches

    @cached_property
    def layouts(self) -> tuple[SampleLayout, ...]:
        """The layout of every sample, in order; `DataError` as from `Job.lay_out_all` and `check_placed`."""
        if self._layouts is None:
            self._layouts = tuple(self._job.lay_out_all(self._dataset, self._samples))
            if self.placed is not None and self._samples:
                check_placed(self._job, self.placed, self._layouts, self._dataset)
        return self._layouts

    @cached_property
    def owners(self) -> Ownership:
        """Which language lane owns which sample."""
        if self.placed is not None:
            return self.placed.owners
        return Ownership.even(len(self._samples), self._job.language.grid.dp)

    def lane_layouts(self, module: JobModule, lane: int) -> list[SampleLayout]:
        """Return the layouts of the samples that a lane of a language model reads, in order."""
        if module.distil is None:
            return [self.layouts[position] for position in self.owners.span(lane)]
        taught = self.read_by(module)
        return [taught[number] for number in self.item_owners(module).span(lane)]

    def read_by(self, module: JobModule) -> list[SampleLayout]:
        """Return the layouts of the samples that a module reads, or of which it reads items, in order."""
        return [layout for layout in self.layouts if is_read(self._job, module, layout)]

    def item_owners(self, module: JobModule) -> Ownership:
        """Return which lane of a module owns which of what it reads for another one, sample by sample.

        Of an encoder those are items, of a teacher samples, of a generator samples that hold items for it to make.
        """
        if module.name == LANGUAGE:
            return self.owners
        if module.name not in self._owners:
            if self.placed is None:
                counts = self._counts(module)
                self._owners[module.name] = Ownership.even(len(counts), module.grid.dp).scaled(counts)
            else:
                self._owners[module.name] = self.placed.items[self._job.beside.index(module)]
        return self._owners[module.name]

    def _counts(self, module: JobModule) -> list[int]:
        """Return how much of each sample a module reads for another one."""
        return [len(rows) for rows in self._rows_of(module)]

    def _rows_of(self, module: JobModule) -> list[Sequence[int]]:
        """Return for each sample the rows of all that a module reads of it for another one."""
        if module.name not in self._rows:
            self._rows[module.name] = [rows_of(self._job, module, layout) for layout in self.layouts]
        return self._rows[module.name]

    def items(self, module: JobModule, lane: int) -> tuple[PlacedItem, ...]:
        """Return the items that a lane of an encoder reads, or one of a generator makes, in order."""
        return tuple(item for _, item in self.lane_items(module, lane))

    def lane_items(self, module: JobModule, lane: int) -> tuple[tuple[int, PlacedItem], ...]:
        """Return the same, each with the position of its sample."""
        key = module.name, lane
        if key not in self._lane_items:
            items, own = self._items_of(module), self.item_owners(module).span(lane)
            if module.is_generator:
                positions = set(self.made_samples(module, lane))
                self._lane_items[key] = tuple(pair for pair in items if pair[0] in positions)
            else:
                self._lane_items[key] = tuple(items[number] for number in own)
        return self._lane_items[key]

    def made_samples(self, generator: JobModule, lane: int) -> tuple[int, ...]:
        """Return the positions of the samples that hold items for a lane of a generator to make, ascending."""
        made = [at for at, layout in enumerate(self.layouts) if layout.made(generator.modality)]
        return tuple(made[number] for number in self.item_owners(generator).span(lane))

    def fed_spans(self, generator: JobModule, source: JobModule, lane: int) -> tuple[list[tuple[int, int]], int]:
        """Return of each item of a lane of a generator which rows it is made from, and the number of all.

        Args:
            generator: which.
            source: what feeds it: the spans lie in all rows that this sends to the lane.
            lane: of the generator.
        """
        spans, first = list[tuple[int, int]](), 0
        for position in self.made_samples(generator, lane):
            own, rows = feeding_spans(self._job, generator, source, self.layouts[position])
            spans += [(first + start, first + stop) for start, stop in own]
            first += rows
        return spans, first

    def sizes(self, module: JobModule, lane: int) -> list[tuple[tuple[int, ...], int]]:
        """Return the size of each item of a lane, and from how many rows a generator makes it, 0 where it is read."""
        sizes = [item.info.size for item in self.items(module, lane)]
        if not module.is_generator:
            return [(size, 0) for size in sizes]
        spans = zip(*(self.fed_spans(module, one, lane)[0] for one in self._job.feeders_of(module)), strict=True)
        return [(size, sum(stop - start for start, stop in own)) for size, own in zip(sizes, spans, strict=True)]

    def prepare(self, module: JobModule, lane: int) -> list[Item]:
        """Decode the items that a lane of an encoder reads.

        Raises:
            DataError: an item cannot be decoded, or has another size than it had; its file and line are named.
        """
        count = len(self.lane_items(module, lane))
        for number in reversed(range(count)):  # towards threads that decode from the first on: none is waited for twice
            for ahead in self._ahead.get((module.name, lane, number), [])[:1]:
                ahead.wait()
        return [self.prepare_one(module, lane, number) for number in range(count)]

    def prepare_one(self, module: JobModule, lane: int, number: int) -> Item:
        """Decode one of the items that a lane of an encoder reads, as `prepare` does."""
        _, item = self.lane_items(module, lane)[number]
        waiting = self._ahead.get((module.name, lane, number))
        ahead = waiting.pop(0) if waiting else None
        prepare = partial(blank_item, module, item.info) if item.is_broken else self._preparing(module, item)
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
        """Have the items that a rank is to decode decoded before.

        What is prepared is handed over, so call it once for each of the rank's stages where items enter.

        Args:
            module: the encoder, or generator.
            place: where the rank stands in its grid.
            submit: has an item prepared, and returns what waits for it.
        """
        items = self.items(module, place.dp)
        for number in self.own_items(module, place)[0]:
            submitted = submit(self._preparing(module, items[number]))
            self._ahead.setdefault((module.name, place.dp, number), []).append(submitted)

    def find_broken(self, places: Sequence[tuple[JobModule, Coordinates]]) -> dict[tuple[int, int], DataError]:
        """Return by position of the sample and index which items can't be decoded, when all have been prepared ahead.

        Args:
            places: encoders whose items this rank decodes, each with where it stands in the encoder's grid.
        """
        found: dict[tuple[int, int], DataError] = {}
        for module, place in places:
            items = self.lane_items(module, place.dp)
            for number in self.own_items(module, place)[0]:
                for ahead in self._ahead.get((module.name, place.dp, number), ()):
                    error = ahead.wait()  # None where reading ahead failed and no longer does
                    if error is not None and not isinstance(error, Exception):
                        raise error  # an interrupt, which is for now
                    if isinstance(error, DataError):
                        position, item = items[number]
                        found.setdefault((position, item.info.index), error)
        return found

    def mark_broken(self, broken: Mapping[int, Collection[int]]) -> None:
        """Have samples count for nothing: by position the indices of items that can't be decoded, here or elsewhere."""
        self.layouts = tuple(
            layout.broken(broken[position]) if position in broken else layout
            for position, layout in enumerate(self.layouts)
        )
        self._items.clear()  # those of the layouts before
        self._lane_items.clear()
        self._rows.clear()
        self._crossings.clear()
        for module in self._job.item_modules:
            for lane in range(module.grid.dp):
                for number, item in enumerate(self.items(module, lane)):
                    for ahead in self._ahead.pop((module.name, lane, number), ()) if item.is_broken else ():
                        with contextlib.suppress(Exception):  # it is known, and whatever was prepared is let go
                            ahead.take()

    def _preparing(self, module: JobModule, item: PlacedItem) -> Prepare:
        return partial(prepare_item, self._dataset, module, item.info)

    def packed(self, module: JobModule, lane: int, context_rank: int = 0) -> Packed:
        """Return the packed tokens of a lane of a language model.

        Args:
            module: the language model, or a teacher of it.
            lane: of it.
            context_rank: that holds them; they are padded as its tensor ranks need.
        """
        key = (module.name, lane, context_rank)
        if key not in self._packed:
            assert isinstance(module.spec, LanguageModelSpec), module.name
            self._packed[key] = pack(
                self.lane_layouts(module, lane),
                multiple=module.round_rows * module.slices,
                context_size=module.grid.cp,
                context_rank=context_rank,
                next_tokens=0 if module.distil is not None else self._job.next_tokens,
                with_items=module.spec.reads_items(module.config),
            )
        return self._packed[key]

    def taught(self, lane: int, context_rank: int = 0) -> NDArray[np.int64]:
        """Return which rows of the language model's packed tokens teachers say something of, ascending.

        Args:
            lane: of the language model.
            context_rank: that holds them.
        """
        packed = self.packed(self._job.language, lane, context_rank)
        layouts = self.lane_layouts(self._job.language, lane)
        read = np.array([*(is_taught(self._job, layout) for layout in layouts), False])  # the last is the padding
        return np.flatnonzero(packed.targets & read[packed.samples])

    def fed(self, generator: JobModule, lane: int, context_rank: int = 0) -> NDArray[np.int64]:
        """Return which rows of the language model's packed tokens a generator makes items from, ascending.

        Args:
            generator: which.
            lane: of the language model.
            context_rank: that holds them.
        """
        packed = self.packed(self._job.language, lane, context_rank)
        own = [fed_rows(generator, layout) for layout in self.lane_layouts(self._job.language, lane)]
        starts = np.cumsum([0, *map(len, own)])
        wanted = np.concatenate([*own, np.zeros(1, dtype=np.bool_)])  # the last is the padding
        return np.flatnonzero(wanted[np.minimum(starts[packed.samples] + packed.positions, len(wanted) - 1)])

    def route(self, edge: Edge, rank: int) -> Route:
        """Return what ``rank`` sends and receives on ``edge``."""
        if edge.name not in self._known:
            self._known[edge.name] = self._cache.of(self._key(edge))
        routes, key = self._known[edge.name], (edge.name, rank)
        if key not in routes:
            routes[key] = self._pipeline(edge, rank) if self._job.is_inside(edge) else self._boundary(edge, rank)
        return routes[key]

    def _key(self, edge: Edge) -> Hashable:
        """Return what routes of an edge follow from: for slices of a pass, that is all its microbatches."""
        ends = (self._job.module(end.module) for end in (edge.source, edge.target))
        passes = [self._pass(module) for module in ends if is_sliced(module)]
        if all(len(whole) == 1 for whole, _ in passes):
            return self._shape
        return tuple((index, *(microbatch._shape for microbatch in whole)) for whole, index in passes)  # noqa: SLF001 - its own class's

    @cached_property
    def _shape(self) -> Hashable:
        """What routes depend on: lengths, sizes and places alone, not what the samples say; and the placement."""
        placed = None if self.placed is None else (self.placed.owners, self.placed.items)
        read = self.layouts if self._job.teachers else ()
        taught = tuple(taught_rows(self._job, layout).tobytes() for layout in read)
        return (
            placed,
            taught,
            tuple(
                (
                    len(layout.tokens),
                    *((item.info.modality, item.runs, item.info.size, item.made_from) for item in layout.items),
                )
                for layout in self.layouts
            ),
        )

    def _pass(self, module: JobModule) -> tuple[tuple[Microbatch, ...], int]:
        """Return the microbatches of the pass that serves this one, and which of them it is."""
        whole = self._passes.get(module.name, (self,))
        return whole, whole.index(self)

    def _items_of(self, module: JobModule) -> tuple[tuple[int, PlacedItem], ...]:
        """Return all items that an encoder reads, or a generator makes, sample by sample, with its position."""
        if module.name not in self._items:
            self._items[module.name] = tuple(
                (position, item)
                for position, layout in enumerate(self.layouts)
                for item in own_items(self._job, module, layout)
            )
        return self._items[module.name]

    def _pipeline(self, edge: Edge, rank: int) -> Route:
        module = self._job.module(edge.source.module)
        place = module.grid.coordinates(rank)
        if isinstance(module.spec, LanguageModelSpec):
            tokens = len(self.packed(module, place.dp, place.cp).tokens)
            rows = tokens // module.slices
        else:
            whole, index = self._pass(module)
            counts = [sum(self._job.message_rows(edge, *one) for one in own.sizes(module, place.dp)) for own in whole]
            rows = held_part(module, place, counts, index)
        source, target = (self._pipeline_rank(stage) for stage in (edge.source, edge.target))
        return pipeline_route(module.grid, rank=rank, source=source, target=target, rows=rows)

    def _boundary(self, edge: Edge, rank: int) -> Route:
        rows, owners = self._crossing(edge)
        source, target = map(self._end, (edge.source, edge.target), (edge, edge), owners)
        return boundary_route(rank=rank, source=source, target=target, rows=rows)

    def _crossing(self, edge: Edge) -> tuple[Sequence[int], Sequence[Ownership]]:
        """Return the rows of each item or sample that crosses a boundary, and which lanes own them at its two ends."""
        if edge.name not in self._crossings:
            sent = self.sent(edge)
            owners = [self._sent_owners(end, edge, sent) for end in (edge.source, edge.target)]
            self._crossings[edge.name] = [rows for own in sent for rows in own], owners
        return self._crossings[edge.name]

    def sent(self, edge: Edge) -> list[Sequence[int]]:
        """Return for each sample the rows of all that crosses a boundary."""
        carried = self._job.carried_by(edge)
        if not self._job.sends_some(edge):
            return self._rows_of(carried)
        taker = self._job.module(edge.target.module)
        return [[item.rows for item in sent_items(self._job, carried, taker, layout)] for layout in self.layouts]

    def sent_rows(self, encoder: JobModule, taker: JobModule, lane: int) -> NDArray[np.bool_]:
        """Return of each row that a lane of an encoder makes whether it sends it to one of the modules that it feeds.

        Args:
            encoder: which.
            taker: of its rows.
            lane: of the encoder.
        """
        found = list[bool]()
        for layout in self.layouts:
            count = len(sent_items(self._job, encoder, taker, layout))
            found += [number < count for number in range(len(own_items(self._job, encoder, layout)))]
        own = self.item_owners(encoder).span(lane)
        counts = [item.rows for item in self.items(encoder, lane)]
        return np.repeat(np.array([found[number] for number in own], dtype=np.bool_), counts)

    def _sent_owners(self, stage: StageId, edge: Edge, sent: Sequence[Sequence[int]]) -> Ownership:
        """Return which lanes of a stage own the items or samples of which rows cross a boundary."""
        carried = self._job.carried_by(edge)
        module = self._job.module(stage.module)
        owners = self.item_owners(module)
        if module is not carried:
            pairs = zip(self.layouts, sent, strict=True)
            return owners.scaled([len(own) for layout, own in pairs if is_read(self._job, module, layout)])
        if not self._job.sends_some(edge):
            return owners
        counts = zip(map(len, sent), self._counts(carried), strict=True)  # the first ones of each sample
        return owners.scaled([number < count for count, own in counts for number in range(own)])

    def _end(self, stage: StageId, edge: Edge, owners: Ownership) -> End:
        """Return where the rows lie in a stage that cross a boundary, for each of the items or samples they are of."""
        carried = self._job.carried_by(edge)
        module = self._job.module(stage.module)
        is_other = module is not carried
        splits = module.sequence_parallel and not carried.sends_ids  # which all tensor ranks have of all rows

        def cut(lane: int) -> Cut:
            if carried.distil is not None:
                own = [taught_rows(self._job, layout) for layout in self.lane_layouts(module, lane)]
                return self._token_cut(module, lane, slices=0 if splits else 1).chosen(own)
            if is_other and carried.is_generator:
                own = [fed_rows(carried, layout) for layout in self.lane_layouts(module, lane)]
                return self._token_cut(module, lane).chosen(own)
            if is_other and not module.is_generator:
                return self._token_cut(module, lane).rows(self.lane_layouts(module, lane), carried.modality)
            whole, index = self._pass(module)
            found = encoder_cut(module, [one._lane_rows(module, lane, carried) for one in whole], index)  # noqa: SLF001 - its own class's
            if is_other or not self._job.sends_some(edge):
                return found
            return chosen(found, self.sent_rows(module, self._job.module(edge.target.module), lane))

        return End(
            grid=module.grid,
            stage=self._pipeline_rank(stage),
            owners=owners,
            sequence_parallel=splits,
            cut=cut if module.grid.cp > 1 or splits else None,
        )

    def _pipeline_rank(self, stage: StageId) -> int:
        """Return the place of a stage along its module's grid."""
        built = self._job.built(stage)
        return self._job.model_graph.by_name[built.module].pipeline_rank(built.stage)

    def _lane_rows(self, module: JobModule, lane: int, carried: JobModule) -> int:
        """Return how many rows a lane of an encoder makes, or one of a generator is sent by what feeds it."""
        if module.is_generator:
            return self.fed_spans(module, self._job.language if carried is module else carried, lane)[1]
        return sum(item.rows for item in self.items(module, lane))

    def _token_cut(self, module: JobModule, lane: int, *, slices: int = 0) -> TokenCut:
        """Return how the tokens of a lane of a language model lie in its ranks: in its slices, or in so many."""
        slices = slices or module.slices
        key = (module.name, lane, slices)
        if key not in self._token_cuts:
            self._token_cuts[key] = TokenCut.of(
                [len(layout.tokens) for layout in self.lane_layouts(module, lane)],
                context=module.grid.cp,
                slices=slices,
                multiple=module.round_rows,
            )
        return self._token_cuts[key]

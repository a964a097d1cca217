"""Random module graphs, plans of them, routes and placements of an edge, for the property tests."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, get_args

import attrs
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from mimo.hooks import ConfigError
from mimo.schedule import Costs, Cut, End, Plan, ScheduleSpec
from mimo.schedule.schedules import gpipe, interleaved, one_forward_one_backward
from mimo.schedule.schedules.zero_bubble import Form, ZeroBubble
from mimo.schedule.schedules.zero_bubble import mimo_register_schedules as zero_bubbles
from mimo.schedule.testing import Peers
from mimo.topology import Edge, Grid, Module, ModuleGraph, Ownership, Placement, context_spans

WORLD = 8
CHUNKS: Mapping[str, tuple[tuple[int, ...], Placement]] = {
    "interleaved": ((1, 2, 3), "loop"),
    "zero-bubble h1": ((1,), "loop"),
    "zero-bubble h2": ((1,), "loop"),
    "zero-bubble v": ((1, 2, 2), "v"),
}
"""The chunks that these take, and how they lie; others take any."""


@attrs.frozen(kw_only=True)
class Case:
    """A graph and the plan of a step over it, made by a schedule with a config."""

    graph: ModuleGraph
    plan: Plan
    schedule: ScheduleSpec
    config: Any


def _schedules() -> Mapping[str, tuple[ScheduleSpec, Any]]:
    found = {}
    for module in (one_forward_one_backward, gpipe, interleaved):
        (spec,) = module.mimo_register_schedules()
        found[spec.name] = (spec, spec.config())
    (spec,) = zero_bubbles()
    return {**found, **{f"zero-bubble {form}": (spec, ZeroBubble(form=form)) for form in get_args(Form)}}


@st.composite
def _grids(draw: st.DrawFn, name: str) -> Grid:
    ranks = sorted(draw(st.sets(st.integers(0, WORLD - 1), min_size=1)))
    sizes: dict[str, int] = {}
    left = len(ranks)
    for axis in draw(st.permutations(["pp", "dp", "cp", "tp"]))[:3]:
        sizes[axis] = draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
        left //= sizes[axis]
    last = next(axis for axis in ("dp", "tp", "pp", "cp") if axis not in sizes)
    stage = math.prod(sizes.values()) * left // (sizes.get("pp", 1) * (left if last == "pp" else 1))
    ep = draw(st.sampled_from([size for size in range(1, stage + 1) if stage % size == 0]))
    return Grid(name=name, ranks=ranks, ep=ep, **sizes, **{last: left})


@st.composite
def _modules(draw: st.DrawFn, name: str, chunks: tuple[int, ...], placement: Placement) -> Module:
    grid = draw(_grids(name))
    held, factor = (draw(st.sampled_from(chunks)), draw(st.sampled_from((1, 1, 2, 3)))) if grid.pp <= 4 else (1, 1)
    trains = draw(st.lists(st.booleans(), min_size=grid.pp * held, max_size=grid.pp * held))
    return Module(
        grid=grid,
        trains=tuple(trains),
        tied=draw(st.booleans()),
        experts=draw(st.booleans()),
        chunks=held,
        placement=placement,
        batch_factor=factor if held == 1 else 1,
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        gathers=draw(st.booleans()),
        feeds=draw(st.sampled_from(("first", "first", "last"))),
    )


@st.composite
def _prefetching(draw: st.DrawFn, graph: ModuleGraph) -> ModuleGraph:
    """Freeze some modules that feed others, or their towers, and have these work on the next step."""
    chosen: list[str] = []
    divided: list[str] = []
    for name in graph.order:
        sources = [source for source, target in graph.arrows if target == name]
        feeds = any(source == name for source, _ in graph.arrows)
        if feeds and set(sources) <= set(chosen) and draw(st.booleans()):
            draw(st.sampled_from((chosen, divided))).append(name)

    def turned(module: Module) -> Module:
        frozen = (False,) * module.stages
        if module.name in divided:
            return attrs.evolve(module, trains=(*frozen, True), tied=False, experts=False, seam=True)
        return attrs.evolve(module, trains=frozen, prefetch=True) if module.name in chosen else module

    return attrs.evolve(graph, modules=tuple(map(turned, graph.modules))).divided()


@st.composite
def _cases(draw: st.DrawFn, names: tuple[str, ...]) -> Case:
    name = draw(st.sampled_from(names))
    schedule, config = _schedules()[name]
    chunks, placement = CHUNKS.get(name, ((1, 1, 2, 3), draw(st.sampled_from(get_args(Placement)))))
    modules = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
    pairs = [(low, high) for index, low in enumerate(modules) for high in modules[index + 1 :]]
    arrows = [pair for pair in pairs if draw(st.booleans())]
    graph = ModuleGraph(
        modules=tuple(draw(_modules(module, chunks, placement)) for module in sorted(modules)), arrows=tuple(arrows)
    )
    if draw(st.booleans()):
        graph = draw(_prefetching(graph))
    if max(chunks) > 1 and name in CHUNKS:
        assume(any(module.chunks > 1 for module in graph.modules))
    for microbatches in range(draw(st.integers(1, 8)), 25):
        with contextlib.suppress(ConfigError):
            plan = schedule.generate(graph, microbatches, config, Costs.even(graph))
            return Case(graph=graph, plan=plan, schedule=schedule, config=config)
    raise AssertionError(graph)


@pytest.fixture(scope="session")
def cases() -> st.SearchStrategy[Case]:
    """Graphs of up to 4 modules on up to 8 ranks in any shape, with plans of up to 24 microbatches by any schedule."""
    return _cases(tuple(_schedules()))


@pytest.fixture(scope="session")
def cases_of() -> Callable[[str], st.SearchStrategy[Case]]:
    """Return such graphs with plans of one schedule, by its name."""
    return lambda name: _cases((name,))


@pytest.fixture(scope="session")
def routes() -> Callable[[ModuleGraph, int], Peers]:
    """Return routes for a graph and a seed: on each edge, for each microbatch, any of the pairs of ranks, or none."""

    def make(graph: ModuleGraph, seed: int) -> Peers:
        def peers(edge: Edge, microbatch: int) -> list[tuple[int, int]]:
            choice = random.Random(f"{seed} {edge.name} {microbatch}")
            share = choice.choice([0.0, 0.3, 0.7, 1.0])
            sources = graph.by_name[edge.source.module].grid.stage_ranks(edge.source.stage)
            targets = graph.by_name[edge.target.module].grid.stage_ranks(edge.target.stage)
            return [(source, target) for source in sources for target in targets if choice.random() < share]

        return peers

    return make


@attrs.frozen(kw_only=True)
class PlacedEdge:
    """An edge between two placements in a world, with the rows of each sample, and what must follow from that."""

    world: int
    source: End
    target: End
    rows: tuple[int, ...]

    def cells(self, end: End) -> list[tuple[int, ...]]:
        """Return the ranks that hold the same rows, for each lane, context rank and slice."""
        ranks, copies = end.grid.stage_ranks(end.stage), 1 if end.sequence_parallel else end.grid.tp
        return [ranks[first : first + copies] for first in range(0, len(ranks), copies)]

    def rows_of(self, end: End) -> dict[int, list[int]]:
        """Return the numbers of the rows that each rank holds, in the order of its tensor."""
        found: dict[int, list[int]] = {rank: [] for rank in end.grid.stage_ranks(end.stage)}
        cells = self.cells(end)
        each = len(cells) // end.grid.dp
        for lane in range(end.grid.dp):
            starts = [0, *accumulate(self.rows)]
            own = [row for at in end.owners.span(lane) for row in range(starts[at], starts[at + 1])]
            cut = Cut((0, len(own)), (0,)) if end.cut is None else end.cut(lane)
            for (start, stop), cell in zip(pairwise(cut.bounds), cut.cells, strict=True):
                for rank in cells[lane * each + cell]:
                    found[rank] += own[start:stop]
        return found


def _draw_grid(choice: random.Random, name: str, world: int) -> Grid:
    first = choice.choice([0, 0, choice.randrange(world)])
    anywhere = sorted(choice.sample(range(world), choice.randint(1, world)))
    return _lay_out(choice, name, choice.choice([range(first, world), anywhere]))


def _lay_out(choice: random.Random, name: str, ranks: Sequence[int]) -> Grid:
    """Draw the sizes of a grid on as many of the ranks as these need; often of lanes and tensor ranks alone."""
    axes = choice.choice([["dp", "tp"], ["dp", "cp", "tp"], ["pp", "dp", "cp", "tp"]])
    sizes, left = {}, len(ranks)
    for axis in choice.choice([axes[::-1], choice.sample(axes, len(axes))]):
        sizes[axis] = choice.randint(1, min(left, 4))
        left //= sizes[axis]
    return Grid(name=name, ranks=ranks[: math.prod(sizes.values())], **sizes)


def _slices(rows: int, *, each: int, cells: int) -> Cut:
    """Cut rows into slices of ``each`` rows, of which the last cells may get fewer or none."""
    return Cut([min(cell * each, rows) for cell in range(cells + 1)], range(cells))


def _draw_cut(choice: random.Random, samples: list[int], cells: int) -> Cut:
    """Draw how the rows of a lane lie in its cells: slices, early and late spans of each sample, or anyhow."""
    total = sum(samples)
    match choice.randrange(3):
        case 0:
            return _slices(total, each=-(-total // cells) + choice.randrange(2), cells=cells)
        case 1:
            spans = [
                (sum(samples[:number]) + start, sum(samples[:number]) + stop, cell)
                for number, length in enumerate(samples)
                for cell in range(cells)
                for start, stop in context_spans(length, size=cells, rank=cell)
            ]
            return Cut((0, *(stop for _, stop, _ in sorted(spans))), tuple(cell for *_, cell in sorted(spans)))
        case _:
            bounds = sorted(choice.randint(0, total) for _ in range(choice.randrange(2 * cells)))
            return Cut((0, *bounds, total), tuple(choice.randrange(cells) for _ in range(len(bounds) + 1)))


def _even_end(grid: Grid, rows: tuple[int, ...], *, sequence_parallel: bool) -> End:
    owners = Ownership.even(len(rows), grid.dp)
    cells = grid.cp * grid.tp if sequence_parallel else grid.cp

    def cut(lane: int) -> Cut:
        total = sum(rows[at] for at in owners.span(lane))
        return _slices(total, each=-(-total // cells), cells=cells)

    return End(grid=grid, stage=grid.pp - 1, owners=owners, sequence_parallel=sequence_parallel, cut=cut)


def _draw_end(choice: random.Random, grid: Grid, stage: int, rows: tuple[int, ...]) -> End:
    anyhow = (0, *sorted(choice.randint(0, len(rows)) for _ in range(grid.dp - 1)), len(rows))
    anywhere = Ownership.of([choice.randrange(grid.dp) for _ in rows], grid.dp)
    owners = choice.choice([*[Ownership.even(len(rows), grid.dp)] * 2, Ownership(anyhow), anywhere, anywhere])
    sequence_parallel = choice.random() < 0.4
    cells = grid.cp * grid.tp if sequence_parallel else grid.cp
    cuts = [_draw_cut(choice, [rows[at] for at in owners.span(lane)], cells) for lane in range(grid.dp)]
    return End(grid=grid, stage=stage, owners=owners, sequence_parallel=sequence_parallel, cut=cuts.__getitem__)


@pytest.fixture(scope="session")
def same_ranks() -> list[PlacedEdge]:
    """Return an edge between any two of some layouts of the same eight ranks, with uneven rows and none."""
    rows = (3, 0, 2, 1, 9, 5, 0, 4)
    layouts = ({"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}, {"tp": 8}, {"cp": 4, "tp": 2}, {"dp": 2, "cp": 4})
    ends: list[list[End]] = [[], []]
    for name, found in zip(("source", "target"), ends, strict=True):
        for sizes in layouts:
            grid = Grid(name=name, ranks=range(8), **sizes)
            found += [_even_end(grid, rows, sequence_parallel=sliced) for sliced in {False, grid.tp > 1}]
    return [PlacedEdge(world=8, source=source, target=target, rows=rows) for source in ends[0] for target in ends[1]]


@pytest.fixture(scope="session")
def draw_edge() -> Callable[[random.Random, int], PlacedEdge]:
    """Draw two placements in a world of ranks: anywhere, often on the same ranks, sometimes in the same layout."""

    def draw(choice: random.Random, world: int) -> PlacedEdge:
        rows = tuple(choice.choice([0, 1, 2, 5, 9]) for _ in range(choice.choice([0, 1, 3, 5, 8])))
        source = _draw_grid(choice, "source", world)
        target = choice.choice(
            [
                _draw_grid(choice, "target", world),
                _lay_out(choice, "target", source.ranks),
                attrs.evolve(source, name="target"),
            ]
        )
        ends = _draw_end(choice, source, source.pp - 1, rows), _draw_end(choice, target, 0, rows)
        if source.shape == target.shape and choice.random() < 0.5:
            ends = ends[0], attrs.evolve(ends[0], grid=target, stage=0)
        return PlacedEdge(world=world, source=ends[0], target=ends[1], rows=rows)

    return draw

"""Random module graphs, plans of them and routes, for the property tests."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import pytest
from hypothesis import strategies as st

from mimo.schedule import Peers, Plan
from mimo.schedule._one_forward_one_backward import OneForwardOneBackward, generate
from mimo.topology import Edge, Grid, Module, ModuleGraph

WORLD = 8


@attrs.frozen(kw_only=True)
class Case:
    """A graph and the plan of a step over it."""

    graph: ModuleGraph
    plan: Plan


@st.composite
def _modules(draw: st.DrawFn, name: str) -> Module:
    ranks = sorted(draw(st.sets(st.integers(0, WORLD - 1), min_size=1)))
    sizes: dict[str, int] = {}
    left = len(ranks)
    for axis in draw(st.permutations(["pp", "dp", "cp", "tp"]))[:3]:
        sizes[axis] = draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
        left //= sizes[axis]
    last = next(axis for axis in ("dp", "tp", "pp", "cp") if axis not in sizes)
    grid = Grid(name=name, ranks=ranks, **sizes, **{last: left})
    trains = draw(st.lists(st.booleans(), min_size=grid.pp, max_size=grid.pp))
    return Module(grid=grid, trains=tuple(trains), tied=draw(st.booleans()))


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    names = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
    pairs = [(low, high) for index, low in enumerate(names) for high in names[index + 1 :]]
    arrows = [pair for pair in pairs if draw(st.booleans())]
    graph = ModuleGraph(modules=tuple(draw(_modules(name)) for name in sorted(names)), arrows=tuple(arrows))
    return Case(graph=graph, plan=generate(graph, draw(st.integers(1, 8)), OneForwardOneBackward()))


@pytest.fixture(scope="session")
def cases() -> st.SearchStrategy[Case]:
    """Graphs of up to 4 modules on up to 8 ranks in any shape, with their 1F1B plans of up to 8 microbatches."""
    return _cases()


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

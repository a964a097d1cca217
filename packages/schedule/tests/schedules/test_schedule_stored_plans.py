"""Plans of graphs in which nothing lies behind the language model are what they were before any did, to the byte.

Whoever changes an order on purpose puts the new digests here, which a failure shows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mimo.schedule import Costs
from mimo.schedule.ahead import plugin as ahead
from mimo.schedule.schedules import gpipe, interleaved, one_forward_one_backward, zero_bubble
from mimo.topology import Grid, Module, ModuleGraph

PLUGINS: Mapping[str, Any] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "ahead": ahead,
}
"""Those whose config may be left out; the others are forms of zero-bubble."""


def _module(
    name: str, ranks: Sequence[int], *, pp: int = 1, chunks: int = 1, trains: bool = True, **keys: Any
) -> Module:
    grid = Grid(name=name, ranks=ranks, pp=pp, dp=len(ranks) // pp)
    return Module(grid=grid, trains=(trains,) * pp * chunks, chunks=chunks, **keys)


BEFORE: Mapping[str, Sequence[Module]] = {
    "nothing": (),
    "on a rank of the language model": (_module("vision", [0]),),
    "stages elsewhere": (_module("vision", [4, 5], pp=2, batch_factor=2),),
    "a frozen one beside": (_module("vision", [0, 1]), _module("audio", [2], trains=False)),
    "made ahead": (_module("vision", [0, 1], pp=2, trains=False, prefetch=True), _module("audio", [4])),
}
"""Modules that feed the language model."""
CASES = list(itertools.product(BEFORE, (2, 4), (8, 12)))
"""With its stages on four ranks, and the microbatches of a step."""


def digests_of(schedule: str) -> list[str]:
    """Return the beginning of the digest of each case's plan."""
    chunks, placement = {"interleaved": (2, "loop"), "v": (2, "v")}.get(schedule, (1, "loop"))
    found = []
    for name, stages, microbatches in CASES:
        language = _module("language", range(4), pp=stages, chunks=chunks, placement=placement)
        arrows = tuple((module.name, "language") for module in BEFORE[name])
        graph = ModuleGraph(modules=(*BEFORE[name], language), arrows=arrows)
        (spec,) = PLUGINS.get(schedule, zero_bubble).mimo_register_schedules()
        config = spec.config() if schedule in PLUGINS else spec.config(form=schedule)
        plan = spec.generate(graph, microbatches, config, Costs.even(graph))
        found.append(hashlib.sha256(plan.to_json().encode()).hexdigest()[:8])
    return found


STORED: Mapping[str, str] = {
    "1f1b": """
        f1b8bf16 d9a913e5 8c065720 1bfa177a 16d0f5fd 38421903 8cafae02 0ad619a2 af81b032 38a4dbf2
        867a226a 5ac9c926 bc964ed9 d2e453f9 da0467ca 67fbf21e 0eef2f74 50881c02 bb9b36e9 45271edc
    """,
    "gpipe": """
        e2a49500 a4b2e54b 055d7828 da5d4886 50395db5 f52d135e c1b8427b ab8c07c0 d1508f56 b347101f
        02770c1f 13ba7850 cf077a03 a9222d2b 57d4e3da 182e06a7 5c75deb5 eee32be1 bb21187d f71183c0
    """,
    "interleaved": """
        700646cd 1fd5c5d6 bea98497 7d12cbab 5f2fb42e ea1a1a7a 58266922 ef75c9aa b5b02439 4b0495ff
        c0ad8eba cce12df9 1383c3ce ceff3eee ebb28d8e 0fe96ace 17d3e9a9 ecc68640 fc8050a1 e9f3ece6
    """,
    "h1": """
        1c59cb06 758af05d 4cb4e313 c14115f3 6ae378f9 94cac89e 96683246 e5280f89 ac6d351a 55e591ff
        b106f357 8dd02e2b 6a9618d6 554143b4 a87d6310 59135754 230bf89c db9e01f9 f66a09e8 bbb7698a
    """,
    "h2": """
        9b01a7b2 65bf511e a8708ede bc22995b a749cb10 f78b95b0 58abb29c 6d98055b 2706f41e e099e17d
        1e5cfe98 09946614 b969f46d 4870908d 4736ec91 939782da 4e7b0c32 48680d37 4fb3773a 92c48e1c
    """,
    "v": """
        7416d9bd bdf9314a 9f1caeb3 2ae045bc a81ff81d 962939ff 07e94e3a 30e52748 fa8e2d85 ca22ac15
        cb63fa74 b7db5a23 292f92e2 76cab939 964045b1 0024b033 6f7083b4 e4c1b702 b64ef4f8 6b3cbb5b
    """,
    "ahead": """
        b4f6b3f9 bb855e56 fd9f9389 275e9cf2 82a5ea57 01dbf65d 9d82e5f1 afbca542 20fc203b 331cc0dd
        4b11b3ce 28177c93 af07f318 44522885 98e469c8 4bd93e3e 01ef9dcb b2f09c0d 394d24e5 29beab6b
    """,
}
"""By schedule, in the order of `CASES`."""


@pytest.mark.parametrize("schedule", STORED)
def test_plans_without_a_module_behind_are_what_they_were(schedule: str) -> None:
    """Of pipelines of two and four stages, with encoders before them or none."""
    assert digests_of(schedule) == STORED[schedule].split()

"""What the comparisons of a day on a GPU rest on: every family, layouts that resolve, bounds that are looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import pytest
import torch
from _compare import missed, relative_difference
from _layouts import layouts
from _models import GROUPS, models
from jobs import make_job
from tables import Table, world_of
from truth import Truth

MODELS: Mapping[str, Table] = {
    name: settings for group in GROUPS for name, settings in models(group, tiny=False).items()
}


def test_every_family_is_compared() -> None:
    """Each language model and encoder of ours beside a plain process."""
    plugins = {keys["plugin"] for settings in MODELS.values() for keys in settings["modules"].values()}
    assert plugins == {"decoder", "hybrid", "vit", "siglip", "clip", "radio", "whisper"}


def test_layouts_of_two_to_eight_ranks_are_accepted() -> None:
    """Each of them resolves, and is filed under the number of its ranks."""
    assert sorted(layouts()) == [2, 3, 4, 5, 6, 8]
    for world, named in layouts().items():
        assert {world_of(settings) for settings in named.values()} == {world}
        assert {make_job(settings).world for settings in named.values()} == {world}


def small() -> Truth:
    """Return a truth that is made up."""
    return Truth(
        losses=[2.0],
        terms={},
        norms=[1.0],
        gradients={"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)},
        weights={"a": torch.tensor([1.0, 0.0]), "b": torch.ones(2)},
        gap=math.inf,
    )


@pytest.mark.parametrize(
    ("tree", "name", "by", "expected"),
    [
        ("gradients", "a", 1e-4, "x: gradient a is off by 2 times what is allowed"),
        ("gradients", "b", 1e-7, "x: gradient b is off by 2 times what is allowed"),
        ("weights", "a", 3e-5, "x: weight a is off by 3 times what is allowed"),
        ("weights", "a", math.nan, "x: weight a is off by inf times what is allowed"),
    ],
)
def test_what_is_off_by_more_than_the_law_allows_is_named(tree: str, name: str, by: float, expected: str) -> None:
    """The worst of each kind, by how much; nothing where all is within."""
    assert list(missed("x", relative_difference(small(), small()))) == []
    changed = small()
    value = {"gradients": changed.gradients, "weights": changed.weights}[tree]
    value[name] = value[name].double() + torch.tensor([0.0, by], dtype=torch.float64)
    (line,) = missed("x", relative_difference(small(), changed))
    assert line == expected


def test_a_first_loss_that_is_off_is_named() -> None:
    """By more than 1e-6 of itself."""
    (line,) = missed("x", relative_difference(small(), attrs.evolve(small(), losses=[2.0 * (1 + 3e-6)])))
    assert line == "x: first loss is off by 3 times what is allowed"
    assert list(missed("x", relative_difference(small(), attrs.evolve(small(), losses=[math.nan]))))


def test_what_a_nudge_explains_is_excused() -> None:
    """As in the oracle of random layouts: five times what weights that begin as the next numbers change."""
    nudged, found = small(), small()
    nudged.gradients["a"][0] += 1e-4
    found.gradients["a"][0] += 4e-4
    assert relative_difference(small(), found, nudged=nudged).worst < 1 < relative_difference(small(), found).worst


def test_what_no_rank_holds_is_infinitely_wrong() -> None:
    """Pieces of all ranks are put together before they are judged."""
    lacking = small()
    del lacking.weights["b"]
    assert math.isinf(relative_difference(small(), lacking).worst)

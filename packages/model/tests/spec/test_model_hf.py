"""Tables of published weights: each kind of entry there and back, and what does not go with a table."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from mimo.hooks import CheckpointError, ConfigError
from mimo.model import HfFamily, HfTensor, file_shapes, match_names
from mimo.model.runtime import read_hf, write_hf
from mimo.model.spec.hf_keys import hf_number

SHAPES = {
    "query": (4, 6),
    "key": (2, 6),
    "kernel": (5, 3),
    "up": (2, 3, 4),
    "patch": (6, 12),
    "one": (1, 2),
    "low": (2, 4, 3),
    "high": (2, 2, 3),
    "left": (2, 3, 2),
    "right": (2, 5, 2),
    "parts": (5, 1, 2),
    "free": (3,),
}
TABLE = (
    HfTensor(ours="query", theirs="a.qk", rows=(0, 4)),
    HfTensor(ours="key", theirs="a.qk", rows=(4, 6)),
    HfTensor(ours="kernel", theirs="a.conv", shape=(5, 1, 3)),
    HfTensor(ours="up", theirs=("a.e.0", "a.e.1"), dims=(1, 0)),
    HfTensor(ours="patch", theirs="a.patch", shape=(6, 3, 2, 2), dims=(0, 2, 3, 1)),
    HfTensor(ours="one", theirs=("a.single.0",)),
    HfTensor(ours="low", theirs="a.both", rows=(2, 6), along=1),
    HfTensor(ours="high", theirs="a.both", rows=(0, 2), along=1),
    HfTensor(ours="left", theirs="a.turned", rows=(0, 3), along=2, dims=(0, 2, 1)),
    HfTensor(ours="right", theirs="a.turned", rows=(3, 8), along=2, dims=(0, 2, 1)),
    HfTensor(ours="parts", theirs=("a.p", "a.q"), lengths=(3, 2)),
)
THEIRS = {
    "a.qk": (6, 6),
    "a.conv": (5, 1, 3),
    "a.e.0": (4, 3),
    "a.e.1": (4, 3),
    "a.patch": (6, 3, 2, 2),
    "a.single.0": (2,),
    "a.both": (2, 6, 3),
    "a.turned": (2, 2, 8),
    "a.p": (3, 1, 2),
    "a.q": (2, 1, 2),
}


def family(table: tuple[HfTensor, ...] = TABLE) -> HfFamily:
    """Return a family whose names may begin otherwise, and that ignores some."""
    return HfFamily(
        model_type="toy",
        architecture="Toy",
        settings=dict,
        describe=dict,
        tensors=lambda _config: table,
        renamed=({}, {"a.": "b."}, {"": "deep.", "a.e": "experts"}),
        ignored=("z.*",),
    )


def toy(seed: int = 0) -> nn.Module:
    """Return a module of parameters of all shapes."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Module()
    for name, shape in SHAPES.items():
        setattr(module, name, nn.Parameter(torch.randn(shape, generator=generator)))
    return module


def same(one: nn.Module, other: nn.Module) -> dict[str, bool]:
    """Return which parameters are the same, to the bit."""
    return {
        name: torch.equal(mine, theirs)
        for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True)
    }


def test_what_is_written_is_read_back() -> None:
    """Fused, reshaped, stacked, turned, cut, to the bit; what the table leaves out is listed and unchanged."""
    module, other = toy(), toy(seed=1)
    written = write_hf(module, family(), None)
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == THEIRS
    ours = dict(module.named_parameters())
    assert torch.equal(written["a.qk"], torch.cat([ours["query"], ours["key"]]))
    assert torch.equal(written["a.e.1"], ours["up"][1].T)
    assert torch.equal(written["a.q"], ours["parts"][3:])
    assert torch.equal(written["a.patch"][1, 2, 0, 1], ours["patch"].view(6, 2, 2, 3)[1, 0, 1, 2])
    assert read_hf(other, family(), None, written) == ("free",)
    assert same(module, other) == {name: name != "free" for name in SHAPES}


@pytest.mark.parametrize(
    ("before", "after"), [("a.", "b."), ("", "deep."), ("a.", "a.")], ids=["renamed", "below", "as it is"]
)
def test_names_may_begin_otherwise(before: str, after: str) -> None:
    """The beginning that fits most names is taken, the longest one counts, and ignored names don't matter."""
    module, other = toy(), toy(seed=1)
    written = {f"{after}{name.removeprefix(before)}": one for name, one in write_hf(module, family(), None).items()}
    if after == "deep.":
        written = {name.replace("deep.a.e", "experts"): one for name, one in written.items()}
    read_hf(other, family(), None, {**written, "z.1": torch.zeros(1)})
    assert sum(same(module, other).values()) == len(SHAPES) - 1


def test_one_error_names_all_that_does_not_fit_and_nothing_changes() -> None:
    """Missing, misshapen and unexpected tensors."""
    module, other = toy(), toy(seed=1)
    written: dict[str, Tensor] = write_hf(module, family(), None)
    wrong = {**written, "a.qk": torch.zeros(7, 6), "a.more": torch.zeros(1)}
    del wrong["a.e.1"]
    with pytest.raises(CheckpointError) as caught:
        read_hf(other, family(), None, wrong)
    assert str(caught.value) == (
        "weights of toy: expected those of this module, got a.e.1 is missing; a.qk has the shape [7, 6], not [6, 6]; "
        "a.more is read by nothing."
    )
    assert all(same(other, toy(seed=1)).values())


def test_whole_numbers_that_follow_from_the_config_are_written_and_must_be_so() -> None:
    """Under whatever beginning, of whatever whole type; a folder may be without them."""
    numbers = torch.tensor([[2, 1], [0, 3]])
    of = attrs.evolve(family(), constants=lambda _config: {"a.index": numbers})
    module = toy()
    written = write_hf(module, of, None)
    assert torch.equal(written.pop("a.index"), numbers)
    read_hf(toy(seed=1), of, None, written)
    there = {name.replace("a.", "b."): one for name, one in written.items()}
    read_hf(toy(seed=1), of, None, {**there, "b.index": numbers.int()})
    for wrong in (numbers + 1, numbers[:1]):
        with pytest.raises(
            CheckpointError, match=r"got b\.index is not of the numbers that follow from the settings\."
        ):
            read_hf(toy(seed=1), of, None, {**there, "b.index": wrong})


def test_parts_must_make_up_the_whole() -> None:
    """Else rows of ours would be left as they are."""
    with pytest.raises(ValueError, match=r"the table puts 4 rows into a, of shape \(5, 2\)"):
        file_shapes([HfTensor(ours="a", theirs=("b", "c"), lengths=(2, 2))], {"a": (5, 2)})


def test_a_second_copy_of_a_tensor_must_be_one() -> None:
    """Under whatever beginning; else one of the two would be lost without a word."""
    module, other = toy(), toy(seed=1)
    tied = attrs.evolve(family(), copies=lambda _config: {"a.again": "a.patch"})
    written = {name.replace("a.", "b."): one for name, one in write_hf(module, family(), None).items()}
    read_hf(other, tied, None, {**written, "b.again": written["b.patch"].clone()})
    with pytest.raises(CheckpointError, match=r"got b.again is not a copy of b.patch, though it is tied\."):
        read_hf(other, tied, None, {**written, "b.again": written["b.patch"] + 1})


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((3, 5), "rows 3 to 5 of a.qk"),
        ((5, 7), "rows 5 to 7 of a.qk"),
        ((4, 7), "rows 4 to 7 of a.qk, a part of shape"),
    ],
    ids=["overlapping", "with a gap", "of another length"],
)
def test_a_table_that_does_not_read_each_row_once_is_refused(rows: tuple[int, int], text: str) -> None:
    """As rows would be lost in a folder that is written by it."""
    table = [TABLE[0], HfTensor(ours="key", theirs="a.qk", rows=rows)]
    with pytest.raises(ValueError, match=text):
        file_shapes(table, SHAPES)


def test_the_first_beginning_is_written() -> None:
    """And of several that fit equally well the first is read."""
    renamed, table = match_names(family(), TABLE, ())
    assert (renamed, table) == ({}, list(TABLE))
    names: Any = [name.replace("a.", "b.") for name in THEIRS]
    assert match_names(family(), TABLE, names)[1][0].theirs == "b.qk"


@pytest.mark.parametrize(
    ("value", "found"), [(8, 8), (8.0, 8), (8.5, None), (math.inf, None), ("8", None), (True, None)]
)
def test_a_whole_number_may_be_written_with_a_point(value: object, found: int | None) -> None:
    """As some writers of JSON have it; what is not whole is refused."""
    if found is None:
        with pytest.raises(ConfigError, match="expected a whole number"):
            hf_number({"size": value}, "size")
        return
    assert hf_number({"size": value}, "size") == found
    assert type(hf_number({"size": value}, "size")) is int

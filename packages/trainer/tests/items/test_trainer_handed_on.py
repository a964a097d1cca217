"""Items that a lane's ranks decode once between them arrive whole on all of them, and so do errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.data import PlacedItem
from mimo.hooks import DataError, ItemInfo
from mimo.trainer.items.handed_on import decoder_of, hand_on, is_handed_on

CPU = torch.device("cpu")
WORLD = 4


def an_item(number: int) -> dict[str, Tensor]:
    """Return an item of several tensors of uneven sizes and kinds, one of them empty, one without dims."""
    return {
        "pixels": torch.arange(3 * number, dtype=torch.float32).view(3, number) + number,
        "mask": torch.arange(number) % 2 == 0,
        "none": torch.empty(0, 4, dtype=torch.bfloat16),
        "half": torch.full((number + 1,), number, dtype=torch.bfloat16),
        "count": torch.tensor(number),
    }


def groups() -> list[dist.ProcessGroup]:
    """Return this rank's groups of a lane of two context by two tensor ranks; every rank makes all."""
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    rank = dist.get_rank()
    return [made[rank // 2], made[2 + rank % 2]]


def run_handed(rank: int, fails: int) -> list[list[list[object]]] | str:
    """Hand on seven items, of which rank 3 has none, and return what came, or what was raised."""
    own = {number: an_item(number) for number in range(7) if number % 3 == rank}
    fault = DataError("a.jsonl:7", expected="a picture", got="half of one", fix="Mend it.") if rank == fails else None
    try:
        found = hand_on(own, fault, groups=groups(), device=CPU)
    except DataError as error:
        return str(error)
    return [
        [[name, str(value.dtype), *value.shape, value.flatten().tolist()] for name, value in sorted(found[n].items())]
        for n in range(7)
    ]


def test_every_rank_has_every_item_as_it_was_decoded(run_ranks: Callable[..., list[Any]]) -> None:
    """Bit by bit, over both axes, whatever each has decoded."""
    wanted = [
        [[name, str(value.dtype), *value.shape, value.flatten().tolist()] for name, value in sorted(an_item(n).items())]
        for n in range(7)
    ]
    assert run_ranks(WORLD, partial(run_handed, fails=-1)) == [wanted] * WORLD


@pytest.mark.parametrize("fails", range(WORLD))
def test_an_item_that_one_rank_cannot_decode_is_reported_by_all(
    fails: int, run_ranks: Callable[..., list[Any]]
) -> None:
    """In the same words, so that none waits for it, also those that don't meet it in a group."""
    (said,) = set(map(str, run_ranks(WORLD, partial(run_handed, fails=fails))))
    assert said == "a.jsonl:7: expected a picture, got half of one. Mend it."


def place(sample: int, index: int, size: tuple[int, ...]) -> PlacedItem:
    """Return an item somewhere in a sample."""
    return PlacedItem(info=ItemInfo(sample=sample, index=index, modality="image", size=size), runs=((0, 1),))


def test_items_are_handed_on_where_there_is_enough_to_decode() -> None:
    """Their sizes decide, which every rank knows; without items nobody meets."""
    items = [place(0, 0, (20, 30)), place(1, 0, (20, 20))]
    assert is_handed_on(items, 1000)
    assert not is_handed_on(items, 1001)
    assert not is_handed_on([], 0)


def test_ranks_decode_about_equally_many() -> None:
    """Of samples in any order, with any number of items."""
    infos = [place(sample, index, (1,)).info for sample in range(100) for index in range(1 + sample % 3)]
    counts = Counter(decoder_of(info, 4) for info in infos)
    assert max(counts.values()) <= 1.1 * min(counts.values())

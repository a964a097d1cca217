"""What a rank keeps of a step that waits for a restart: exactly what it was, or refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from mimo.hooks import CheckpointError, ItemInfo, RunError
from mimo.trainer.batch.saved_samples import KeptSamples
from mimo.trainer.rerun.record import RankRecord
from mimo.trainer.step.probe import Computation

COMPUTATION = Computation(kind="forward", module="vision", stage=1, microbatches=(0, 1))


class Dataset:
    """Two samples, each read once at most."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return 2

    def tokens(self, sample: int) -> list[int]:
        self.asked.append(("tokens", sample))
        return [sample, 2**40, 7]

    def weights(self, sample: int) -> list[float] | None:
        self.asked.append(("weights", sample))
        return [0.1, 0, 3] if sample else None

    def infos(self, sample: int) -> list[ItemInfo]:
        self.asked.append(("infos", sample))
        return [ItemInfo(sample=sample, index=0, modality="image", size=(3, 4), role="both")]

    def raw(self, sample: int, index: int) -> int:
        self.asked.append(("raw", sample))
        return sample + index

    def where(self, sample: int) -> str:
        return f"lines:{sample}"


def record() -> RankRecord:
    """Return one that holds something of all."""
    samples = KeptSamples(numbers=(1, 0, 1), broken={2: (0, 3)}, base=Dataset())
    for number in (1, 0, 1):
        samples.tokens(number)
        samples.weights(number)
        samples.infos(number)
    samples.item(
        ("vision", 1, 0), lambda: {"pixels": torch.rand(3, 2, dtype=torch.bfloat16), "none": torch.zeros(0, 4)}
    )
    return RankRecord(
        samples=samples,
        norms={COMPUTATION: math.nan, Computation(kind="gradients", module="vision", stage=1): 0.1},
        generators={"cpu": torch.get_rng_state()},
        buffers={"held.0.calls": torch.tensor(3.0), "held.0.mask": torch.tensor([True, False, True])},
    )


def test_a_record_reads_back_as_it_was() -> None:
    """Numbers of any kind to the bit, those that are not finite too, and no array of nothing is lost."""
    before = record()
    found = RankRecord.from_bytes(before.to_bytes(), "here")
    assert (found.samples.numbers, found.samples.broken) == ((1, 0, 1), {2: (0, 3)})
    for number in (0, 1):
        assert found.samples.tokens(number) == before.samples.tokens(number) == (number, 2**40, 7)
        assert found.samples.weights(number) == before.samples.weights(number) == ((0.1, 0, 3) if number else None)
        assert found.samples.infos(number) == before.samples.infos(number)
        assert found.samples.where(number) == f"lines:{number}"
    item, old = (one.samples.item(("vision", 1, 0), dict) for one in (found, before))
    assert item.keys() == old.keys()
    assert all(same(item[name], old[name]) for name in old)
    assert list(found.norms) == list(before.norms)
    assert repr(list(found.norms.values())) == "[nan, 0.1]"
    for ours, theirs in ((found.generators, before.generators), (found.buffers, before.buffers)):
        assert ours.keys() == theirs.keys()
        assert all(same(ours[name], theirs[name]) for name in theirs)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and values."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_samples_are_read_once() -> None:
    """So that a step runs again from what was read, whatever the dataset would say now."""
    data = Dataset()
    kept = KeptSamples(numbers=(1,), base=data)
    for _ in range(2):
        kept.tokens(1)
        kept.weights(1)
        kept.infos(1)
        kept.item(("vision", 1, 0), lambda: {"x": torch.tensor(kept.raw(1, 0))})
    assert data.asked == [("tokens", 1), ("weights", 1), ("infos", 1), ("raw", 1)]


def test_numbers_without_a_place_are_refused() -> None:
    """Rather than written as something else."""
    samples = KeptSamples(numbers=(), items={("audio", 0, 0): {"wave": torch.zeros(2, dtype=torch.complex64)}})
    with pytest.raises(RunError, match=r"numbers of a kind of float64, .* in what an encoder prepares, got complex64"):
        RankRecord(samples=samples, norms={}, generators={}, buffers={}).to_bytes()


def text_of(data: Tensor) -> tuple[int, dict[str, object]]:
    """Return the length of a record's text, and the text."""
    length = int(data[:8].clone().view(torch.int64)[0])
    return length, json.loads(bytes(data[8 : 8 + length].tolist()))


def with_text(data: Tensor, text: object) -> Tensor:
    """Return a record with another text."""
    length, _ = text_of(data)
    head = json.dumps(text).encode()
    size = torch.tensor([len(head)]).view(torch.uint8)
    return torch.cat([size, torch.tensor(list(head), dtype=torch.uint8), data[8 + length :]])


def test_the_layout_is_as_written_down() -> None:
    """Eight bytes, text, and arrays from multiples of eight bytes on: the tokens of the first sample come first."""
    data = record().to_bytes()
    length, text = text_of(data)
    arrays = text["arrays"]
    assert isinstance(arrays, list)
    assert arrays[0] == {"dtype": "int64", "shape": [3], "begin": 0}
    assert all(one["begin"] % 8 == 0 for one in arrays)
    body = data[8 + length :]
    assert body[:24].clone().view(torch.int64).tolist() == [1, 2**40, 7]


@pytest.mark.parametrize(
    "change",
    [
        {"arrays": [{"dtype": "float32", "shape": [10**15], "begin": 0}]},
        {"arrays": [{"dtype": "float32", "shape": [-1, -4], "begin": 0}]},
        {"arrays": [{"dtype": "object", "shape": [1], "begin": 0}]},
        {"arrays": []},
        {"norms": 10**6},
        {"deeds": [["explode", "vision", 0, []]]},
        {"samples": "none"},
        {"numbers": [math.inf]},
    ],
)
def test_damaged_records_are_refused(change: dict[str, object]) -> None:
    """Without allocating what they ask for."""
    data = record().to_bytes()
    _, text = text_of(data)
    with pytest.raises(CheckpointError, match=r"here: expected the record of a step, got \d+ bytes that are none"):
        RankRecord.from_bytes(with_text(data, {**text, **change}), "here")


@pytest.mark.parametrize("length", [0, 7, 8, 100])
def test_records_that_are_cut_short_are_refused(length: int) -> None:
    """Wherever they end."""
    with pytest.raises(CheckpointError, match="the record of a step"):
        RankRecord.from_bytes(record().to_bytes()[:length], "here")

"""Random numbers from keys: known answers, statistics, and that neighbouring keys are independent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mimo.hooks import ConfigError, PluginError
from mimo.model.draws import (
    DrawKeys,
    Drawn,
    Dropout,
    DropPath,
    Site,
    fold,
    item_keys,
    keep,
    key_of,
    key_of_name,
    normal,
    sample_rows,
    step_key,
    threshold_of,
    uniform,
)
from mimo.model.runtime import TensorAxis

ROWS, COUNT = 512, 500
CPU = torch.device("cpu")


def _keys(seed: int = 7) -> Tensor:
    return fold(key_of(seed), torch.arange(ROWS))


def test_numbers_are_those_of_splitmix64() -> None:
    """The first three outputs of the published generator that begins at 0."""
    found = [int(fold(torch.tensor(0), place)) % 2**64 for place in range(3)]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert fold(torch.tensor(0), torch.arange(3)).tolist() == [int(fold(torch.tensor(0), place)) for place in range(3)]


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    """Mean, variance and chi-square over 256 bins are those of 256,000 even numbers; no end is among them."""
    found = uniform(_keys(), COUNT).double().flatten()
    assert 0 < float(found.min()) < float(found.max()) < 1
    deviation = 1 / math.sqrt(12 * len(found))
    assert abs(float(found.mean()) - 0.5) < 4 * deviation
    assert abs(float(found.var()) - 1 / 12) < 4 / math.sqrt(180 * len(found))
    bins = torch.bincount((found * 256).long(), minlength=256).double()
    expected = len(found) / 256
    chi_square = float(((bins - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


def test_normal_numbers_have_the_moments_and_tails_of_a_normal_distribution() -> None:
    """Mean 0, variance 1, no skew, a fourth moment of 3, and a share of 0.0455 beyond two deviations."""
    found = normal(_keys(), COUNT).double().flatten()
    root = math.sqrt(len(found))
    for power, (expected, deviation) in enumerate([(0, 1), (1, math.sqrt(2)), (0, math.sqrt(15)), (3, math.sqrt(96))]):
        assert abs(float((found ** (power + 1)).mean()) - expected) < 4 * deviation / root
    assert abs(float((found.abs() > 2).double().mean()) - 0.0455) < 4 * math.sqrt(0.0455) / root


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_as_much_is_kept_as_the_rate_says(rate: float) -> None:
    """Over all, and in the columns and rows that deviate most."""
    found = keep(_keys(), COUNT, threshold_of(rate)).double()
    deviation = math.sqrt(rate * (1 - rate))
    for mean, count in ((found.mean(), found.numel()), (found.mean(0), ROWS), (found.mean(1), COUNT)):
        assert float((mean - (1 - rate)).abs().max()) <= 4.5 * deviation / math.sqrt(count)


def _mask(*, seed: int = 1, step: int = 1, sample: int = 1, first: int = 0, site: str = "language.layers.0") -> Tensor:
    positions = torch.arange(first, first + ROWS)
    rows = sample_rows(step_key(seed, step), torch.full((ROWS,), sample), positions)
    return keep(fold(rows[:, 0], key_of_name(site)), COUNT, threshold_of(0.5)).double().flatten() * 2 - 1


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"step": 2},
        {"sample": 2},
        {"first": 1},
        {"site": "language.layers.1"},
        {"site": "vision.layers.0"},
        {"seed": 2, "step": 0},
        {"step": 2, "sample": 0},
    ],
)
def test_keys_side_by_side_draw_independently(other: dict[str, int | str]) -> None:
    """Seeds, steps, samples, rows, layers and modules that are neighbours agree on half of what they keep."""
    one, another = _mask(), _mask(**other)  # type: ignore[arg-type]
    assert abs(float((one * another).mean())) < 4 / math.sqrt(one.numel())


def test_features_and_rows_side_by_side_draw_independently() -> None:
    """Also the two halves of a word, and a row and the next."""
    mask = _mask().view(ROWS, COUNT)
    for one, other in (
        (mask[:, :-1], mask[:, 1:]),
        (mask[:, :-2], mask[:, 2:]),
        (mask[:, ::2], mask[:, 1::2]),
        (mask[:-1], mask[1:]),
        (mask[:-1, :-1], mask[1:, 1:]),
    ):
        assert abs(float((one * other).mean())) < 4 / math.sqrt(one.numel())


@pytest.mark.parametrize(("first", "count"), [(0, 4), (3, 6), (4, 0), (7, 93)])
def test_columns_are_those_of_the_full_width(first: int, count: int) -> None:
    """Wherever a cut falls, within a word too."""
    keys = _keys()
    for draw in (uniform, normal):
        assert torch.equal(draw(keys, count, first=first), draw(keys, 100)[:, first : first + count])
    kept = keep(keys, 100, threshold_of(0.3))
    assert torch.equal(keep(keys, count, threshold_of(0.3), first=first), kept[:, first : first + count])


def test_generators_of_torch_stay_as_they_were() -> None:
    """Drawing neither reads nor moves their state."""
    before = torch.get_rng_state()
    first = uniform(_keys(), COUNT)
    torch.rand(3)
    assert torch.equal(uniform(_keys(), COUNT), first)
    torch.set_rng_state(before)
    keep(_keys(), COUNT, threshold_of(0.5))
    assert torch.equal(torch.get_rng_state(), before)


def _dropping(layer: Dropout, keys: DrawKeys, *, first: int = 0) -> Dropout:
    layer.site = Site.of("language.drop", layer.rate, keys=keys, device=CPU, first=first)
    return layer


def _rows(count: int) -> Tensor:
    return sample_rows(step_key(1, 1), torch.arange(count) // 3, torch.arange(count) % 3)


def test_dropout_scales_what_it_keeps_and_drops_nothing_without_keys() -> None:
    """Features are 0 or divided by the probability that they stay, and so are their gradients."""
    keys = DrawKeys(module="language")
    layer = _dropping(Dropout(0.25), keys)
    x = torch.ones(6, 40, requires_grad=True)
    assert layer(x) is x
    with keys.at(Drawn(_rows(6))):
        y = layer(x)
    assert set(y.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    (gradient,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(gradient, y)
    assert layer(x) is x


def test_slices_of_rows_drop_what_all_rows_drop() -> None:
    """A tensor rank's slice under sequence parallelism, and a span of features, are cut from the whole."""
    x, rows = torch.ones(6, 40), _rows(6)
    whole = DrawKeys(module="language")
    with whole.at(Drawn(rows)):
        expected = _dropping(Dropout(0.5), whole)(x)
    for rank in range(3):
        keys = DrawKeys(module="language", axis=TensorAxis(rank=rank, size=3, sequence_parallel=True))
        layer = _dropping(Dropout(0.5), keys)
        with keys.at(Drawn(rows)):
            assert torch.equal(layer(x), expected)
            assert torch.equal(layer(x[:2]), expected[2 * rank : 2 * rank + 2])
            with pytest.raises(PluginError, match=r"6 rows, of which it has said what they are, got 5 others\. Set"):
                layer(x[:5])
    part = _dropping(Dropout(0.5), whole, first=13)
    with whole.at(Drawn(rows)):
        assert torch.equal(part(x[:, 13:20]), expected[:, 13:20])


def test_drop_path_drops_items_whole() -> None:
    """All rows of an item in packed rows, all of an image where images are stacked, and the same ones in both."""
    keys = DrawKeys(module="vision")
    layer = _dropping(DropPath(0.5), keys)
    items = item_keys(step_key(1, 1), range(40), [0] * 40)
    with keys.at(Drawn(items=items)):
        with keys.at(keys.packed([3] * 40, device=CPU)):
            packed = layer(torch.ones(120, 5)).view(40, 3, 5)
        with keys.at(keys.stacked(CPU)):
            stacked = layer(torch.ones(40, 3, 5))
            pictures = layer(torch.ones(40, 5, 2, 2))
    assert torch.equal(packed, stacked)
    assert torch.equal(pictures[:, 0, 0, 0], stacked[:, 0, 0])
    dropped = (packed == 0).flatten(1)
    assert torch.equal(dropped.all(1), dropped.any(1))
    assert 10 < int(dropped.all(1).sum()) < 30


def test_no_items_have_no_keys() -> None:
    """Which is an ordinary case: packed or stacked, whole or in parts."""
    keys = DrawKeys(module="vision")
    with keys.at(Drawn(items=item_keys(step_key(1, 1), [], []))), keys.at(keys.parts([])):
        for drawn in (keys.packed([], device=CPU), keys.stacked(CPU)):
            with keys.at(drawn):
                assert _dropping(Dropout(0.5), keys)(torch.ones(0, 3)).shape == (0, 3)
                assert _dropping(DropPath(0.5), keys)(torch.ones(0, 3)).shape == (0, 3)
        padding = keys.packed([], range(4), device=CPU).rows
        assert padding is not None
        assert padding.tolist() == [[0, 0]] * 4


def test_slices_of_packed_items_are_cut_from_the_whole() -> None:
    """Also where they begin within an item, and reach beyond the last one; tiles of an item have keys of their own."""
    keys = DrawKeys(module="vision")
    items = item_keys(step_key(1, 1), [4, 4, 9], [0, 1, 0])
    with keys.at(Drawn(items=items)), keys.at(keys.parts([1, 2, 0])):
        assert keys.items is not None
        assert len(set(keys.items.tolist())) == 3
        whole = keys.packed([2, 3, 4], device=CPU).rows
        assert whole is not None
        assert len(set(whole[:, 0].tolist())) == 9
        cut = keys.packed([2, 3, 4], range(6, 12), device=CPU).rows
        assert cut is not None
        assert torch.equal(cut[:3], whole[6:])
        assert cut.shape == (6, 2)
        some = keys.packed([2, 3, 4], torch.tensor([8, 0, 0]), device=CPU).rows
        assert some is not None
        assert torch.equal(some, whole[[8, 0, 0]])
        with pytest.raises(
            PluginError, match=r"modules\.vision\.plugin: expected random draws .* over the rows of 3 items"
        ):
            keys.packed([2, 3], device=CPU)
        with pytest.raises(PluginError, match=r"of which it has said what they are \(DrawKeys\.packed\), got 2 others"):
            _dropping(Dropout(0.5), keys)(torch.ones(2, 3))


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    """What would drop all, or isn't a rate."""
    with pytest.raises(ConfigError, match=r"rate: expected a rate of 0 or more and less than 1, got "):
        Dropout(rate)

"""Slice 3 of a day on a GPU, tiny, on the CPU; and that it finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import _attention
import _attention_rates
import _call_costs
import _experts
import attrs
import pytest
import torch
from _attention import FORMS, Given, plain
from _case import Case
from _rows import chat, images, shares_of, worst_row
from _turns_taken import Took, ratio, take_turns

from mimo.model.attention.batches import CallCost
from mimo.model.attention.kernels import Kernel
from mimo.model.layers.grouped_linear import GroupedLinear

CPU = Case(device=torch.device("cpu"), tiny=True, folder=Path())
GPU = Case(device=torch.device("cuda:0"), tiny=True, folder=Path())


def test_attention_is_compared_in_every_form_and_kind_of_number() -> None:
    """Each within what rounding allows, and not every form exact, as it would be if it were compared with itself."""
    found = _attention.test(CPU)
    assert not found.wrong
    by_dtype: dict[str, list[float]] = {}
    beside = {name: share for name, share in found.figures.items() if ", beside " in name}
    fused = sum(_attention.takes(CPU, form, torch.float32) is Kernel.FUSED for form in FORMS.values())
    assert len(beside) == len(_attention.DTYPES) * fused > 0, "products beside the fused kernel"
    assert 0 < max(beside.values()) <= 1
    for name, shares in found.figures.items():
        if ": " in name and name not in beside:
            by_dtype.setdefault(name.partition(",")[0], []).append(max(shares.values()))
    assert {dtype: len(worst) for dtype, worst in by_dtype.items()} == dict.fromkeys(by_dtype, len(FORMS))
    assert len(by_dtype) == len(_attention.DTYPES)
    assert all(0 < max(worst) <= 1 for worst in by_dtype.values()), by_dtype


def test_a_kernel_that_differs_from_the_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from one that pads, where the form is computed without padding."""
    attended = _attention.attended
    calls: list[int] = []

    def differ(*given: Any) -> Any:
        calls.append(len(calls))
        value, gradients = attended(*given)
        return value * (1 + 0.5 * (len(calls) == 2)), gradients

    monkeypatch.setattr(_attention, "attended", differ)
    monkeypatch.setattr(_attention, "takes", lambda *_given: Kernel.VARLEN)
    found = _attention.beside_others(CPU, FORMS["grouped heads"], torch.bfloat16, chat(96, 5))
    assert found["padded"] > 1 >= found["padded, by products"]
    assert len(calls) == 3


@pytest.mark.parametrize(
    "change", [{"window": 19}, {"window": 21}, {"causal": False, "window": 0}, {"items": True}], ids=str
)
def test_one_row_more_or_less_that_is_seen_is_found(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kind of number that allows most."""
    wanted = FORMS["window"]
    monkeypatch.setattr(_attention, "plain", lambda form, *given: plain(attrs.evolve(form, **change), *given))
    shares = _attention.compare(CPU, wanted, torch.bfloat16, chat(96, 5))
    assert shares["value"] > 1
    assert min(shares["gradient of key"], shares["gradient of value"]) > 1


def test_sinks_and_caps_are_part_of_the_truth() -> None:
    """Without either, rows come out otherwise."""
    lengths = chat(40, 3)
    rows = [plain(FORMS[name], Given.of(FORMS[name], 40, CPU.device), lengths) for name in ("causal", "soft cap")]
    assert not torch.allclose(rows[0], rows[1])
    sunk = Given.of(FORMS["sinks"], 40, CPU.device)
    without = attrs.evolve(FORMS["sinks"], sinks=False)
    assert not torch.allclose(plain(FORMS["sinks"], sunk, lengths), plain(without, sunk, lengths))


def test_a_row_that_is_off_is_found_among_many() -> None:
    """As a share of its own norm, or of the mean row's; what is not finite is infinitely wrong."""
    truth = torch.ones(1000, 4)
    found = truth.clone()
    found[17] *= 1.25
    assert worst_row(found, truth) == pytest.approx(0.25)
    assert worst_row(truth, truth) == 0
    found[18, 2] = torch.nan
    assert worst_row(found, truth) == torch.inf
    small = torch.cat([torch.ones(3, 1), torch.zeros(1, 1)])
    assert worst_row(small + 0.5 * (small == 0), small) == pytest.approx(0.5 / 0.75**0.5)
    assert worst_row(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
    off = truth * (1 + torch.finfo(torch.bfloat16).eps)
    assert shares_of(torch.bfloat16, (off, truth), {"x": (off, truth)}) == {"value": 0.25, "gradient of x": 0.125}


def test_rows_are_as_many_as_was_said() -> None:
    """Samples fill the rows; images have sides of a third of the most to the most."""
    assert sum(chat(8192, 23)) == 8192
    assert len(chat(8192, 23)) == 23
    assert min(chat(8192, 23)) > 0
    assert all(8 * 8 <= patches <= 24 * 24 for patches in images(64))


def test_all_ways_of_attention_are_timed_over_the_same_rows() -> None:
    """Ours, the bare kernel and a padded call attend to the same, forward and backward."""
    found = _attention_rates.test(CPU)
    assert not found.wrong
    assert found.figures["left out"].startswith("the kernel without padding")
    (rows,) = _attention_rates.cases(tiny=True).values()
    torch.manual_seed(1)
    ways = _attention_rates.ways(rows, CPU.device)
    ours, bare, padded = (way()() for way in ways.values())
    assert isinstance(ours, tuple)
    assert isinstance(bare, tuple)
    assert isinstance(padded, tuple)
    for one, other, wide in zip(ours, bare, padded, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
        kept = [sample[:, :length].transpose(0, 1) for sample, length in zip(wide, rows.lengths, strict=True)]
        torch.testing.assert_close(one, torch.cat(kept), atol=0.02, rtol=0.02)


class _Events:
    """Stands in for a GPU's clock: each that is recorded is a second after the one before."""

    now = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _Events.now += 1000
        self.at = _Events.now

    def elapsed_time(self, other: _Events) -> float:
        return float(other.at - self.at)


def test_on_a_gpu_its_own_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In milliseconds, over all repeats of a round."""
    monkeypatch.setattr(torch.cuda, "Event", _Events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "ones", lambda *_args, **_keys: torch.eye(2))
    done = []
    took = take_turns(GPU, {"a": lambda: lambda: done.append("a")}, rounds=3, repeats=4)
    assert took == {"a": [Took(0.25, 0.25)] * 3}
    assert len(done) == 16


def slower(share: float) -> Callable[..., Any]:
    """Return what finds that ours takes so many times as long as others."""
    return lambda _case, ways, **_keys: {
        name: [Took(share, share) if name in ("attend", "grouped") else Took(1, 1)] * 3 for name in ways
    }


@pytest.mark.parametrize(
    ("program", "share", "words"),
    [
        (_attention_rates, 1.19, ""),
        (_attention_rates, 1.21, "chat: backward takes 1.21 times as long as the bare kernel, allowed 1.2"),
        (_experts, 1.6, ""),
        (_experts, 1.7, "ragged loads: forward has 0.588 of the rate of a dense product, at least 0.6"),
    ],
)
def test_what_is_too_slow_on_a_gpu_is_named(
    program: Any, share: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing where it is quick enough."""
    monkeypatch.setattr(program, "take_turns", slower(share))
    monkeypatch.setattr(
        program, "ways", lambda *_args: dict.fromkeys(("attend", "varlen_attn", "padded", "grouped", "dense"))
    )
    monkeypatch.setattr(_experts, "compare", lambda *_args: {"value": 0.5})
    wrong = program.test(GPU).wrong
    assert bool(wrong) == bool(words)
    assert not words or words in wrong


def test_the_ratio_is_that_of_rounds() -> None:
    """One slow round of both changes nothing."""
    assert ratio([Took(2, 1), Took(20, 10), Took(2, 1)], [Took(1, 1), Took(10, 10), Took(1, 1)]) == Took(2, 1)


def test_products_of_experts_are_right() -> None:
    """With loads that are even and ragged, of which one is nothing."""
    found = _experts.test(CPU)
    assert not found.wrong
    for name, counts in _experts.loads(_experts.FAST).items():
        assert sum(counts) == _experts.FAST.rows, name
    assert _experts.loads(_experts.FAST)["ragged"][1] == 0


def test_rows_that_go_to_the_wrong_expert_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and both gradients."""
    forward = GroupedLinear.forward
    monkeypatch.setattr(GroupedLinear, "forward", lambda self, x, counts: forward(self, x, [*counts][::-1]))
    shares = _experts.compare(CPU, _experts.TINY, torch.bfloat16, [20, 0, 25, 15])
    assert min(shares.values()) > 1


def test_costs_of_calls_follow_from_their_times() -> None:
    """A pair, a call, a row and a masked pair that cost so much are found again."""
    pair, cost = 1e-9, CallCost(call=3000, row=40, masked=1.5)

    def of(lengths: list[int], how: Any = _call_costs.ONE, *, causal: bool = False) -> float:
        assert not causal
        groups = [lengths] if how is _call_costs.ONE else [[n] * lengths.count(n) for n in dict.fromkeys(lengths)]
        pairs = sum(
            cost.call + len(group) * max(group) ** 2 * (cost.masked if len({*group}) > 1 else 1) for group in groups
        )
        copied = len(groups) > 1
        return pair * (pairs + cost.row * 2 * sum(lengths) * copied)

    size = _call_costs.Lengths(long=1000, short=10, many=50)
    of_pair, found = _call_costs.fitted(of, size)  # type: ignore[arg-type]  # it is called as a timer is
    assert of_pair == pytest.approx(pair, rel=1e-2)
    assert found.call == pytest.approx(cost.call, rel=0.01)
    assert found.row == pytest.approx(cost.row, rel=0.05)
    assert found.masked == pytest.approx(cost.masked, rel=0.1)


def test_costs_of_calls_are_measured() -> None:
    """Beside what ragged segments take by the table as it is, and by what was measured."""
    found = _call_costs.test(CPU)
    assert not found.wrong
    assert set(found.figures["8 heads of width 64, measured"]) == {"seconds of a pair", "call", "row", "masked"}
    assert set(found.figures["8 heads of width 64, seconds"]) == {"chat", "images"}

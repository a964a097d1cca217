"""The encoder over tensor ranks, context ranks and stages against itself (design law 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias

import attrs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mimo.model import ProjectorConfig
from mimo.model.runtime import gradient_of
from mimo.model.testing import ModuleLayout, Subject, assert_layouts
from mimo.topology import Recompute
from mimo_encoder_audio import WHISPER, WhisperConfig

HIDDEN = 10
SMALL = WhisperConfig(mels=5, width=24, layers=3, heads=6, intermediate=12, positions=24)
STACKED = attrs.evolve(SMALL, stack=2, silence="hear")
CONFIGS = (
    SMALL,
    STACKED,
    attrs.evolve(SMALL, silence="keep", stack=3),
    attrs.evolve(STACKED, silence="skip", projector=ProjectorConfig(kind="resampler", hidden=12, heads=6, queries=3)),
)
RATE = 16_000
CLIPS = (700, 1, 320, 3000, 7680, 321)  # samples
Case: TypeAlias = tuple[WhisperConfig, tuple[int, ...]]
FEW: tuple[Case, ...] = ((STACKED, CLIPS), (SMALL, (960,)))  # three rows leave some ranks without one
EVERYTHING: tuple[Case, ...] = tuple(product(CONFIGS, (CLIPS, (960,), (), (320, 2000), (7680, 1))))


def _raw(clips: Sequence[int]) -> list[tuple[NDArray[np.float32], int]]:
    noise = np.random.default_rng(4)
    return [(noise.uniform(-1, 1, samples).astype(np.float32), RATE) for samples in clips]


def _subject(config: WhisperConfig = SMALL) -> Subject:
    return Subject(spec=WHISPER, config=config, hidden=HIDDEN, raw=_raw(CLIPS))


def _check_layouts(pp: int, cp: int, tp: int, cases: Sequence[Case]) -> None:
    places = [ModuleLayout(pp=pp, cp=cp, tp=tp, sequence_parallel=splits) for splits in (False, True)[: min(tp, 2)]]
    for config in dict.fromkeys(config for config, _ in cases):
        batches = [_raw(clips) for of, clips in cases if of == config]
        assert_layouts(WHISPER, batches, places, config=config, hidden=HIDDEN)


@pytest.mark.parametrize(("pp", "cp", "tp"), [(3, 1, 1), (1, 1, 2), (1, 4, 1), (2, 2, 2)])
def test_layout_changes_nothing(pp: int, cp: int, tp: int) -> None:
    """Initial weights bitwise, rows and every gradient within law 1.

    Over tensor ranks, context ranks and stages, with rows whole and split; with clips cut anywhere, and ranks
    without a row; whatever is dropped and joined at the end.
    """
    _check_layouts(pp, cp, tp, FEW)


@pytest.mark.soak
@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (1, 6), (2, 1), (3, 1), (5, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_every_layout_changes_nothing(pp: int, cp: int, tp: int) -> None:
    """The same in all."""
    _check_layouts(pp, cp, tp, EVERYTHING)


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 2)])
def test_recomputing_and_splitting_change_no_bit(cp: int, tp: int) -> None:
    """One microbatch has the gradients that it has without either, on all ranks, those without rows too."""
    usual = ModuleLayout(pp=2, cp=cp, tp=tp, sequence_parallel=tp > 1)
    ways: tuple[Recompute, ...] = ("selective", "full")
    places = [attrs.evolve(usual, recompute=way, splits_backward=True) for way in ways]
    assert_layouts(WHISPER, [_raw(CLIPS), []], places, like=usual, config=STACKED, hidden=HIDDEN)


@pytest.mark.parametrize(("pp", "cp", "tp"), [(2, 2, 1), pytest.param(1, 1, 2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_seam_changes_no_bit(config: WhisperConfig, pp: int, cp: int, tp: int) -> None:
    """Tower and projector as two stages give the rows and gradients of the last stage that holds both."""
    usual = ModuleLayout(pp=pp, cp=cp, tp=tp, sequence_parallel=tp > 1)
    places = [attrs.evolve(usual, seam=True)]
    assert_layouts(WHISPER, [_raw(CLIPS), []], places, like=usual, config=config, hidden=HIDDEN)


def _check_frozen(_rank: int) -> None:
    subject = _subject()
    built = subject.build(ModuleLayout(frozen=frozenset({"encoder"})))
    built.encode(subject.items(), subject.sizes()).sum().backward()
    for name, parameter in built.parameters.items():
        assert (gradient_of(parameter) is not None) == name.startswith("projector."), name
    built = subject.build(ModuleLayout(frozen=frozenset({"encoder", "projector"})))
    assert not built.encode(subject.items(), subject.sizes()).requires_grad


def test_frozen_encoder_with_a_projector_that_learns(run_ranks: Callable[..., list[Any]]) -> None:
    """Only the projector gets gradients; with both frozen nothing keeps a graph."""
    run_ranks(1, _check_frozen)


def _check_alone(_rank: int) -> None:
    for config in CONFIGS:
        subject = _subject(config)
        built, items, sizes = subject.build(stirred=False), subject.items(), subject.sizes()
        together = built.encode(items, sizes)
        alone = torch.cat([built.encode([item], [size]) for item, size in zip(items, sizes, strict=True)])
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
        turned = built.encode([{"mel": items[3]["mel"].flip(0)}], sizes[3:4])
        first = sum(subject.counts()[:3])
        assert not torch.allclose(turned, together[first : first + len(turned)])
        assert built.encode([], []).shape == (0, HIDDEN)


def test_clips_do_not_hear_each_other(run_ranks: Callable[..., list[Any]]) -> None:
    """A clip's rows are the same alone and among others, and depend on when in it things sound."""
    run_ranks(1, _check_alone)


def _check_precision(_rank: int) -> None:
    module = WHISPER.build(SMALL, HIDDEN)
    items, sizes = _subject().items(), _subject().sizes()
    wanted = module(items, sizes)
    for dtype in (torch.bfloat16, torch.float16):
        rows = module.to(dtype)(items, sizes)
        assert rows.dtype == dtype == module([], []).dtype
        assert float((rows.float() - wanted).detach().norm() / wanted.detach().norm()) < 2e-2


def test_rows_in_reduced_precision_are_near_those_in_full(run_ranks: Callable[..., list[Any]]) -> None:
    """Within two hundredths, of the type of the weights, and no clip is no rows of it."""
    run_ranks(1, _check_precision)

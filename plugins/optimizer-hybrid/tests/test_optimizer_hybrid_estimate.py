"""What both halves hold, estimated from shapes before there is an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mimo.optimizer.estimates import Lanes, ParameterShape, PartShapes, StateBytes, SteppedShapes
from mimo_optimizer_hybrid import HYBRID, CpuOffloadConfig
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

SIZES = (700, 1, 40, 3000, 0, 128)
PIECES = tuple(ParameterShape(name=f"m.{number}", shape=(size,)) for number, size in enumerate(SIZES))


@pytest.mark.parametrize("fraction", [0, 0.3, 0.9, 1])
@pytest.mark.parametrize(("bucket_bytes", "staging_bytes"), [(512, 0), (2**20, 2**20)])
def test_the_estimate_is_what_is_held(fraction: float, bucket_bytes: int, staging_bytes: int) -> None:
    """To the byte, staging and counts of steps included."""
    config = CpuOffloadConfig(fraction=fraction, bucket_bytes=bucket_bytes, staging_bytes=staging_bytes)
    optimizer = HybridDeviceOptimizer(
        {piece.name: nn.Parameter(torch.zeros(piece.shape)) for piece in PIECES},
        fraction=fraction,
        bucket_bytes=bucket_bytes,
        staging_bytes=staging_bytes,
    )
    estimate = HYBRID.estimates.state(SteppedShapes(pieces=PIECES), config)
    assert estimate == StateBytes(device=optimizer.held.device, host=optimizer.held.host)


def test_what_trials_divide_is_estimated_as_the_most_of_both() -> None:
    """All on the device, and all on the host."""
    stepped = SteppedShapes(pieces=PIECES)
    none, all_ = (HYBRID.estimates.state(stepped, CpuOffloadConfig(fraction=fraction)) for fraction in (0, 1))
    estimate = HYBRID.estimates.state(stepped, CpuOffloadConfig(fraction="auto"))
    assert estimate == StateBytes(device=none.device, host=all_.host, at_most=True)
    assert none.host == all_.device == 0


def test_memory_for_an_accelerator_is_pinned() -> None:
    """Torch takes what travels in powers of two."""
    config = CpuOffloadConfig(fraction=1.0)
    plain, pinned = (
        HYBRID.estimates.state(SteppedShapes(pieces=PIECES, on_accelerator=accelerator), config).host
        for accelerator in (False, True)
    )
    assert plain < pinned < 2 * plain


def test_what_another_stage_holds_too_stays_on_the_device() -> None:
    """Unless the host holds all; its size is no reason to begin with it."""
    tied = ParameterShape(name="m.tied", shape=(4000,), tied=True)
    estimate = HYBRID.estimates.state(SteppedShapes(pieces=(*PIECES, tied)), CpuOffloadConfig(fraction=0.9))
    assert estimate.device >= 8 * 4000


def test_parameters_are_stepped_in_the_order_of_a_forward() -> None:
    """What no layer holds alone first, then layer by layer."""
    parts = [("m.stem", None), ("m.one", 1), ("m.zero", 0), ("m.head", None)]
    part = PartShapes(
        parameters=tuple(ParameterShape(name=name, shape=(4,), layer=layer) for name, layer in parts),
        lanes=Lanes(size=2),
    )
    found = HYBRID.estimates.laid(part, CpuOffloadConfig())
    assert [piece.name for piece in found.pieces] == ["m.stem", "m.head", "m.zero", "m.one"]
    assert {piece.shape for piece in found.pieces} == {(2,)}

"""The settings of ``cpu-offload``. Free of torch."""

from __future__ import annotations

from typing import Literal

import attrs

from mimo.hooks import Validator, must_be
from mimo.optimizer import AdamWConfig
from mimo_optimizer_distributed.sharding import Sharding
from mimo_optimizer_hybrid._limits import BUCKET_BYTES, STAGING_BYTES, check_fraction

_MAX_BYTES, _MAX_THREADS = 1 << 40, 4096


def _share(_config: CpuOffloadConfig, _attribute: object, fraction: float | Literal["auto"]) -> None:
    check_fraction(fraction)


def _within(low: int, high: int, unit: str) -> list[Validator]:
    return [
        must_be(f"{low} {unit} or more", lambda value: value >= low, where="optimizer"),
        must_be(f"at most {high} {unit}", lambda value: value <= high, where="optimizer"),
    ]


@attrs.frozen(kw_only=True)
class CpuOffloadConfig(AdamWConfig, Sharding):
    """Settings of AdamW with a part of its state in host memory, and how its parameters are spread.

    Args:
        fraction: share of each module's state that the host holds and steps, in whole parameters, on each rank;
            ``auto`` makes both halves take equally long, by trial steps of all the module's ranks as the run begins.
        bucket_bytes: of parameters that are stepped, sent up and waited for together.
        staging_bytes: host memory for gradients on their way down, at least two buckets.
        threads: on which the host steps, for each rank; 0 for the cores that a rank may use, divided by the ranks that
            may use the same, and by the modules that a rank steps so.
        overlap: whether the next step's layers run while the host still steps, each waiting for its own parameters.

    Raises:
        ConfigError: a value is out of range.
    """

    fraction: float | Literal["auto"] = attrs.field(default=1.0, validator=_share)
    bucket_bytes: int = attrs.field(default=BUCKET_BYTES, validator=_within(64, _MAX_BYTES, "bytes"))
    staging_bytes: int = attrs.field(default=STAGING_BYTES, validator=_within(0, _MAX_BYTES, "bytes"))
    threads: int = attrs.field(default=0, validator=_within(0, _MAX_THREADS, "threads"))
    overlap: bool = True

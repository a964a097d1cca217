"""The optimizer ``cpu-offload``: its settings, and how it registers. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from mimo.hooks import ConfigError, OptimizerBytes, hookimpl
from mimo.optimizer import AdamWConfig, ModuleParameters, OptimizerSpec, Prepared, Share
from mimo_optimizer_distributed.sharding import Sharding, overlaps, shard
from mimo_optimizer_distributed.spec import sharded_optimizer
from mimo_optimizer_hybrid._estimate import laid, state
from mimo_optimizer_hybrid._limits import BUCKET_BYTES, STAGING_BYTES, check_fraction

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mimo.optimizer import Overlap
    from mimo_optimizer_hybrid._agreement import BuildPlan
    from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer


_MAX_BYTES = 1 << 40


def _share(_instance: HybridConfig, _attribute: object, fraction: float | Literal["auto"]) -> None:
    check_fraction(fraction)


def _bytes(least: int) -> Callable[[HybridConfig, attrs.Attribute[int], int], None]:
    def check(_config: HybridConfig, attribute: attrs.Attribute[int], value: int) -> None:
        if value < least:
            raise ConfigError(f"optimizer.{attribute.name}", expected=f"{least} bytes or more", got=repr(value))
        if value > _MAX_BYTES:
            raise ConfigError(f"optimizer.{attribute.name}", expected=f"at most {_MAX_BYTES} bytes", got=repr(value))

    return check


@attrs.frozen(kw_only=True)
class HybridConfig(AdamWConfig, Sharding):
    """Settings of AdamW with a part of its state in host memory, and how its parameters are spread.

    Args:
        fraction: share of each module's state that the host holds and steps, in whole parameters, on each rank;
            ``auto`` makes both halves take equally long, by trial steps of all the module's ranks as the run begins.
        bucket_bytes: of parameters that are stepped, sent up and waited for together.
        staging_bytes: host memory for gradients on their way down, at least two buckets.
        overlap: whether the next step's layers run while the host still steps, each waiting for its own parameters.

    Raises:
        ConfigError: a value is out of range.
    """

    fraction: float | Literal["auto"] = attrs.field(default=1.0, validator=_share)
    bucket_bytes: int = attrs.field(default=BUCKET_BYTES, validator=_bytes(64))
    staging_bytes: int = attrs.field(default=STAGING_BYTES, validator=_bytes(0))
    overlap: bool = True


def _overlaps(config: HybridConfig) -> frozenset[Overlap]:
    """Tell what may go over data lanes while layers compute: without ``full``, each gather as its bucket is there."""
    waits = config.overlap and config.overlap_param_gather is not False and config.shard != "full"
    return overlaps(config) | frozenset({"gathers"} if waits else ())


def _prepare(part: ModuleParameters, meshes: Any, config: HybridConfig) -> Prepared:
    from mimo_optimizer_hybrid._readers import Readers

    readers = Readers(part)
    return readers.prepared(
        shard(
            part,
            meshes,
            config,
            before_gather=readers.wait,
            gathers_when_ready="gathers" in _overlaps(config),
            reduced=readers.reduced,
        )
    )


def _agree(shares: Sequence[Share], meshes: Any) -> Sequence[BuildPlan]:
    import torch

    from mimo_optimizer_hybrid._agreement import agree

    return agree(shares, torch.device(meshes.device_type))


def _build(parameters: Mapping[str, nn.Parameter], agreed: BuildPlan, _meshes: Any) -> torch.optim.Optimizer:
    from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer

    config = agreed.config
    optimizer = HybridDeviceOptimizer(
        {name: parameters[name] for name in agreed.names},
        fraction=config.fraction,
        bucket_bytes=config.bucket_bytes,
        staging_bytes=config.staging_bytes,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        kept=agreed.kept,
        overlaps=agreed.overlaps,
        ask=lambda _bytes: None,  # all ranks have asked together
    )
    for readers in agreed.readers:
        readers.attach(optimizer)
    return optimizer


def _memory(optimizer: HybridDeviceOptimizer) -> OptimizerBytes:
    held, promised = optimizer.held, optimizer.promised
    return OptimizerBytes(held.host, held.device, promised.host, promised.device)


HYBRID = sharded_optimizer(
    name="cpu-offload",
    config=HybridConfig,
    prepare=_prepare,
    overlaps=_overlaps,
    build=_build,
    agree=_agree,
    memory=_memory,
    laid=laid,
    state=state,
)


@hookimpl
def mimo_register_optimizers() -> list[OptimizerSpec]:
    """Register ``cpu-offload``."""
    return [HYBRID]

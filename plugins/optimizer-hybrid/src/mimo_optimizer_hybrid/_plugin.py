"""The optimizer ``cpu-offload``: its settings, and how it registers. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mimo.hooks import OptimizerBytes, hookimpl
from mimo.optimizer import ModuleParameters, OptimizerSpec, Prepared, Share
from mimo_optimizer_distributed.sharding import overlaps
from mimo_optimizer_distributed.spec import shard, sharded_optimizer
from mimo_optimizer_hybrid._config import CpuOffloadConfig
from mimo_optimizer_hybrid._estimate import laid, state

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mimo.optimizer import Overlap
    from mimo_optimizer_hybrid._agreement import BuildPlan
    from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer


def _overlaps(config: CpuOffloadConfig) -> frozenset[Overlap]:
    """Tell what may go over data lanes while layers compute: without ``full``, each gather as its bucket is there."""
    waits = config.overlap and config.overlap_param_gather is not False and config.shard != "full"
    return overlaps(config) | frozenset({"gathers"} if waits else ())


def _prepare(part: ModuleParameters, meshes: Any, config: CpuOffloadConfig) -> Prepared:
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
        threads=config.threads,
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
    config=CpuOffloadConfig,
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

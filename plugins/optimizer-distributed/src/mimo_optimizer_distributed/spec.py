"""The `OptimizerSpec` of plugins whose parameters are spread over data lanes, but for what is theirs. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mimo.optimizer import OptimizerSpec
from mimo.optimizer.estimates import Estimates, StateBytes, SteppedShapes, adamw_state
from mimo_optimizer_distributed.estimates import laid, sent
from mimo_optimizer_distributed.sharding import LAYS, PRECISIONS, Sharding, gathers_inside, lanes_of, overlaps

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mimo.hooks import OptimizerBytes
    from mimo.optimizer import ModuleParameters, Prepared, Share
    from mimo.optimizer.estimates import LaidBytes, PartShapes
    from mimo.topology import Overlap
    from mimo.topology.meshes import Meshes


def shard(
    part: ModuleParameters,
    meshes: Meshes,
    config: Sharding,
    *,
    before_gather: Callable[[Collection[str]], None] = lambda _names: None,
    gathers_when_ready: bool = False,
    reduced: Callable[[Collection[str]], None] = lambda _names: None,
) -> Prepared:
    """Spread the parameters of a part of a module over its data lanes.

    The stages' modules compute with whole tensors of their tensor rank, in ``part.precision``. `Prepared.parameters`
    and `Prepared.frozen` are this rank's fp32 pieces of them, DTensors of the whole shape on a mesh of the axes
    ``replica`` (where there are copies), ``tp`` (or ``ep`` and ``etp``) and `mimo.topology.DATA`, cut from left to
    right as `torch.chunk` does along dim 0; pieces may be uneven and empty. Their gradients are there after
    `Prepared.reduce`, of the same layout. Where nothing is to be spread, neither over lanes nor into another
    precision, they are the given ones.

    Args:
        part: the parameters, and the modules that hold them.
        meshes: the groups of this rank, for a graph whose modules know their `mimo.topology.Module.shard_lanes`.
        config: the plugin's.
        before_gather: is called with the full names of what is about to be gathered, whose pieces are then read.
        gathers_when_ready: whether that may wait for another thread, as long as layers should compute meanwhile. It is
            then called by a thread, and for a module whose `mimo.topology.Module.overlaps` has gathers.
        reduced: is called with the full names of what has its gradient of the step: while the last backward runs, if
            sums overlap with it, and at the latest before `Prepared.reduce` returns.
    """
    from mimo_optimizer_distributed._prepare import prepare

    return prepare(part, meshes, config, before_gather, reduced, gathers_when_ready=gathers_when_ready)


def sharded_optimizer(
    *,
    name: str,
    config: type,
    build: Callable[[Mapping[str, nn.Parameter], Any, Meshes], torch.optim.Optimizer],
    prepare: Callable[[ModuleParameters, Meshes, Any], Prepared] = shard,
    overlaps: Callable[[Any], frozenset[Overlap]] = overlaps,
    laid: Callable[[PartShapes, Any], LaidBytes] = laid,
    state: Callable[[SteppedShapes, Any], StateBytes] = adamw_state,
    agree: Callable[[Sequence[Share], Meshes], Sequence[Any]] | None = None,
    memory: Callable[[Any], OptimizerBytes] | None = None,
) -> OptimizerSpec:
    """Return the spec of a plugin that spreads what it steps by `shard`.

    Args:
        name: as `OptimizerSpec`'s, and so are all others.
        config: inherits from `mimo_optimizer_distributed.sharding.Sharding`.
        build: is given this rank's pieces, as `shard` lays them out.
        prepare: `shard`, or what calls it.
        overlaps: what may go over data lanes while layers compute.
        laid: what ``prepare`` makes of a part, in bytes.
        state: what the optimizer holds of its pieces, in bytes; AdamW's if left out.
        agree: as `OptimizerSpec`'s.
        memory: likewise.
    """
    return OptimizerSpec(
        name=name,
        config=config,
        rendezvous=gathers_inside,
        overlaps=overlaps,
        shard_lanes=lanes_of,
        precisions=PRECISIONS,
        lays=LAYS,
        prepare=prepare,
        build=build,
        agree=agree,
        memory=memory,
        estimates=Estimates(laid=laid, state=state, sent=sent),
    )

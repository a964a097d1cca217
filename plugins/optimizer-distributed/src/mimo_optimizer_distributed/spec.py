"""The `OptimizerSpec` of plugins whose parameters are spread over data lanes, but for what is theirs. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mimo.optimizer import OptimizerSpec
from mimo.optimizer.estimates import Estimates, StateBytes, SteppedShapes, adamw_state
from mimo_optimizer_distributed.estimates import laid, sent
from mimo_optimizer_distributed.sharding import LAYS, PRECISIONS, gathers_inside, lanes_of, overlaps, shard

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mimo.hooks import OptimizerBytes
    from mimo.optimizer import ModuleParameters, Prepared, Share
    from mimo.optimizer.estimates import LaidBytes, PartShapes
    from mimo.topology import Overlap
    from mimo.topology.meshes import Meshes


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
    """Return the spec of a plugin that spreads what it steps by `mimo_optimizer_distributed.sharding.shard`.

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

"""How parameters, gradients and optimizer state are spread over data lanes: a piece that any optimizer plugin can use.

A plugin's config inherits from `Sharding`, and `mimo_optimizer_distributed.spec.sharded_optimizer` makes its
`OptimizerSpec` of what is here. What it steps are then this rank's pieces of the parameters: fp32 DTensors of the whole
shape, whose local tensors are all that an elementwise optimizer needs. Free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs

from mimo.hooks import ConfigError

if TYPE_CHECKING:
    from mimo.optimizer import Precision
    from mimo.topology import Overlap

Shard: TypeAlias = Literal["optimizer", "gradients", "full"]
"""What each data lane holds only its piece of: optimizer state (with the fp32 parameters); gradients as well; gathered
parameters as well, which it then has whole only while a layer uses them."""

PRECISIONS: frozenset[Precision] = frozenset({"fp32", "bf16", "fp16"})
"""What layers may compute in: their parameters are gathered in it, from pieces that stay fp32."""

LAYS = frozenset({"shard", "shard_lanes", "overlap_grad_reduce", "overlap_param_gather"})
"""Settings that say how parameters lie and travel, and so are a module's and not a single parameter's."""


def _some_lanes(instance: Sharding, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 0:
        raise ConfigError(
            f"optimizer.{attribute.name}",
            expected="1 or more data lanes, or 0 for all of a module's",
            got=repr(value),
            fix="Leave it out for all.",
        )
    if value == 1 and instance.shard != "optimizer":
        raise ConfigError(
            f"optimizer.{attribute.name}",
            expected=f"2 or more data lanes, or 0 for all of a module's, as shard is {instance.shard!r}",
            got="1, by which each lane holds a whole copy",
            fix="Set shard = 'optimizer' for copies, or shard_lanes = 0.",
        )


@attrs.frozen(kw_only=True, slots=False)  # without slots, so that a config can inherit from this and from another one
class Sharding:
    """Settings of a plugin whose parameters are spread over data lanes.

    Args:
        shard: what is spread. ``optimizer``: parameters are gathered and gradients reduced once a step. ``gradients``:
            gradients are reduced after every backward, and each lane keeps its piece. ``full``: layers' parameters are
            gathered for each forward and backward and let go of after it.
        shard_lanes: neighbouring data lanes (``dp x cp``) over which one copy is spread; the others hold copies of it.
            0 for all, 1 for a copy on each lane. Experts are spread over as many of their own lanes (``edp``) as
            divide both numbers.
        overlap_grad_reduce: whether gradients are summed over the lanes while a backward still runs, layer by layer;
            ``auto`` does so on accelerators.
        overlap_param_gather: whether parameters are gathered while layers compute, those of the next one at least;
            ``auto`` does so everywhere.
    """

    shard: Shard = "optimizer"
    shard_lanes: int = attrs.field(default=0, validator=_some_lanes)
    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    overlap_param_gather: bool | Literal["auto"] = "auto"


def gathers_inside(config: Sharding) -> bool:
    """Return whether a forward or backward waits for the other data lanes."""
    return config.shard != "optimizer"


def lanes_of(config: Sharding) -> int:
    """Return how many data lanes one copy is spread over, 0 for all."""
    return config.shard_lanes


def overlaps(config: Sharding) -> frozenset[Overlap]:
    """Tell what may go over data lanes while layers compute."""
    return frozenset({"sums"} if config.overlap_grad_reduce is not False else ())

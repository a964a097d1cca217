"""Gradients of parameters that every data lane holds whole: summed once a step, one flat message a group.

A gradient is summed over every axis along which the parameter is replicated and the work is not: the data axes for
all, the tensor axis too for those of which each tensor rank computes only a part; for experts, whose axes are others,
those ranks that hold copies of the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mimo.optimizer._specs import ModuleParameters, Prepared
from mimo.topology.meshes import DATA_AXES, Meshes, tied_pairs


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of the gradient, in place; one that nothing contributed to is made zero."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    # Not `to_local`, which looks at more than it needs to, for each parameter in each step.
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient  # noqa: SLF001


def sum_over(group: dist.ProcessGroup, gradients: Sequence[Tensor]) -> None:
    """Sum ``gradients`` over ``group`` in place, those of one dtype in one message."""
    if group.size() == 1:
        return
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in alike])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(alike, torch.split(flat, [gradient.numel() for gradient in alike]), strict=True):
            gradient.copy_(total.view_as(gradient))


def replicate(part: ModuleParameters, meshes: Meshes) -> Prepared:
    """Keep parameters whole on every lane; ``reduce`` sums their gradients over the lanes."""
    shared = meshes.axes_group(part.grid, DATA_AXES)
    with_tensor = meshes.axes_group(part.grid, (*DATA_AXES, "tp"))
    assert not part.summed & part.tied, "a tied parameter is split over tensor ranks, or whole and alike on each"
    tied = [part.parameters[name] for name in sorted(part.tied)]
    others = part.summed | part.tied | part.experts
    split = [parameter for name, parameter in part.parameters.items() if name not in others]
    summed = [part.parameters[name] for name in part.parameters if name in part.summed]
    experts = [part.parameters[name] for name in part.parameters if name in part.experts]
    copies = meshes.axes_group(part.grid, ("edp",)) if experts else None

    @torch.no_grad()
    def reduce() -> None:
        # In a message of their own, of one length on both stages: the sum is then made in one order, and the copies
        # stay the same to the bit.
        sum_over(shared, [local_gradient(parameter) for parameter in tied])
        sum_over(shared, [local_gradient(parameter) for parameter in split])
        sum_over(with_tensor, [local_gradient(parameter) for parameter in summed])
        if copies is not None:
            sum_over(copies, [local_gradient(parameter) for parameter in experts])

    return Prepared(reduce)


@torch.no_grad()
def reduce_tied(parameter: nn.Parameter, part: ModuleParameters, meshes: Meshes) -> None:
    """Add up the gradients of a parameter that the first and the last stage both hold, on both."""
    pair = next(pair for pair in tied_pairs(part.grid) if part.rank in pair)
    sum_over(meshes.group(pair), [local_gradient(parameter)])

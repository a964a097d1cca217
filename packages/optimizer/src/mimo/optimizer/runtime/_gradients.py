"""Gradients of all parameters of a rank, over all its modules: norms, each shard counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mimo.optimizer._specs import ModuleParameters
from mimo.optimizer.runtime._agreement import NormBucket
from mimo.optimizer.runtime._replicate import local_gradient
from mimo.topology import DATA


class Gradients:
    """The gradients of this rank, sorted into buckets once, so that a step takes few operations for any number of them.

    Args:
        parts: the parameters of each module here.
        buckets: of each parameter by full name.
    """

    def __init__(self, parts: Sequence[ModuleParameters], buckets: Mapping[str, NormBucket]) -> None:
        self._parameters = {name: parameter for part in parts for name, parameter in part.parameters.items()}
        self._counts = {name: is_counted(part, name) for part in parts for name in part.parameters}
        self._members: dict[NormBucket, list[str]] = {}
        for name in self._parameters:
            self._members.setdefault(buckets[name], []).append(name)
        rows = [
            [self._counts[name] and buckets[name] == bucket for name in self._parameters] for bucket in self._members
        ]
        device = next((parameter.device for parameter in self._parameters.values()), None)
        self._counted = torch.tensor(rows, dtype=torch.float64, device=device)

    def read(self) -> dict[str, Tensor]:
        """Return this rank's gradients by full name; zeros for a parameter without a gradient."""
        return {name: local_gradient(parameter) for name, parameter in self._parameters.items()}

    def squares(self, gradients: Mapping[str, Tensor]) -> dict[NormBucket, Tensor]:
        """Return this rank's share of the squared norm of each bucket: each shard counts on one rank only.

        They are scalars in float64. A gradient that is not finite on any rank makes the sum so, whichever rank counts
        the parameter.
        """
        if not gradients:
            return {}
        norms = torch._foreach_norm(list(gradients.values()))  # noqa: SLF001  # what torch.nn.utils calls too
        squares = torch.stack(norms).double().square_()
        # Gradients that other ranks count add 0, unless they are not finite: 0 times that is nan.
        return dict(zip(self._members, (self._counted @ squares).unbind(), strict=True))

    def zeros(self, gradients: Mapping[str, Tensor]) -> dict[str, int]:
        """Return this rank's share of how many gradient elements of each module are exactly zero."""
        zeros: dict[str, int] = {}
        for (module, _), members in self._members.items():
            counted = [gradients[name] for name in members if self._counts[name]]
            if counted:
                others = int(torch.stack([torch.count_nonzero(gradient) for gradient in counted]).sum())
                zeros[module] = zeros.get(module, 0) + sum(gradient.numel() for gradient in counted) - others
        return zeros


def is_counted(part: ModuleParameters, name: str) -> bool:
    """Return whether this rank, of all that hold the same shard of a trained parameter, counts it."""
    parameter = part.parameters[name]
    if name in part.tied and part.place.pp:
        return False
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        first = all(
            isinstance(placed, Shard) or index == 0
            for placed, index in zip(parameter.placements, coordinate, strict=True)
        )
        if DATA in (mesh.mesh_dim_names or ()):
            return first
    else:
        first = part.place.tp == 0
    first_lane = part.expert_place.edp == 0 if name in part.experts else part.place.dp == part.place.cp == 0
    return first and first_lane

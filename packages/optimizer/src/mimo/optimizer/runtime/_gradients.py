"""The gradients of all parameters of a rank, of all its modules at once: norms, each shard counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mimo.optimizer._specs import ModuleParameters
from mimo.optimizer.runtime._agreement import Bin
from mimo.optimizer.runtime._replicate import local_gradient
from mimo.topology import DATA


class Gradients:
    """Those of this rank, sorted into bins once, so that a step takes few operations however many there are.

    Args:
        parts: the parameters of each module here.
        bins: of each parameter by full name.
    """

    def __init__(self, parts: Sequence[ModuleParameters], bins: Mapping[str, Bin]) -> None:
        self._parameters = {name: parameter for part in parts for name, parameter in part.parameters.items()}
        self._counts = {name: is_counted(part, name) for part in parts for name in part.parameters}
        self._members: dict[Bin, list[str]] = {}
        for name in self._parameters:
            self._members.setdefault(bins[name], []).append(name)
        rows = [[self._counts[name] and bins[name] == one for name in self._parameters] for one in self._members]
        device = next((parameter.device for parameter in self._parameters.values()), None)
        self._counted = torch.tensor(rows, dtype=torch.float64, device=device)

    def read(self) -> dict[str, Tensor]:
        """Return this rank's pieces by full name; of a parameter to which nothing contributed, zeros."""
        return {name: local_gradient(parameter) for name, parameter in self._parameters.items()}

    def squares(self, gradients: Mapping[str, Tensor]) -> dict[Bin, float]:
        """Return this rank's share of the squared norm of each bin: each shard counts on one rank only.

        One that is not finite on any rank makes it so too, whoever counts the parameter.
        """
        if not gradients:
            return {}
        norms = torch._foreach_norm(list(gradients.values()))  # noqa: SLF001  # what torch.nn.utils calls too
        squares = torch.stack(norms).double().square_()
        # What is counted elsewhere adds nothing, unless it is not finite: zero times that is not a number.
        return dict(zip(self._members, (self._counted @ squares).tolist(), strict=True))

    def zeros(self, gradients: Mapping[str, Tensor]) -> dict[str, int]:
        """Return this rank's share of how many numbers of each module's gradients are exactly zero."""
        found: dict[str, int] = {}
        for (module, _), members in self._members.items():
            here = [gradients[name] for name in members if self._counts[name]]
            if here:
                others = int(torch.stack([torch.count_nonzero(gradient) for gradient in here]).sum())
                found[module] = found.get(module, 0) + sum(gradient.numel() for gradient in here) - others
        return found


def is_counted(part: ModuleParameters, name: str) -> bool:
    """Tell whether this rank, and no other that holds the same piece of a trained parameter, counts it."""
    parameter = part.parameters[name]
    if name in part.tied and part.place.pp:
        return False
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        first = all(isinstance(one, Shard) or at == 0 for one, at in zip(parameter.placements, coordinate, strict=True))
        if DATA in (mesh.mesh_dim_names or ()):
            return first
    else:
        first = part.place.tp == 0
    first_lane = part.expert_place.edp == 0 if name in part.experts else part.place.dp == part.place.cp == 0
    return first and first_lane

"""Let modules written for plain tensors compute on the local pieces of their parameters.

A third-party ``nn.Linear`` reads ``self.weight``, which is a `DTensor` here and mixes with no plain tensor. Each such
module gets a subclass of its class in which the name of a parameter is a property that reads `local` of it, as
`torch.nn.utils.parametrize` does; names, saving and ``isinstance`` stay what they are.
"""

from __future__ import annotations

from torch import Tensor, nn

from mimo.model.build.lora import low_ranks, read_merged
from mimo.model.layers import Embedding, GroupedLinear, LayerNorm, Linear, LowRank, RMSNorm, Router
from mimo.model.parallel import local

_READ_LOCALLY = (Embedding, GroupedLinear, LayerNorm, Linear, LowRank, RMSNorm, Router)


def read_locally(module: nn.Module) -> None:
    """Make every submodule read its parameters through `local`, except our layers, which do so themselves."""
    adapted = {module.get_submodule(path) for path, _ in low_ranks(module)}
    for part in module.modules():
        if part in adapted:
            read_merged(part)
            continue
        leaves = [leaf for leaf, _ in part.named_parameters(recurse=False, remove_duplicate=False)]
        if leaves and not isinstance(part, _READ_LOCALLY):
            original = type(part)
            part.__class__ = type(original.__name__, (original,), {leaf: _local_property(leaf) for leaf in leaves})


def _local_property(leaf: str) -> property:
    def read(self: nn.Module) -> Tensor:
        parameter = self._parameters[leaf]
        assert parameter is not None
        return local(parameter)

    return property(read)

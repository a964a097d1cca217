"""Which parameters are gathered together: those of a layer, and those of a stage that are of none of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
from torch import Tensor, nn

from mimo.topology.meshes import local


@attrs.frozen(eq=False)
class Owned:
    """A parameter, and everything by whose name a module holds it."""

    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]

    def replace(self, parameter: nn.Parameter) -> Owned:
        """Put another parameter in its place."""
        for module, leaf in self.places:
            # Not by `setattr`: a module may read its parameters by properties of these names.
            module._parameters[leaf] = parameter  # noqa: SLF001
        return Owned(parameter, self.places)


def owned(modules: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]) -> dict[str, Owned]:
    """Return where ``modules`` hold ``parameters``, by name."""
    places: dict[Tensor, dict[tuple[nn.Module, str], None]] = {}
    for module in modules:
        for part in module.modules():
            for leaf, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(parameter, {})[part, leaf] = None
    return {name: Owned(parameter, tuple(places[local(parameter)])) for name, parameter in parameters.items()}


def sort_by_layer(layers: Iterable[nn.Module], found: Mapping[str, Owned]) -> dict[nn.Module | None, dict[str, Owned]]:
    """Return parameters by the layer that alone holds them, in the order of layers; None for those of none."""
    layer_of = {part: layer for layer in layers for part in layer.modules()}
    sorted_: dict[nn.Module | None, dict[str, Owned]] = {layer: {} for layer in (None, *layer_of.values())}
    for name, one in found.items():
        holders = {layer_of.get(module) for module, _ in one.places}
        sorted_[holders.pop() if len(holders) == 1 else None][name] = one
    return {layer: some for layer, some in sorted_.items() if some}

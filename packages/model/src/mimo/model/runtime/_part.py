"""This rank's share of one module, and the model that holds those of all its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import attrs
from torch import Tensor, nn

from mimo.model._specs import Stage
from mimo.model.runtime._language import LanguageModule
from mimo.model.runtime._parameters import Split


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One module as this rank holds it: its pipeline stage, its tensor pieces. `build_part` makes it.

    Args:
        name: of the module in the model.
        module: whose parameters are DTensors on the module's tensor mesh, those of experts on its expert mesh.
        stage: which pipeline stage it is.
        staged: whether an encoder's forward is that of `EncoderStages.cut`.
        splits: how each parameter lies over tensor or expert ranks, by full name.
        tied: full names of parameters that the first and the last stage both hold, on those two; stage 0 owns them.
    """

    name: str
    module: nn.Module
    stage: Stage
    staged: bool
    splits: Mapping[str, Split]
    tied: frozenset[str]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by full name, ``<module>.<path with global layer index>``."""
        return {f"{self.name}.{path}": parameter for path, parameter in self.module.named_parameters()}

    @property
    def summed(self) -> frozenset[str]:
        """Full names of parameters whose gradients must be summed over tensor ranks."""
        return frozenset(name for name, split in self.splits.items() if split.summed)

    @property
    def experts(self) -> frozenset[str]:
        """Full names of parameters that lie on the expert view of the grid."""
        return frozenset(name for name, split in self.splits.items() if split.experts)

    @property
    def tied_copies(self) -> frozenset[str]:
        """Full names of parameters that stage 0 owns and this later stage holds too."""
        return frozenset() if self.stage.is_first else self.tied

    @property
    def language(self) -> LanguageModule:
        """The module, as a language model's stage is called."""
        return cast("LanguageModule", self.module)

    def encode(
        self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[tuple[int, ...]], hidden: Tensor | None = None
    ) -> Tensor:
        """Run an encoder's stage.

        Args:
            items: prepared items of the microbatch, in order; empty on later stages.
            sizes: header sizes of the same items, on every stage.
            hidden: rows from the stage before; None on stage 0.

        Returns:
            This stage's rows; on the last stage [T, hidden] of the language model.
        """
        rows = self.module(items, sizes, hidden) if self.staged else self.module(items)
        return cast("Tensor", rows)


class MimoModel(nn.Module):
    """The modules of one model that this rank holds, and no others.

    Args:
        parts: in the graph's module order.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__()
        self.parts: dict[str, Part] = {part.name: part for part in parts}
        # A list, since a user's module name may be one that `nn.Module` uses itself.
        self.held = nn.ModuleList(part.module for part in self.parts.values())

    @property
    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters of all modules by full name."""
        return {name: parameter for part in self.parts.values() for name, parameter in part.parameters.items()}

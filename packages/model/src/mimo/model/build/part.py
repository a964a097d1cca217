"""One stage of a module as this rank holds it, and the model that holds all such stages of this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mimo.model.draws import DrawKeys, Drawn
from mimo.model.language import LanguageModule, SupportsDistillation
from mimo.model.layers import DeferredWeightGrads, WeightGradQueue
from mimo.model.parallel import ExpertAxis, Split, TensorAxis
from mimo.model.spec import Stage
from mimo.topology import StageId
from mimo.topology.meshes import as_parameter


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One stage of a module as this rank holds it: its layers, its tensor pieces. `build_part` makes it.

    Args:
        name: of the module in the model.
        module: which computes with this rank's pieces of the parameters, plain tensors.
        parameters: by full name, ``<module>.<path with global layer index>``: DTensors of the full shapes over those
            pieces, on the module's tensor mesh, those of experts on its expert mesh.
        stage: which of the module's stages it is.
        staged: whether the forward of an encoder or generator is that of `EncoderStages.cut`, `EncoderSeam.cut` or
            `GeneratorStages.cut`.
        splits: how each parameter lies over tensor or expert ranks, by full name.
        tied: full names of parameters that the first and the last stage both hold, on those two; stage 0 owns them.
            A rank that holds both stages holds them once.
        whole: full names of parameters that no gradient trains, whatever is frozen, and that other code than layers
            changes between steps.
        persistent: paths of buffers that a checkpoint holds.
        weight_grad_queue: where its layers defer weight gradients.
        draw_keys: by which its layers draw at random.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    stage: Stage
    staged: bool
    splits: Mapping[str, Split]
    tied: frozenset[str]
    whole: frozenset[str] = frozenset()
    persistent: frozenset[str] = frozenset()
    weight_grad_queue: WeightGradQueue = attrs.field(factory=WeightGradQueue)
    draw_keys: DrawKeys = attrs.field(factory=DrawKeys)

    @property
    def id(self) -> StageId:
        """The stage in the module graph."""
        return StageId(self.name, self.stage.index)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers by full name, likewise; each rank of the stage has its own copy."""
        return {
            f"{self.name}.{path}": buffer for path, buffer in self.module.named_buffers() if path in self.persistent
        }

    @property
    def summed(self) -> frozenset[str]:
        """Full names of parameters whose gradients must be summed over tensor ranks, of experts over ``etp``."""
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

    @property
    def distillation(self) -> SupportsDistillation:
        """The module, as the last stage of a language model whose spec ``distils``."""
        return cast("SupportsDistillation", self.module)

    def defer_weight_grads(self) -> AbstractContextManager[DeferredWeightGrads]:
        """Return a context in which a backward defers its weight gradients, as far as the layers can.

        Call what the context gives, once and after it, to compute and add them; no other rank takes part. Until then
        the rows and gradients that it reads must not be written to.
        """
        return self.weight_grad_queue.collect()

    def drawing(self, *, rows: Tensor | None = None, items: Tensor | None = None) -> AbstractContextManager[None]:
        """Return a context in which its layers draw at random; outside of it, and without keys, they draw nothing.

        Args:
            rows: of a language model, [T, 2]: `LanguageBatch.draw_keys`.
            items: of an encoder, [N] on the CPU: `mimo.model.runtime.item_keys` of the items that it reads.
        """
        return self.draw_keys.at(Drawn(rows, items))

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

    def target_losses(
        self,
        items: Sequence[Mapping[str, Tensor]],
        rows: Tensor | None,
        spans: Sequence[tuple[int, int]],
        keys: Tensor,
        *,
        sizes: Sequence[tuple[int, ...]] = (),
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run a generator's stage; for the first four arguments see `mimo.model.GeneratorSpec.build`.

        Args:
            items: prepared, on the first and the last stage; empty on those between.
            rows: of the language model, on the first stage.
            spans: of each item in them, on every stage.
            keys: of each item, on every stage.
            sizes: header sizes of the items, which stages may need.
            hidden: rows from the stage before; None on stage 0.

        Returns:
            Losses, or the rows that a stage sends to the next one.
        """
        if self.staged:
            return cast("Tensor", self.module(items, rows, spans, keys, sizes, hidden))
        return cast("Tensor", self.module(items, rows, spans, keys))


class MimoModel(nn.Module):
    """The stages of one model's modules that this rank holds, and no others.

    Args:
        parts: in the graph's module order, those of a module in the order of its stages.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__()
        self.parts: dict[StageId, Part] = {part.id: part for part in parts}
        # A list, since a user's module name may be one that `nn.Module` uses itself.
        self.held = nn.ModuleList(part.module for part in self.parts.values())

    def parts_of(self, name: str) -> tuple[Part, ...]:
        """Return the stages of one module, none of one that this rank does not hold."""
        return tuple(part for part in self.parts.values() if part.name == name)

    @property
    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Parameters of all modules by full name."""
        return {name: parameter for part in self.parts.values() for name, parameter in part.parameters.items()}


def distribute(
    full: Tensor,
    split: Split,
    *,
    axis: TensorAxis | ExpertAxis,
    mesh: DeviceMesh,
    like: Tensor,
    requires_grad: bool,
) -> nn.Parameter:
    """Cut ``full`` for this rank and return it as a DTensor of the full shape, with device and dtype of ``like``.

    `local` of it is the parameter that layers compute with, to which autograd gives the gradient.
    ``axis`` and ``mesh`` are those of the tensor ranks, or of the experts where ``split`` says so.
    """
    piece = split.piece(full, axis).to(like, copy=True, memory_format=torch.contiguous_format)
    whole = DTensor.from_local(
        piece, mesh, split.placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
    )
    whole._local_tensor = nn.Parameter(piece, requires_grad=requires_grad)  # noqa: SLF001 - `from_local` makes a view
    return as_parameter(whole, requires_grad=requires_grad)

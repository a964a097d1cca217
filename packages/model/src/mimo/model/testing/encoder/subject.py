"""What the kit looks at of an encoder: the plugin, with items to encode, in a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from mimo.model.spec import EncoderSpec, Stage
from mimo.model.testing.built import BuiltParts, Layout, build_stages
from mimo.model.testing.checks import BrokenError

NAME = "encoder"
"""What the module is called in the parts that the kit builds."""


@attrs.frozen(kw_only=True)
class ModuleLayout(Layout):
    """How an encoder is laid out; see `Layout` for what every module has.

    Args:
        seam: whether the projector is a stage of its own, behind the tower's.
    """

    seam: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """An encoder, and items to encode.

    Args:
        spec: the encoder.
        config: an instance of ``spec.config``.
        hidden: width of the rows that it must deliver.
        raw: items as a dataset hands them in, at least two, of unlike sizes where the modality has such.
    """

    spec: EncoderSpec
    config: Any
    hidden: int
    raw: Sequence[Any]

    def sizes(self) -> list[tuple[int, ...]]:
        """Return the items' header sizes."""
        return [self.spec.measure(raw) for raw in self.raw]

    def counts(self) -> list[int]:
        """Return the rows that each item becomes."""
        return [self.spec.rows(self.config, size) for size in self.sizes()]

    def items(self, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
        """Return the items prepared, floating numbers as ``dtype``."""
        return [
            {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in self.spec.prepare(self.config, raw).items()
            }
            for raw in self.raw
        ]

    def build(self, layout: ModuleLayout | None = None, *, stirred: bool = True) -> Built:
        """Build the module in a layout on the default group's ranks; collective over them.

        Args:
            layout: of the module; on this rank alone if None.
            stirred: whether its parameters are moved off their initial values, among them zeros and ones that hide
                mistakes; the same in any layout.
        """
        layout = layout or ModuleLayout()
        count = layout.pp + layout.seam
        stages = [Stage(index, count, layout.seam) for index in range(count)]
        parts, axes = build_stages(self.spec, self.config, name=NAME, layout=layout, stages=stages, hidden=self.hidden)
        built = Built(parts=parts, layout=layout, axes=axes)
        if stirred:
            built.stir()
        return built

    def layout(self, **changes: Any) -> ModuleLayout:
        """Return the layout of the whole module, with fields changed."""
        return ModuleLayout(**changes)

    def rows(self, built: Built) -> Tensor:
        """Return the rows of all items."""
        return built.encode(self.items(), self.sizes())

    def learn(self, built: Built) -> None:
        """Take the gradients of some loss on the rows of all items."""
        built.learn(self.items(), self.sizes())


@attrs.frozen(kw_only=True, eq=False)
class Built(BuiltParts):
    """All stages of an encoder, as this rank holds them."""

    def encode(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return this rank's rows of these items, through all stages."""
        rows: Any = None
        for part in self.parts:
            rows = part.encode(items if part.stage.is_first else [], sizes, rows)
            if not isinstance(rows, Tensor):
                raise BrokenError(f"of {len(items)} items forward() returned {type(rows).__name__}, not a tensor")
        return cast("Tensor", rows)

    def learn(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[tuple[int, ...]]) -> None:
        """Take the gradients of some loss on the rows of these items."""
        rows = self.encode(items, sizes)
        if rows.requires_grad:
            rows.backward(torch.randn(rows.shape, generator=torch.Generator().manual_seed(7)))

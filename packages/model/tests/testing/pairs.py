"""A small encoder that keeps every promise, for tests of what looks at encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.model import (
    EncoderSpec,
    EncoderStages,
    OpCost,
    Stage,
    encoder_layer_cost,
    linear_cost,
    packed_context,
    packed_recompute,
    packed_seam,
    packed_tensor,
)
from mimo.model.runtime import (
    EncoderLayer,
    EncoderMlp,
    Linear,
    PackedEncoder,
)

WIDTH, HEADS, MIDDLE, LAYERS = 8, 2, 12, 2
ITEMS = ((0.5, -1.0, 2.0, 0.1), (1.5, 0.3), (-0.7, 0.9, 0.2, 0.4, 1.1, -0.2))
"""A raw item is a tuple of numbers; two of them become a row."""


@attrs.frozen
class Config:
    """Nothing to set."""


class Pairs(PackedEncoder):
    """A row for each pair of numbers."""

    first_only = ("embed",)
    last_only = ("projector",)

    def __init__(self, hidden: int) -> None:
        super().__init__(EncoderLayer(WIDTH, HEADS, MIDDLE, eps=1e-6) for _ in range(LAYERS))
        self.embed = Linear(2, WIDTH)
        self.projector = EncoderMlp(WIDTH, MIDDLE, hidden)

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        sizes: Sequence[tuple[int, ...]],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return the rows of this rank."""
        lengths = [size[0] // 2 for size in sizes]
        if hidden is None:
            hidden = self.start(items, lengths)
        hidden = self.pass_layers(hidden, lengths)
        return self.projector(hidden) if self.stage.is_last else hidden

    def start(self, items: Sequence[Mapping[str, Tensor]], lengths: Sequence[int]) -> Tensor:
        """Return embedded pairs."""
        values = torch.cat([item["values"] for item in items]) if items else torch.zeros(0)
        held = self.rows.held(sum(lengths))
        pairs = values.to(self.embed.weight.dtype).view(-1, 2)[held.start : held.stop]
        return self.rows.pad(self.embed(pairs), total=sum(lengths))


def _cut(module: nn.Module, stage: Stage) -> nn.Module:
    assert isinstance(module, PackedEncoder)
    module.cut(stage)
    return module


def _flops(_config: Config, hidden: int, stage: Stage, recompute: str, sizes: Sequence[tuple[int, ...]]) -> Any:
    lengths = [size[0] // 2 for size in sizes]
    sums = {"width": WIDTH, "heads": HEADS, "intermediate": MIDDLE, "recompute": recompute}
    work = sum([encoder_layer_cost(lengths, **sums)] * len(stage.layers(LAYERS)), OpCost())  # type: ignore[arg-type]
    rows = sum(lengths)
    projector = linear_cost(rows, WIDTH, MIDDLE, bias=True) + linear_cost(rows, MIDDLE, hidden, bias=True)
    return {"encoder": linear_cost(rows, 2, WIDTH, bias=True) + work, "projector": projector}


def spec_of(module: type[Pairs] = Pairs, **changes: Any) -> EncoderSpec:
    """Return the plugin of ``module``, with fields changed."""
    spec = EncoderSpec(
        name="pairs",
        config=Config,
        measure=lambda raw: (len(raw),),
        rows=lambda _config, size: size[0] // 2,
        prepare=lambda _config, raw: {"values": torch.tensor(raw)},
        build=lambda _config, hidden: module(hidden),
        parts={"encoder": ("embed", "layers"), "projector": ("projector",)},
        tensor=packed_tensor(lambda _config: {"heads": HEADS}),
        context=packed_context(),
        recompute=packed_recompute(),
        stages=EncoderStages(
            layers=lambda _config: LAYERS,
            message_rows=lambda _config, size: size[0] // 2,
            width=lambda _config: WIDTH,
            cut=_cut,
            parts=lambda _config, stage: frozenset({"encoder", "projector"} if stage.is_last else {"encoder"}),
        ),
        seam=attrs.evolve(packed_seam(lambda _config, size: size[0] // 2), width=lambda _config: WIDTH),
        flops=_flops,
    )
    return attrs.evolve(spec, **changes)

"""C-RADIO's vision transformer over packed images of any size (Ranzinger et al. 2024, arXiv:2312.06709).

A ViT whose patches are embedded without bias, with cropped positions, and with class tokens and registers before the
patches of each image; there is no norm at its end.
Shapes: T rows of this rank's slice, padding included, W encoder width, H the language model's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from mimo.model.runtime import EncoderLayer, Linear, PackedEncoder, Projector, packed_patches, to_device, touched_by
from mimo_encoder_radio._config import RadioConfig
from mimo_encoder_radio._grids import Grid, grids_of
from mimo_encoder_radio._positions import Positions, Prefix


class Radio(PackedEncoder):
    """The whole encoder, or after `cut` one pipeline stage of it."""

    first_only = ("patch", "positions", "prefix")
    last_only = ("projector",)

    def __init__(self, config: RadioConfig, hidden: int) -> None:
        super().__init__(
            EncoderLayer(
                config.width,
                config.heads,
                config.intermediate,
                eps=config.eps,
                activation=config.activation,
                key_bias=True,
                drop_path=config.drop_path,
            )
            for _ in range(config.layers)
        )
        self.config = config
        self.patch = Linear(config.channels * config.patch**2, config.width, bias=False)
        self.positions = Positions(config.positions, config.width)
        self.prefix = Prefix(config.prefix, config.width)
        self.projector = Projector(config.projector, config.width, hidden)

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        sizes: Sequence[tuple[int, ...]] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's rows of all images in order: [T, H] from the last stage, [T, W] from the others.

        Args:
            items: prepared images, on the first stage: ``pixels`` [n, C, height, width].
            sizes: their header sizes; a later stage has nothing else to separate the images.
            hidden: rows [T, W] of the stage before; None on the first.
        """
        if hidden is None:
            own = [[self._grid(image) for image in item["pixels"]] for item in items]
        else:
            assert sizes is not None, "a later stage needs the sizes of the images"
            own = [grids_of(self.config, size) for size in sizes]
        with self.draw_keys.at(self.draw_keys.parts([len(grids) for grids in own])):
            return self._encode(items, [grid for grids in own for grid in grids], hidden)

    def _encode(self, items: Sequence[Mapping[str, Tensor]], grids: Sequence[Grid], hidden: Tensor | None) -> Tensor:
        lengths = [self.config.prefix + down * across for down, across in grids]
        if hidden is None:
            hidden = self._embed([image for item in items for image in item["pixels"]], grids, lengths)
        hidden = self.pass_layers(hidden, lengths)
        if not self.stage.is_last:
            return hidden
        class_rows = len(self.config.keep)
        if not class_rows:
            return cast("Tensor", self.projector(hidden, grids, self.rows, prefix=self.config.prefix))
        index = _kept(lengths, prefix=self.config.prefix, keep=self.config.keep)
        hidden = self.rows.take(hidden, index, total=sum(lengths))
        return cast("Tensor", self.projector(hidden, grids, self.rows, prefix=class_rows, class_tokens=class_rows))

    def _grid(self, image: Tensor) -> Grid:
        return image.shape[1] // self.config.patch, image.shape[2] // self.config.patch

    def _embed(self, images: Sequence[Tensor], grids: Sequence[Grid], lengths: Sequence[int]) -> Tensor:
        """Return class tokens, registers and embedded patches with their positions added, [T, W]."""
        weight = self.patch.weight
        learned = self.prefix()
        held, keys = self.rows.held(sum(lengths)), self.draw_keys
        touched, here = touched_by(held, lengths)
        source = _sources(lengths[touched], prefix=len(learned))[here]
        patches = source[source >= len(learned)] - len(learned)  # one after the other
        mine = slice(int(patches[0]), int(patches[-1]) + 1) if len(patches) else slice(0, 0)
        pixels = packed_patches(images[touched], patch=self.config.patch, like=weight, width=weight.shape[1])[mine]
        those = held[: len(source)]
        numbers = torch.arange(those.start, those.stop)[source >= len(learned)]
        with keys.at(keys.packed(lengths, numbers, device=weight.device)):
            embedded = self.patch(pixels)
        embedded = embedded + self.positions(grids[touched], mine).to(embedded)
        place = to_device(source.where(source < len(learned), source - mine.start), weight.device)
        return self.rows.pad(torch.cat((learned, embedded)).index_select(0, place), total=sum(lengths))


def _sources(lengths: Sequence[int], *, prefix: int) -> Tensor:
    """Return what each row of some images is: below ``prefix`` one of these, above it a patch, counted over all."""
    patches = [length - prefix for length in lengths]
    stops = list(accumulate(patches, initial=prefix))
    learned = torch.arange(prefix)
    pieces = [piece for start, stop in pairwise(stops) for piece in (learned, torch.arange(start, stop))]
    return torch.cat([*pieces, learned[:0]])


def _kept(lengths: Sequence[int], *, prefix: int, keep: Sequence[int]) -> Tensor:
    """Return which rows of some images stay where only ``keep`` of the first ``prefix`` of each do."""
    chosen = torch.tensor(keep)
    starts = list(accumulate(lengths, initial=0))
    pieces = [
        piece for start, stop in pairwise(starts) for piece in (chosen + start, torch.arange(start + prefix, stop))
    ]
    return torch.cat([*pieces, chosen[:0]])

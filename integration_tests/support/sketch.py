"""A generator as others may write it: it makes each pixel of a picture from the mean of what its rows say, and noise.

Its loss follows from the rows of an item, from noise that is drawn by the item's key, and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.model import GeneratorSpec, Reads
from mimo.model.runtime import Linear, fold, normal


@attrs.frozen(kw_only=True)
class SketchConfig:
    """How rows are read: ``rows`` of the placeholder, and whether they alone are."""

    width: int = 12
    rows: int = 1
    reads: Reads = "before"


class Sketch(nn.Module):
    """The whole module."""

    def __init__(self, config: SketchConfig, hidden: int) -> None:
        super().__init__()
        self.read = Linear(hidden, config.width)
        self.write = Linear(config.width + 1, 1)
        self.start = nn.Parameter(torch.linspace(-1, 1, config.width))

    def forward(
        self, items: Sequence[Mapping[str, Tensor]], rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor
    ) -> Tensor:
        """Return the square of how far off each pixel is."""
        read = self.read(rows).tanh()
        found = [rows.new_zeros(0).float()]
        for item, (start, stop), key in zip(items, spans, keys, strict=True):
            said = self.start + (read[start:stop].mean(0) if stop > start else 0)
            noise = normal(fold(key[None], 1), len(item["pixels"])).to(rows).T
            made = self.write(torch.cat([said.expand(len(noise), -1), noise], 1)).squeeze(1)
            found.append((made - item["pixels"]).float().square())
        return torch.cat(found)


def _generate(
    module: Any, _config: SketchConfig, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor
) -> list[Any]:
    """Return a picture of 2 x 3 pixels for each item."""
    from PIL import Image

    read, found = module.read(rows).tanh(), []
    for (start, stop), key in zip(spans, keys, strict=True):
        said = module.start + (read[start:stop].mean(0) if stop > start else 0)
        noise = normal(fold(key[None], 1), 6).to(rows).T
        made = module.write(torch.cat([said.expand(6, -1), noise], 1)).squeeze(1)
        pixels = (128 + 100 * made).clamp(0, 255).round().to(torch.uint8)
        found.append(Image.frombytes("L", (3, 2), bytes(pixels.tolist())))
    return found


def _save(raw: Any, path: Path) -> Path:
    file = path.with_suffix(".png")
    raw.save(file)
    return file


def _prepare(_config: SketchConfig, raw: Any) -> Mapping[str, Tensor]:
    pixels = torch.frombuffer(bytearray(raw.tobytes()), dtype=torch.uint8)
    return {"pixels": pixels.float() / 255}


def _blank(size: tuple[int, ...]) -> Any:
    from PIL import Image

    height, width = size
    return Image.new("L", (width, height), 77)


SKETCH = GeneratorSpec(
    name="sketch",
    config=SketchConfig,
    measure=lambda raw: (raw.height, raw.width),
    targets=lambda _config, size: math.prod(size),
    prepare=_prepare,
    build=Sketch,
    reads=lambda config: config.reads,
    rows=lambda config: config.rows,
    generate=_generate,
    save=_save,
    parts={"reader": ("read", "start"), "writer": ("write",)},
    blank=_blank,
)

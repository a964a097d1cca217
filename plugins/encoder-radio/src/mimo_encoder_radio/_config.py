"""The settings of the encoder ``radio``. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from mimo.hooks import ConfigError, above_zero, at_least, check_at_most, is_rate
from mimo.model import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LEARNED_ROWS,
    MAX_PATCH,
    MAX_PIXELS,
    MAX_ROWS,
    MAX_TILES,
    MAX_WIDTH,
    Activation,
    ProjectorConfig,
)

# A config doesn't know which module it belongs to, so its errors name the setting from there on.
WHERE = "config"
_LIMITS: Mapping[str, int] = {
    "patch": MAX_PATCH,
    "width": MAX_WIDTH,
    "layers": MAX_LAYERS,
    "heads": MAX_HEADS,
    "intermediate": MAX_WIDTH,
    "positions": MAX_LEARNED_ROWS,
    "class_tokens": MAX_LEARNED_ROWS,
    "registers": MAX_LEARNED_ROWS,
    "min_patches": MAX_ROWS,
    "max_patches": MAX_ROWS,
    "size": MAX_PIXELS,
    "max_tiles": MAX_TILES,
}
_UNUSED: Mapping[str, tuple[str, ...]] = {
    "native": ("size", "max_tiles", "thumbnail"),
    "tiles": ("min_patches", "max_patches"),
}
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
"""Of the colours of the images that CLIP has read (Radford et al. 2021, arXiv:2103.00020), in 0 .. 1."""
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Their standard deviations."""


@attrs.frozen(kw_only=True)
class RadioConfig:
    """Settings of the encoder, ``modules.<name>.config``; those of its layers are C-RADIO's H size unless given.

    Args:
        patch: side of a patch in pixels.
        channels: 1 for grey images, 3 for colour.
        width: width of a row inside the encoder, a multiple of ``heads``.
        layers: number of layers.
        heads: attention heads.
        intermediate: width inside the feed-forward part.
        activation: inside it.
        eps: added to variances before the root.
        drop_path: the rate at which each layer's attention and its feed-forward part are each left out for an image or
            a tile in training.
        positions: side of the square table of position embeddings, in patches. Each image takes a crop of it, made
            larger or smaller to its longer side.
        class_tokens: learned rows before the patches of each image, which each teacher of RADIO has one of.
        registers: more learned rows after these, which nothing was taught to.
        keep: which of all these go to the projector before the patches of an image, counted from 0; none is usual, and
            all that goes with a projector that shuffles.
        mean: of each channel, in 0 .. 1, taken off the pixels.
        std: of each channel, by which the rest is divided.
        mode: ``native`` resizes an image to whole patches near its own size, ``tiles`` to tiles of one size, each of
            which the encoder sees as an image.
        min_patches: of an image at its own size; a smaller one is enlarged, its aspect kept.
        max_patches: likewise at most.
        size: side of a tile in pixels.
        max_tiles: of an image, the thumbnail not counted.
        thumbnail: whether the whole image follows as one more tile where there are several.
        projector: from rows of this width to the language model's; its ``shuffle`` joins squares of patches.

    Raises:
        ConfigError: a value is out of range or doesn't go with another.
    """

    patch: int = attrs.field(default=16, validator=at_least(1, where=WHERE))
    channels: int = 3
    width: int = attrs.field(default=1280, validator=at_least(1, where=WHERE))
    layers: int = attrs.field(default=32, validator=at_least(1, where=WHERE))
    heads: int = attrs.field(default=16, validator=at_least(1, where=WHERE))
    intermediate: int = attrs.field(default=5120, validator=at_least(1, where=WHERE))
    activation: Activation = "gelu"
    eps: float = attrs.field(default=1e-6, validator=above_zero(where=WHERE))
    drop_path: float = attrs.field(default=0.0, validator=is_rate(where=WHERE))
    positions: int = attrs.field(default=128, validator=at_least(1, where=WHERE))
    class_tokens: int = attrs.field(default=3, validator=at_least(1, where=WHERE))
    registers: int = attrs.field(default=7, validator=at_least(0, where=WHERE))
    keep: tuple[int, ...] = ()
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    mode: Literal["native", "tiles"] = "native"
    min_patches: int = attrs.field(default=1, validator=at_least(1, where=WHERE))
    max_patches: int = attrs.field(default=1024, validator=at_least(1, where=WHERE))
    size: int = attrs.field(default=512, validator=at_least(1, where=WHERE))
    max_tiles: int = attrs.field(default=12, validator=at_least(1, where=WHERE))
    thumbnail: bool = True
    projector: ProjectorConfig = attrs.field(factory=ProjectorConfig)

    def __attrs_post_init__(self) -> None:
        """Refuse what is too large, and what doesn't go together."""
        check_at_most(self, _LIMITS, where=WHERE)
        if self.channels not in (1, 3):
            raise ConfigError(f"{WHERE}.channels", expected="1 (grey) or 3 (colour)", got=repr(self.channels))
        if self.width % self.heads:
            raise ConfigError(f"{WHERE}.width", expected=f"a multiple of {self.heads}, the heads", got=repr(self.width))
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels or (name == "std" and min(values) <= 0):
                above = " above 0" if name == "std" else ""
                expected = f"a number{above} for each of {self.channels} channels"
                raise ConfigError(f"{WHERE}.{name}", expected=expected, got=repr(list(values)))
        if list(self.keep) != sorted(set(self.keep) & set(range(self.prefix))):
            expected = f"ascending numbers of the {self.prefix} class tokens and registers, from 0"
            raise ConfigError(f"{WHERE}.keep", expected=expected, got=repr(list(self.keep)))
        if self.keep and self.projector.shuffle > 1:
            expected = "none, since a projector that shuffles joins neighbours, and these have none"
            raise ConfigError(f"{WHERE}.keep", expected=expected, got=repr(list(self.keep)))
        self._check_sizes()

    def _check_sizes(self) -> None:
        for key in _UNUSED[self.mode]:
            if (value := getattr(self, key)) != getattr(attrs.fields(RadioConfig), key).default:
                expected = f"none, since images of mode {self.mode!r} have no use for it"
                raise ConfigError(f"{WHERE}.{key}", expected=expected, got=repr(value))
        shuffle = self.projector.shuffle
        if self.max_patches < max(self.min_patches, shuffle**2):
            expected = f"at least min_patches, {self.min_patches}, and the {shuffle**2} that the projector joins"
            raise ConfigError(f"{WHERE}.max_patches", expected=expected, got=repr(self.max_patches))
        if self.mode == "tiles" and self.size % (self.patch * shuffle):
            expected = f"a multiple of {self.patch * shuffle} pixels, of which the projector makes a row"
            raise ConfigError(f"{WHERE}.size", expected=expected, got=repr(self.size))

    @property
    def prefix(self) -> int:
        """Learned rows before the patches of each image."""
        return self.class_tokens + self.registers

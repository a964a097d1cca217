"""The settings of the three families: one transformer, and what each of them has of its own. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import attrs

from mimo.hooks import ConfigError, check_at_most, is_rate
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

C = TypeVar("C", bound="VisionConfig")

# A config doesn't know which module it belongs to, so its errors name the setting from there on.
WHERE = "config"
_COUNTS = ("patch", "width", "layers", "heads", "intermediate", "size", "max_patches", "max_tiles")
_LIMITS: Mapping[str, int] = {
    "patch": MAX_PATCH,
    "width": MAX_WIDTH,
    "layers": MAX_LAYERS,
    "heads": MAX_HEADS,
    "intermediate": MAX_WIDTH,
    "size": MAX_PIXELS,
    "max_patches": MAX_ROWS,
    "max_tiles": MAX_TILES,
}
_UNUSED: Mapping[str, tuple[str, ...]] = {
    "native": ("size", "max_tiles", "thumbnail", "crop"),
    "fixed": ("max_patches", "enlarge", "max_tiles", "thumbnail"),
    "tiles": ("max_patches", "enlarge", "crop"),
}


@attrs.frozen(kw_only=True)
class VisionConfig:
    """Settings that all families have, ``modules.<name>.config``.

    Args:
        patch: side of a patch in pixels.
        channels: 1 for grey images, 3 for colour.
        width: width of a row inside the encoder, a multiple of ``heads``.
        layers: number of layers.
        heads: attention heads.
        intermediate: width inside the feed-forward part.
        activation: inside the feed-forward part.
        eps: added to variances before the root, in all norms.
        feature_layer: whose rows are handed on, counted from the end: -1 for those of the last layer, -2 for those
            before it. Layers beyond it are kept with the weights, but neither run nor trained.
        final_norm: whether these rows pass the norm that follows the last layer; otherwise it is kept likewise.
        mode: ``native``: each image at its own size, in whole patches; ``fixed``: all images at one size; ``tiles``: an
            image in as many tiles of one size as suit it.
        size: side in pixels of a fixed image or tile, and of the images that a learned table of positions is for.
        max_patches: of an image at its own size; a larger one is shrunk, its aspect kept.
        enlarge: whether smaller ones are enlarged to nearly as many.
        max_tiles: of an image.
        thumbnail: whether the whole image follows as one more tile where there are several.
        crop: whether an image of a fixed size is shrunk to cover it and its middle cut out; otherwise it is stretched.
        resample: how pixels are interpolated.
        mean: subtracted from pixels of 0 to 1: one number, or one for each channel.
        std: that they are divided by then, likewise.
        drop_path: the rate at which the last layer's attention and its feed-forward part are each left out for an image
            or tile in training; those before it less often, the first never (Huang et al. 2016, arXiv:1603.09382,
            section 3).
        projector: from the encoder's rows to the language model's.

    Raises:
        ConfigError: a value is out of range, doesn't go with another, or is of no use in the mode.
    """

    key_bias: ClassVar[bool] = True
    patch_bias: ClassVar[bool] = True
    class_tokens: ClassVar[int] = 0
    pre_norm: ClassVar[bool] = False
    learned_positions: ClassVar[bool] = True

    patch: int = 16
    channels: int = 3
    width: int = 768
    layers: int = 12
    heads: int = 12
    intermediate: int = 3072
    activation: Activation = "gelu"
    eps: float = 1e-6
    feature_layer: int = -1
    final_norm: bool = True
    mode: Literal["native", "fixed", "tiles"] = "fixed"
    size: int = 224
    max_patches: int = 1024
    enlarge: bool = False
    max_tiles: int = 12
    thumbnail: bool = True
    crop: bool = False
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    drop_path: float = attrs.field(default=0.0, validator=is_rate(where=WHERE))
    projector: ProjectorConfig = attrs.field(factory=ProjectorConfig)

    def __attrs_post_init__(self) -> None:
        """Refuse what is out of range, and what doesn't go together."""
        check_at_most(self, _LIMITS, where=WHERE)
        for key in _COUNTS:
            if getattr(self, key) < 1:
                raise refused(key, "1 or more", getattr(self, key))
        if self.channels not in (1, 3):
            raise refused("channels", "1 (grey) or 3 (colour)", self.channels)
        multiple = self.heads if self.learned_positions else math.lcm(4, self.heads)
        if self.width % multiple:
            parts = "" if self.learned_positions else " and positions in four parts"
            raise refused("width", f"a multiple of {multiple}, for {self.heads} heads{parts}", self.width)
        if not 0 < self.eps < 1:
            raise refused("eps", "a number between 0 and 1", self.eps)
        if not -self.layers <= self.feature_layer <= -1:
            raise refused("feature_layer", f"-1 to -{self.layers}, counted from the last layer", self.feature_layer)
        self._check_images()

    def _check_images(self) -> None:
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels) or (key == "std" and min(values) <= 0):
                above = " above 0" if key == "std" else ""
                raise refused(key, f"one number{above}, or one for each of {self.channels} channels", list(values))
        for key in _UNUSED[self.mode]:
            if key == "size" and self.sized_table:
                continue
            if (value := getattr(self, key)) != getattr(attrs.fields(type(self)), key).default:
                raise refused(key, f"none, since images of mode {self.mode!r} have no use for it", value)
        shuffle = self.projector.shuffle
        if self.mode == "native" and self.max_patches < shuffle**2:
            raise refused(
                "max_patches", f"at least the {shuffle**2} patches that the projector joins", self.max_patches
            )
        if self.mode != "native" and (self.side < 1 or self.side % shuffle):
            expected = f"{'a multiple of ' * (shuffle > 1)}{shuffle} patches of {self.patch} pixels or more"
            raise refused("size", f"pixels that make {expected} a side", self.size)

    @property
    def side(self) -> int:
        """Patches of a side of a fixed image or tile; what is left of its pixels is cut off."""
        return self.size // self.patch

    @property
    def sized_table(self) -> bool:
        """Whether there is a table of positions that has as many places as ``size`` says."""
        return False

    @property
    def depth(self) -> int:
        """Number of layers that are run."""
        return self.layers + 1 + self.feature_layer

    @property
    def class_rows(self) -> int:
        """Number of class tokens that are handed on."""
        return 0


@attrs.frozen(kw_only=True)
class VitConfig(VisionConfig):
    """Settings of ``vit``: positions are sines of any grid, and keys have no bias, since a softmax cancels it.

    Raises:
        ConfigError: as `VisionConfig`; its width must be a multiple of 4 too.
    """

    key_bias: ClassVar[bool] = False
    learned_positions: ClassVar[bool] = False

    width: int = 256
    layers: int = 4
    heads: int = 4
    intermediate: int = 1024
    mode: Literal["native", "fixed", "tiles"] = "native"


@attrs.frozen(kw_only=True)
class LearnedConfig(VisionConfig):
    """What families with a learned table of positions have besides.

    Args:
        table: patches of a side of that table; 0 for those of ``size``. For images of other grids it is resized.
        resize_positions: how: ``bilinear`` with antialiasing, or ``bicubic`` without.
    """

    table: int = 0
    resize_positions: Literal["bilinear", "bicubic"] = "bicubic"

    def __attrs_post_init__(self) -> None:
        """Refuse also a table without places, or with more than can be."""
        super().__attrs_post_init__()
        check_at_most(self, {"table": MAX_LEARNED_ROWS}, where=WHERE)
        if self.table < 0 or not self.places:
            raise refused("table", "1 or more, or 0 where size holds a patch", self.table)

    @property
    def places(self) -> int:
        """Patches of a side of the table."""
        return self.table or self.side

    @property
    def sized_table(self) -> bool:
        """Whether the table has as many places as ``size`` says."""
        return self.places == self.side


@attrs.frozen(kw_only=True)
class SiglipConfig(LearnedConfig):
    """Settings of ``siglip``, SigLIP (Zhai et al. 2023, arXiv:2303.15343) and SigLIP 2 (Tschannen et al., 2502.14786).

    With mode ``native``, ``enlarge`` and ``resize_positions = "bilinear"`` it is SigLIP 2's NaFlex.
    """

    activation: Activation = "gelu_tanh"
    max_patches: int = 256


@attrs.frozen(kw_only=True)
class ClipConfig(LearnedConfig):
    """Settings of ``clip`` (Radford et al. 2021, arXiv:2103.00020): a class token, and a norm before the layers.

    Args:
        keep_class_token: whether it is handed on before the patches; otherwise it is dropped after the layers.
    """

    patch_bias: ClassVar[bool] = False
    class_tokens: ClassVar[int] = 1
    pre_norm: ClassVar[bool] = True

    activation: Activation = "quick_gelu"
    eps: float = 1e-5
    patch: int = 14
    width: int = 1024
    layers: int = 24
    heads: int = 16
    intermediate: int = 4096
    crop: bool = True
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    keep_class_token: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse also a class token among joined patches."""
        super().__attrs_post_init__()
        if self.class_rows and self.projector.shuffle > 1:
            raise refused("keep_class_token", "false, since the projector joins patches", self.keep_class_token)

    @property
    def class_rows(self) -> int:
        """Number of class tokens that are handed on."""
        return int(self.keep_class_token)


def refused(key: str, expected: str, got: Any) -> ConfigError:
    """Return the error of one setting."""
    return ConfigError(f"{WHERE}.{key}", expected=expected, got=repr(got))

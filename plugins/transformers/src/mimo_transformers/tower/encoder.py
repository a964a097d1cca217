"""A vision tower of the library, all images of one size in one call, and a projector behind it.

Shapes: N images, C channels, S side in pixels, T rows of an image, W width of the tower, H of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo.model import Side
from mimo.model.runtime import DrawKeys, Drawn, PackedRows, Projector, create_on
from mimo_transformers.family import HfEncoderConfig, new_tower, quiet
from mimo_transformers.model.drops import replace_drops
from mimo_transformers.model.modules import Constant, Draw, Published, without_contents
from mimo_transformers.model.own import make_own, record_whole_layers, replace

_GRID_DIMS = 4
"""Of rows that lie in a grid: [N, W, h, w], as those of convolutions, or [N, h, w, W]."""


@attrs.frozen(kw_only=True)
class Rows:
    """The rows of one image behind a tower, and the image.

    Args:
        channels: C.
        side: S.
        width: W.
        grid: of patches, down and across.
        prefix: rows before those, such as class tokens.
    """

    channels: int
    side: int
    width: int
    grid: tuple[int, int]
    prefix: int

    @property
    def count(self) -> int:
        """How many they are."""
        return self.prefix + self.grid[0] * self.grid[1]


_FOUND: dict[str, Rows] = {}


def rows_of(config: HfEncoderConfig) -> Rows:
    """Return the rows of one image, found by running the tower without storage.

    Raises:
        ConfigError: it can't be run so, or has less class tokens than are to be handed on.
    """
    key = repr(config)
    if key not in _FOUND:
        _FOUND[key] = _find_rows(config)
    return _FOUND[key]


def _find_rows(config: HfEncoderConfig) -> Rows:
    side, channels = config.side, config.channels
    for key, values in (("mean", config.mean), ("std", config.std)):
        if len(values) not in (1, channels):
            expected = f"one number, or one for each of {channels} channels"
            raise ConfigError(f"config.{key}", expected=expected, got=repr(list(values)))
    with quiet(), torch.no_grad(), create_on("meta"):
        found = features(new_tower(config.library()), torch.zeros(1, channels, side, side), config)
    _, count, width = found.shape
    patch = getattr(config.library(), "patch_size", None)
    across = side // patch if isinstance(patch, int) and patch else 0
    if not 0 < across**2 <= count:  # patches of another size, or joined
        across = math.isqrt(count)
    rows = Rows(channels=channels, side=side, width=width, grid=(across, across), prefix=count - across**2)
    if config.class_tokens > rows.prefix:
        raise ConfigError(
            "config.class_tokens", expected=f"at most {rows.prefix}, as there are", got=repr(config.class_tokens)
        )
    if config.class_tokens and config.projector.shuffle > 1:
        raise ConfigError("config.class_tokens", expected="0, since the projector joins patches", got="more")
    if across % config.projector.shuffle:
        raise ConfigError(
            "config.projector.shuffle", expected=f"a divisor of {across}", got=repr(config.projector.shuffle)
        )
    return rows


def features(network: Any, pixels: Tensor, config: HfEncoderConfig) -> Tensor:
    """Return the rows [N, T, W] of images [N, C, S, S] behind the layer that a config names.

    Raises:
        ConfigError: the tower fails, returns no rows, or hasn't that layer.
    """
    deep = config.feature_layer < -1
    try:
        found = network(pixel_values=pixels, **({"output_hidden_states": True} if deep else {}))
    except Exception as error:
        raise refusal(config, f"a forward that fails with {type(error).__name__}: {error}") from error
    rows = found.last_hidden_state
    if deep:
        layers = found.hidden_states or ()
        if len(layers) < -config.feature_layer:
            got = f"{config.feature_layer}, and rows of {len(layers)} layers"
            raise ConfigError("config.feature_layer", expected="one whose rows the tower returns", got=got)
        rows = layers[config.feature_layer]
    if isinstance(rows, Tensor) and rows.dim() == _GRID_DIMS - 1:
        return rows
    if not isinstance(rows, Tensor) or rows.dim() != _GRID_DIMS:
        raise refusal(config, "a result without rows")
    _, *dims = rows.shape
    if dims[0] != dims[1] == dims[2]:
        return rows.flatten(2).transpose(1, 2)
    if dims[0] == dims[1] != dims[2]:
        return rows.flatten(1, 2)
    raise refusal(config, f"rows of the shape {dims}, which may lie in either order")


def refusal(config: HfEncoderConfig, got: str) -> ConfigError:
    """Return the error of a tower that can't be an encoder."""
    return ConfigError(
        "config.model_type",
        expected="a vision tower of transformers that sees images of one size, each by itself",
        got=f"{config.model_type!r} with {got}",
        fix="plugins/transformers/README.md lists those that can be trained.",
    )


class HfEncoder(nn.Module):
    """The whole encoder.

    Args:
        config: its settings.
        hidden: H.
        idle: paths in the tower of what isn't trained, since nothing that is handed on depends on it.
        constant: see `Constant`, by paths in the tower.

    Attributes:
        encoder: the library's model.
        draw_keys: by which it draws at random.
    """

    def __init__(
        self, config: HfEncoderConfig, hidden: int, *, idle: frozenset[str] = frozenset(), constant: Constant
    ) -> None:
        super().__init__()
        self.config, self.rows = config, rows_of(config)
        with quiet():
            network = new_tower(config.library())
        draw: Draw = partial(type(network)._init_weights, without_contents(network))  # noqa: SLF001 - what the library draws by itself
        paths = {part: path for path, part in network.named_modules()}
        replace(network, draw)
        replace_drops(network)
        make_own(network, draw, constant, paths)
        for path, parameter in network.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and path not in idle)
        self.encoder = network
        record_whole_layers(network, self._layers())
        self.draw_keys = DrawKeys()
        self.projector = Projector(config.projector, self.rows.width, hidden)

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        sizes: Sequence[tuple[int, ...]] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return the rows of all images in order, [rows, H].

        Args:
            items: prepared images.
            sizes: their header sizes.
            hidden: rows [N·T, W] of the tower, where that isn't here.
        """
        count = len(items) if hidden is None else len(sizes or ())
        if hidden is None:
            hidden = self.tower_rows(items)
        if not hasattr(self, "projector"):
            return hidden
        return cast(
            "Tensor",
            self.projector(
                hidden,
                [self.rows.grid] * count,
                PackedRows(),
                prefix=self.rows.prefix,
                class_tokens=self.config.class_tokens,
            ),
        )

    def divide(self, side: Side) -> None:
        """Keep what lies on one side of the projector's beginning."""
        delattr(self, "projector" if side == "tower" else "encoder")

    def layer_forwards(self) -> list[Callable[..., Any]]:
        """Return the forwards of the tower's layers.

        Raises:
            ConfigError: they don't follow one another in one list.
        """
        if not (layers := self._layers()):
            raise ConfigError(
                "recompute",
                expected="'none', since the layers of this tower don't follow one another in one list",
                got="'full'",
                fix="Leave it out.",
            )
        return [layer.forward for layer in layers]

    def _layers(self) -> Sequence[nn.Module]:
        """Return the tower's layers, none where they don't follow one another in one list."""
        count = getattr(self.config.library(), "num_hidden_layers", None)
        lists = (part for part in self.encoder.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
        return list(next(lists, ()))

    def tower_rows(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows [N·T, W] of images; without any the tower runs all the same, on a black one."""
        side = self.rows.side
        like = next(parameter for parameter in self.encoder.parameters() if parameter.is_floating_point())
        images = [item["pixels"] for item in items] or [torch.zeros(self.rows.channels, side, side)]
        pixels = torch.stack(images).to(device=like.device, dtype=like.dtype)
        with self.draw_keys.at(self.draw_keys.stacked(pixels.device) if items else Drawn()):
            rows = features(self.encoder, pixels, self.config)
        return rows[: len(items)].flatten(0, 1)

    def published(self, network: Any) -> dict[str, Published]:
        """Return for each parameter of the tower here, by its path, what it is in a model of the library."""
        assert isinstance(network, nn.Module)
        names = [path for path, _ in self.encoder.named_parameters()]
        return {f"encoder.{name}": Published(name=name) for name in names}

    def read(self, network: Any) -> None:
        """Take the tower's parameters and buffers from a model of the library of the same config."""
        theirs = dict(network.named_buffers()) | dict(network.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for path, tensor in [*self.encoder.named_parameters(), *self.encoder.named_buffers()]:
                tensor.copy_(theirs[path])

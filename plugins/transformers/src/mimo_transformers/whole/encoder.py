"""The half of an image-text model of the library that makes rows of images: its tower and its own projector.

Shapes: N images, T rows of all of them, H hidden of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo_transformers.family import ImageHalf, image_half
from mimo_transformers.model.modules import Constant, Draw, Published, without_contents
from mimo_transformers.model.own import make_own, record_whole_layers, replace
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.packed_images import use_image_attention

SIZE = "size"
"""Of a prepared image, its height and width."""
_MERGER = "merger"
"""In names of those parts of a tower that make rows of the language model's width: they belong to the projector."""
_BLANK = (64, 64)


def size_of(height: int, width: int) -> Tensor:
    """Return a size as a tensor [height, width, 0]: a shape is known wherever it lies, and numbers are waited for."""
    return torch.empty(height, width, 0)


def prepared(config: HfImagesConfig, image: Any) -> dict[str, Tensor]:
    """Return an image as the encoder takes it."""
    return {**config.processing.prepare(image), SIZE: size_of(image.height, image.width)}


def blank(size: tuple[int, ...] = _BLANK) -> Any:
    """Return a black image of so many pixels down and across."""
    from PIL import Image

    height, width = size
    return Image.new("RGB", (width, height))


class HfImages(nn.Module):
    """The whole encoder.

    Args:
        config: its settings.
        idle: paths in the library's whole model of what isn't trained, since nothing that is handed on depends on it.
        constant: see `Constant`, by paths in the library's whole model.
        one_call: whether attention over all images is one call, see `image_attention`.

    Attributes:
        encoder: the library's tower.
        projector: what the library's base model holds beside it.
    """

    def __init__(
        self, config: HfImagesConfig, *, idle: frozenset[str] = frozenset(), constant: Constant, one_call: bool = False
    ) -> None:
        super().__init__()
        self.config, self._processing = config, config.processing
        half = image_half(config.library())
        if one_call:
            use_image_attention(half.tower.config)
        inside = {part: f"{half.path}.{path}".strip(".") for path, part in half.base.named_modules()}
        _hide(half.base, half.tower_name)
        networks: tuple[tuple[Any, Any], ...] = ((half.tower, half.tower), (half.base, half.network))
        for part, network in networks:
            draw: Draw = partial(type(network)._init_weights, without_contents(network))  # noqa: SLF001 - what the library draws by itself
            names = {one: f"{inside[part]}.{path}".strip(".") for path, one in part.named_modules()}
            replace(part, draw)
            make_own(part, draw, constant, names)
            inside |= {one: f"{inside[part]}.{path}".strip(".") for path, one in part.named_modules()}
        _move_mergers(half)
        self.encoder, self.projector = half.tower, half.base
        record_whole_layers(half.tower, self._layers())
        # Not parts: names of them as the library has them.
        self._names = {path: inside[part] for path, part in self.named_modules() if part in inside}
        for path, parameter in self.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and self._there(path) not in idle)
        if not torch.empty(0).is_meta:
            _materialise(self)

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows of all images in order, [T, H]; without any the tower runs all the same, on a black one."""
        if not items:
            return self.rows_of([prepared(self.config, blank())])[:0]
        return self.rows_of(items)

    def rows_of(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows [T, H] of at least one image."""
        like = next(parameter for parameter in self.parameters() if parameter.is_floating_point())
        sizes = [(height, width) for height, width in (item[SIZE].shape[:2] for item in items)]
        rest = [{key: one for key, one in item.items() if key != SIZE} for item in items]
        given = {key: _on(one, like) for key, one in self._processing.collate(rest, sizes).items()}
        return image_rows(self.projector, given)

    def layer_forwards(self) -> list[Callable[..., Any]]:
        """Return the forwards of the tower's layers.

        Raises:
            ConfigError: there is no list of layers in it.
        """
        if not (layers := self._layers()):
            got, fix = "'full'", "Leave it out."
            raise ConfigError("recompute", expected="'none', since this tower has no list of layers", got=got, fix=fix)
        return [layer.forward for layer in layers]

    def _layers(self) -> Sequence[nn.Module]:
        """Return the tower's layers, none where there is no list of them."""
        lists = (part for part in self.encoder.modules() if isinstance(part, nn.ModuleList))
        return list(max(lists, key=len, default=()))

    def published(self, network: Any) -> dict[str, Published]:
        """Return for each parameter here, by its path, what it is in the library's whole model."""
        assert isinstance(network, nn.Module)
        return {path: Published(name=self._there(path)) for path, _ in self.named_parameters()}

    def read(self, network: Any) -> None:
        """Take all parameters and buffers from a whole model of the library of the same config."""
        theirs = dict(network.named_buffers()) | dict(network.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for path, tensor in [*self.named_parameters(), *self.named_buffers()]:
                tensor.copy_(theirs[self._there(path)])

    def _there(self, path: str) -> str:
        owner, _, leaf = path.rpartition(".")
        return f"{self._names[owner]}.{leaf}".lstrip(".")


def image_rows(base: Any, given: Mapping[str, Any]) -> Tensor:
    """Return the rows [T, H] that a base model of the library makes of images.

    What it makes for later layers of the language model (``deepstack_features``) stands beside them, [T, H·(1 + k)].

    Args:
        base: of the library.
        given: what its ``get_image_features`` takes.
    """
    found = base.get_image_features(**given)
    deep = getattr(found, "deepstack_features", None) or ()
    rows = _flat(getattr(found, "pooler_output", found))
    return torch.cat([rows, *map(_flat, deep)], 1) if deep else rows


def _flat(found: Any) -> Tensor:
    """Return rows [T, H] of a tensor [..., H], or of several, one after the other."""
    if isinstance(found, Tensor):
        return found.flatten(0, -2)
    return torch.cat([_flat(one) for one in found])


def _on(one: Any, like: Tensor) -> Any:
    """Return what is given to the library where its parameters are, numbers of their kind."""
    if not isinstance(one, Tensor):
        return one
    return one.to(device=like.device, dtype=like.dtype if one.is_floating_point() else None)


def _move_mergers(half: ImageHalf) -> None:
    """Register what a tower calls a merger with what lies behind it.

    Several not as a list: the members of lists are taken for layers, which run in the order in which they stand, and
    these run between those of the tower.
    """
    for name, _ in list(half.tower.named_children()):
        if _MERGER in name:
            found = _hide(half.tower, name)
            half.base.add_module(name, _unlisted(found) if isinstance(found, nn.ModuleList) else found)


def _unlisted(parts: nn.ModuleList) -> nn.Module:
    """Return a module of the same parts, by the same names."""
    found = nn.Module()
    for name, part in parts.named_children():
        found.add_module(name, part)
    return found


def _hide(owner: nn.Module, name: str) -> nn.Module:
    """Return a part of a module, which stays its attribute and isn't registered in it any more."""
    found = owner._modules.pop(name)  # noqa: SLF001 - `delattr` would take the attribute too
    assert found is not None
    vars(owner)[name] = found
    return found


class Resettable(Protocol):
    """What `make_own` makes of every module with parameters of its own."""

    def reset_parameters(self) -> None:
        """Draw their initial values."""


def _materialise(module: nn.Module) -> None:
    """Give all parameters of a module without storage their initial values, on the device of the caller's context."""
    for part in module.modules():
        own = dict(part.named_parameters(recurse=False))
        for leaf, old in own.items():
            setattr(part, leaf, nn.Parameter(torch.empty(old.shape), requires_grad=old.requires_grad))
        if own:
            cast("Resettable", part).reset_parameters()

"""Where a folder that the library writes has what a stage has: found by writing a thin model of numbered elements.

The library holds experts of all layers as single tensors and publishes them one by one, renames, stacks and transposes,
each family in its own way. So every element of a model with all its layers and experts, but of small widths, is given
a number of its own, `save_pretrained` writes it, and where each number lies in the files is the table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo.model import HfTensor, Stage
from mimo.model.runtime import create_on
from mimo_transformers.family import HfDecoderConfig, HfEncoderConfig, new_image_text, new_network, new_tower
from mimo_transformers.model.small import general, thin_config, trying
from mimo_transformers.model.stage import HfStage
from mimo_transformers.tower.encoder import HfEncoder
from mimo_transformers.tower.trial import build_encoder, thin_tower
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.encoder import HfImages
from mimo_transformers.whole.trial import build_images, thin_images, width_of

_Bridged: TypeAlias = HfStage | HfEncoder | HfImages
_ANY_WIDTH = 8

_MOST_EXPERTS = 1 << 16


def decoder_table(config: HfDecoderConfig) -> Sequence[HfTensor]:
    """Return the table of a language model of the library.

    Raises:
        ConfigError: what the library writes isn't parts of tensors, in another order of dims; or there are more experts
            than any model has.
    """
    experts = config.layers * max(1, config.experts)
    if experts > _MOST_EXPERTS:
        raise ConfigError(
            "modules.language.config.values",
            expected=f"at most {_MOST_EXPERTS:,} experts in all layers together",
            got=f"{experts:,}",
        )
    with create_on("meta"):
        whole = HfStage(config, Stage())
    thin = thin_config(config)
    return _table(whole, repr(thin), lambda: (new_network(thin.library(), attention="eager"), HfStage(thin, Stage())))


def tower_table(config: HfEncoderConfig) -> Sequence[HfTensor]:
    """Return the table of a tower of the library.

    Raises:
        ConfigError: as `decoder_table`.
    """
    with create_on("meta"):
        whole = build_encoder(config, _ANY_WIDTH)
    thin = thin_tower(config)
    return _table(whole, repr(thin), lambda: (new_tower(thin.library()), build_encoder(thin, _ANY_WIDTH)))


def images_table(config: HfImagesConfig) -> Sequence[HfTensor]:
    """Return the table of the half of a whole model that makes rows of images.

    Raises:
        ConfigError: as `decoder_table`.
    """
    with create_on("meta"):
        whole = build_images(config, width_of(config))
    return _table(whole, *_thin_whole(config))


def language_names(config: HfImagesConfig) -> frozenset[str]:
    """Return the names of the other half's tensors, with ``*`` for each number."""
    key, make = _thin_whole(config)
    return frozenset(map(general, _locations_of(key, make).others))


def _thin_whole(config: HfImagesConfig) -> tuple[str, Callable[[], tuple[Any, _Bridged]]]:
    thin = thin_images(config, has_all_text=True)
    return repr(thin), lambda: (new_image_text(thin.library()), build_images(thin, width_of(thin)))


_KNOWN: dict[str, _Locations] = {}


def _table(whole: _Bridged, described: str, make: Callable[[], tuple[Any, _Bridged]]) -> Sequence[HfTensor]:
    """Return the table of a module, of which ``make`` makes a thin one, and the library's."""
    shapes = {path: tuple(one.shape) for path, one in whole.named_parameters()}
    places = _locations_of(described, make).places
    rows: dict[_Location, tuple[int, int] | None] = {}
    for parts in _grouped(places, lambda place: place.theirs).values():
        end = 0
        for place in sorted(parts, key=lambda place: place.order):
            start, end = end, end + (0 if place.alone else place.part_shape(shapes[place.ours])[place.along])
            rows[place] = None if place.alone else (start, end)
    return [_entry(found, rows[found[0]]) for found in _grouped(places, lambda place: place.ours).values()]


@attrs.frozen(kw_only=True)
class _Locations:
    """Where all of ours lie.

    Args:
        places: of ours.
        others: names of what is not ours.
    """

    places: tuple[_Location, ...]
    others: frozenset[str]


@attrs.frozen(kw_only=True)
class _Location:
    """That one of theirs, or so many rows of it, is one of ours, or one index of it.

    Args:
        ours: path of our parameter.
        index: of our dim 0 that it is, None for all.
        theirs: name there.
        order: how many others lie before it along the dim.
        along: that dim.
        alone: whether it is all of theirs.
        dims: order of their dims in which ours has them, None for the same.
    """

    ours: str
    index: int | None
    theirs: str
    order: int
    along: int
    alone: bool
    dims: tuple[int, ...] | None

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape there of our parameter of a shape, or of an index of it."""
        each = shape if self.index is None else shape[1:]
        return HfTensor(ours=self.ours, theirs=self.theirs, dims=self.dims).part_shape(each)


def _grouped(places: Sequence[_Location], key: Callable[[_Location], str]) -> Mapping[str, list[_Location]]:
    found: dict[str, list[_Location]] = {}
    for place in places:
        found.setdefault(key(place), []).append(place)
    return found


def _entry(found: Sequence[_Location], rows: tuple[int, int] | None) -> HfTensor:
    """Return the entry of one of ours, of which each index may lie in a tensor of its own."""
    first = found[0]
    assert first.index is None or sorted(place.index or 0 for place in found) == list(range(len(found))), first
    stacked = tuple(place.theirs for place in sorted(found, key=lambda place: place.index or 0))
    return HfTensor(
        ours=first.ours,
        theirs=first.theirs if first.index is None else stacked,
        rows=rows,
        along=0 if rows is None else first.along,
        dims=first.dims,
    )


def _locations_of(described: str, make: Callable[[], tuple[Any, _Bridged]]) -> _Locations:
    if described not in _KNOWN:
        _KNOWN[described] = _locations(make)
    return _KNOWN[described]


def _locations(make: Callable[[], tuple[Any, _Bridged]]) -> _Locations:
    with trying(), tempfile.TemporaryDirectory() as folder:
        network, ours = make()
        network = network.to(torch.float64)
        count = 0
        for parameter in _parameters(network):
            parameter.copy_(torch.arange(count, count + parameter.numel(), dtype=torch.float64).view(parameter.shape))
            count += parameter.numel()
        network.save_pretrained(folder)
        files = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
        theirs = {name: tensor.long() for tensors in files for name, tensor in tensors.items()}
        ours = ours.double()
        ours.read(network)
        numbers = _Numbers.of(ours, list(ours.published(network)), count)
        # Of a whole model the other half is another module; of all else everything must be ours.
        others = frozenset(filter(numbers.knows_not(theirs), theirs)) if isinstance(ours, HfImages) else frozenset()
        own = {name: tensor for name, tensor in theirs.items() if name not in others}
        return _Locations(places=tuple(numbers.locations(own)), others=others)


def _parameters(network: Any) -> Iterator[Tensor]:
    """Yield all that a folder holds of a model and that isn't whole numbers, each once."""
    seen = set()
    kept = network.state_dict(keep_vars=True)
    for tensor in kept.values():
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor.detach()


@attrs.frozen(kw_only=True)
class _Numbers:
    """Which of ours each number is, and which element of it.

    Args:
        paths: ours.
        shapes: theirs.
        owner: [N] of each number the index of a path, -1 for none.
        place: [N] the element.
    """

    paths: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    owner: Tensor
    place: Tensor

    @classmethod
    def of(cls, ours: nn.Module, paths: Sequence[str], count: int) -> _Numbers:
        """Return those of a module that has been filled with numbers."""
        owner, place = torch.full((count,), -1), torch.zeros(count, dtype=torch.long)
        parameters = dict(ours.named_parameters())
        held = {path: parameters[path] for path in paths if path in parameters}
        for index, parameter in enumerate(held.values()):
            numbers = parameter.detach().long().flatten()
            owner[numbers] = index
            place[numbers] = torch.arange(len(numbers))
        return cls(paths=list(held), shapes=[tuple(one.shape) for one in held.values()], owner=owner, place=place)

    def knows_not(self, theirs: Mapping[str, Tensor]) -> Callable[[str], bool]:
        """Return what tells of a tensor of numbers whether none of them is one of ours."""
        return lambda name: bool((self.owner[theirs[name]] < 0).all())

    def locations(self, theirs: Mapping[str, Tensor]) -> Iterator[_Location]:
        """Yield where ours lie in tensors of numbers.

        Raises:
            ConfigError: one of them isn't made of parts of ours.
        """
        for name, numbers in theirs.items():
            found = self._of_tensor(name, numbers)
            if found is None:
                raise ConfigError(
                    "config.model_type",
                    expected="a family of which a published tensor holds parameters as they are, or transposed",
                    got=f"another one: {name}",
                )
            yield from found

    def _of_tensor(self, name: str, numbers: Tensor) -> list[_Location] | None:
        owners = self.owner[numbers]
        for along in range(numbers.dim() or 1):
            lines = owners.movedim(along, 0).reshape(owners.shape[along], -1) if numbers.dim() else owners.view(1, 1)
            if not bool((lines == lines[:, :1]).all()):
                continue
            _, counts = torch.unique_consecutive(lines[:, 0], return_counts=True)
            parts = numbers.split(counts.tolist(), along) if numbers.dim() else [numbers]
            found = [self._part(name, part, order, along, len(parts) == 1) for order, part in enumerate(parts)]
            if all(found):
                return [place for place in found if place is not None]
        return None

    def _part(self, name: str, numbers: Tensor, order: int, along: int, alone: bool) -> _Location | None:  # noqa: FBT001 - one call
        owner = int(self.owner[numbers].flatten()[0])
        if owner < 0:
            return None
        shape, places = self.shapes[owner], self.place[numbers]
        for index in (None, int(places.flatten()[0]) // max(1, len(places.flatten()))):
            each = shape if index is None else shape[1:]
            first = 0 if index is None else index * places.numel()
            wanted = torch.arange(first, first + places.numel())
            for dims in _orders(places.dim()):
                turned = places if dims is None else places.permute(dims)
                if tuple(turned.shape) == each and torch.equal(turned.flatten(), wanted):
                    return _Location(
                        ours=self.paths[owner],
                        index=index,
                        theirs=name,
                        order=order,
                        along=along,
                        alone=alone,
                        dims=dims,
                    )
        return None


def _orders(dims: int) -> Sequence[tuple[int, ...] | None]:
    """Return the orders of dims to look for: as they are, and the last two exchanged."""
    return (None,) if dims <= 1 else (None, (*range(dims - 2), dims - 1, dims - 2))

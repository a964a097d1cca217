"""Where a folder that the library writes has what a stage has: found by writing a thin model of numbered elements.

The library holds experts of all layers as single tensors and publishes them one by one, renames, stacks and transposes,
each family in its own way. So every element of a model with all its layers and experts, but of small widths, is given
a number of its own, `save_pretrained` writes it, and where each number lies in the files is the table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor

from mimo.hooks import ConfigError
from mimo.model import HfTensor, Stage
from mimo.model.runtime import create_on
from mimo_transformers.family import HfDecoderConfig, HfEncoderConfig, new_image_text, new_network, new_tower
from mimo_transformers.model.small import general, thin_config, trying
from mimo_transformers.model.stage import HfStage
from mimo_transformers.tower.encoder import HfEncoder
from mimo_transformers.tower.trial import build_encoder, thin_tower
from mimo_transformers.weights.numbers import Location, Numbers, is_whole
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.encoder import HfImages
from mimo_transformers.whole.trial import build_images, thin_images, width_of

_Bridged: TypeAlias = HfStage | HfEncoder | HfImages
_ANY_WIDTH = 8

_MOST_EXPERTS = 1 << 16

_JOINED: Mapping[str, Callable[[Any], tuple[int, ...]]] = {
    "olmo_hybrid": lambda config: (
        *(config.linear_num_key_heads * config.linear_key_head_dim,) * 2,
        config.linear_num_value_heads * config.linear_value_head_dim,
    ),
    "molmo2_text": lambda config: (config.vocab_size, config.additional_vocab_size),
}
"""By model type, from the library's config: rows of the tensors, as published, that the library joins into one.

Of other families these are of one length, to which the library cuts all that it has joined when it writes them.
"""


def decoder_table(config: HfDecoderConfig) -> Sequence[HfTensor]:
    """Return the table of a language model of the library.

    Raises:
        ConfigError: what the library writes isn't parts of tensors, in another order of dims; or there are more experts
            than any model has.
    """
    return _table(_decoder(config))


def tower_table(config: HfEncoderConfig) -> Sequence[HfTensor]:
    """Return the table of a tower of the library.

    Raises:
        ConfigError: as `decoder_table`.
    """
    return _table(_tower(config))


def images_table(config: HfImagesConfig) -> Sequence[HfTensor]:
    """Return the table of the half of a whole model that makes rows of images.

    Raises:
        ConfigError: as `decoder_table`.
    """
    return _table(_images(config))


def constants(config: HfDecoderConfig | HfEncoderConfig | HfImagesConfig) -> Mapping[str, Tensor]:
    """Return the whole numbers that the library writes of a model beside its parameters, by name.

    Raises:
        ConfigError: as `decoder_table`.
    """
    if isinstance(config, HfDecoderConfig):
        case = _decoder(config)
    else:
        case = _tower(config) if isinstance(config, HfEncoderConfig) else _images(config)
    found = _locations_of(case).constants
    assert all(place.alone and (place.index, place.cut, place.dims) == (None, None, None) for place in found), found
    held = dict(case.whole().named_buffers()) if found else {}
    return {place.theirs: held[place.ours] for place in found}


def language_names(config: HfImagesConfig) -> frozenset[str]:
    """Return the names of the other half's tensors, with ``*`` for each number."""
    return frozenset(map(general, _locations_of(_images(config)).others))


@attrs.frozen(kw_only=True)
class _Case:
    """A module whose table is asked for.

    Args:
        build: makes it.
        thin: what decides where a thin one of it lies in files, as text.
        make: makes the library's thin one, and ours.
        joined: rows of the published tensors that are joined into one of its parameters, where they differ.
    """

    build: Callable[[], _Bridged]
    thin: str
    make: Callable[[], tuple[Any, _Bridged]]
    joined: tuple[int, ...] | None = None

    def whole(self) -> _Bridged:
        """Return it, without storage but for buffers."""
        with create_on("meta"):
            return self.build()


def _decoder(config: HfDecoderConfig) -> _Case:
    experts = config.layers * max(1, config.experts)
    if experts > _MOST_EXPERTS:
        raise ConfigError(
            "modules.language.config.values",
            expected=f"at most {_MOST_EXPERTS:,} experts in all layers together",
            got=f"{experts:,}",
        )
    thin = thin_config(config)
    return _Case(
        build=lambda: HfStage(config, Stage()),
        thin=repr(thin),
        make=lambda: (new_network(thin.library(), attention="eager"), HfStage(thin, Stage())),
        joined=_JOINED[config.model_type](config.library()) if config.model_type in _JOINED else None,
    )


def _tower(config: HfEncoderConfig) -> _Case:
    thin = thin_tower(config)
    return _Case(
        build=lambda: build_encoder(config, _ANY_WIDTH),
        thin=repr(thin),
        make=lambda: (new_tower(thin.library()), build_encoder(thin, _ANY_WIDTH)),
    )


def _images(config: HfImagesConfig) -> _Case:
    thin = thin_images(config, has_all_text=True)
    return _Case(
        build=lambda: build_images(config, width_of(config)),
        thin=repr(thin),
        make=lambda: (new_image_text(thin.library()), build_images(thin, width_of(thin))),
    )


_KNOWN: dict[str, _Locations] = {}


def _table(case: _Case) -> Sequence[HfTensor]:
    shapes = {path: tuple(one.shape) for path, one in case.whole().named_parameters()}
    places = _locations_of(case).places
    rows: dict[Location, tuple[int, int] | None] = {}
    for parts in _grouped(places, lambda place: place.theirs).values():
        end = 0
        for place in sorted(parts, key=lambda place: place.order):
            start, end = end, end + (0 if place.alone else place.part_shape(shapes[place.ours])[place.along])
            rows[place] = None if place.alone else (start, end)
    return [
        _entry(found, rows[found[0]]) if found[0].cut is None else _entry_of_parts(found, shapes[ours][0], case.joined)
        for ours, found in _grouped(places, lambda place: place.ours).items()
    ]


@attrs.frozen(kw_only=True)
class _Locations:
    """Where all of ours lie.

    Args:
        places: of our parameters.
        constants: of our buffers of whole numbers.
        others: names of what is not ours.
    """

    places: tuple[Location, ...]
    constants: tuple[Location, ...]
    others: frozenset[str]


def _grouped(places: Sequence[Location], key: Callable[[Location], str]) -> Mapping[str, list[Location]]:
    found: dict[str, list[Location]] = {}
    for place in places:
        found.setdefault(key(place), []).append(place)
    return found


def _entry(found: Sequence[Location], rows: tuple[int, int] | None) -> HfTensor:
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


def _entry_of_parts(found: Sequence[Location], rows: int, joined: tuple[int, ...] | None) -> HfTensor:
    """Return the entry of one of ours, which lies in several tensors one after the other.

    Args:
        found: all of them.
        rows: of ours.
        joined: rows of each, where known; otherwise they must be of one length, to which the library cuts them
            whatever they are published with.

    Raises:
        ConfigError: they aren't; or those that are known make another one.
    """
    parts = sorted(found, key=lambda place: place.cut or (0, 0))
    lengths = joined or (rows // len(parts),) * len(parts)
    cut = [high - low for low, high in (place.cut or (0, 0) for place in parts)]
    if (joined is None and len(set(cut)) > 1) or len(lengths) != len(parts) or sum(lengths) != rows:
        raise ConfigError(
            "config.model_type",
            expected="a family of which tensors that transformers joins are of one length, since it writes them so",
            got=f"another one: {parts[0].theirs}",
        )
    return HfTensor(ours=parts[0].ours, theirs=tuple(place.theirs for place in parts), lengths=lengths)


def _locations_of(case: _Case) -> _Locations:
    if case.thin not in _KNOWN:
        _KNOWN[case.thin] = _locations(case.make)
    return _KNOWN[case.thin]


def _locations(make: Callable[[], tuple[Any, _Bridged]]) -> _Locations:
    with trying(), tempfile.TemporaryDirectory() as folder:
        network, ours = make()
        network = network.to(torch.float64)
        whole = _fill((one for one in _tensors(network) if one.is_floating_point()), 0)
        count = _fill(filter(is_whole, _tensors(network)), whole)
        network.save_pretrained(folder)
        files = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
        theirs = {name: tensor.long() for tensors in files for name, tensor in tensors.items()}
        ours = ours.double()
        ours.read(network)
        numbers = Numbers.of(ours, list(ours.published(network)), whole=whole, count=count)
        # Of a whole model the other half is another module; of all else everything must be ours.
        others = frozenset(filter(numbers.knows_not(theirs), theirs)) if isinstance(ours, HfImages) else frozenset()
        own = {name: tensor for name, tensor in theirs.items() if name not in others}
        found, buffers = list(numbers.locations(own)), frozenset(path for path, _ in ours.named_buffers())
        return _Locations(
            places=tuple(place for place in found if place.ours not in buffers),
            constants=tuple(place for place in found if place.ours in buffers),
            others=others,
        )


def _fill(tensors: Iterable[Tensor], count: int) -> int:
    """Give every element a number of its own from ``count`` on, and return the next one."""
    for tensor in tensors:
        end = count + tensor.numel()
        tensor.copy_(torch.arange(count, end, dtype=tensor.dtype).view(tensor.shape))
        count = end
    return count


def _tensors(network: Any) -> Iterator[Tensor]:
    """Yield all that a folder holds of a model, each once."""
    seen = set()
    kept = network.state_dict(keep_vars=True)
    for tensor in kept.values():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor.detach()

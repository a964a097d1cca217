"""A small model of a family, on which is tried what a large one of it can do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mimo.hooks import ConfigError
from mimo.model.runtime import NO_LABEL, LanguageBatch, create_on
from mimo_transformers.family import HfDecoderConfig, new_network, quiet, shrink, thin

_LENGTHS = (7, 3, 5)
_STIR = 0.05
_MOST_ELEMENTS = 10**8
_NOT_KEYS = (
    *("model_type", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("stage_names", "out_features", "out_indices"),
)


def described(config: HfDecoderConfig, **sizes: Any) -> str:
    """Return all that a config says but for its sizes: what two models have in common that are tried as one.

    Args:
        config: of a model.
        sizes: that the small one shall have.
    """
    library = config.library()
    values = {key: value for key, value in library.to_dict().items() if key not in _NOT_KEYS}
    return json.dumps([config.model_type, {**values, **shrink(library, **sizes)}], sort_keys=True, default=str)


def thin_values(library: Any) -> dict[str, Any]:
    """Return the keys of a config of the library with all its layers and experts, of small widths."""
    values = {key: value for key, value in library.to_dict().items() if key not in _NOT_KEYS}
    found: dict[str, Any] = json.loads(json.dumps({**values, **thin(library)}, default=str))
    return found


def thin_config(config: HfDecoderConfig) -> HfDecoderConfig:
    """Return a config with as many layers and experts as another, of small widths."""
    values = thin_values(config.library())
    return HfDecoderConfig(model_type=config.model_type, vocabulary=values.pop("vocab_size"), values=values)


def small_config(description: str) -> HfDecoderConfig:
    """Return the config of a small model of what was `described`."""
    model_type, values = json.loads(description)
    return HfDecoderConfig(model_type=model_type, vocabulary=values.pop("vocab_size"), values=values)


@contextmanager
def trying() -> Iterator[None]:
    """Build and run small models within: on the CPU, without gradients, with random numbers of their own."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
        torch.default_generator.manual_seed(0)
        yield


def affordable(make: Callable[[], Any]) -> Any:
    """Return a model to try, having made sure that it is small; some keys may make any model of its kind large.

    Raises:
        ConfigError: it isn't.
    """
    with create_on("meta"):
        made = make()
    count = sum(one.numel() for one in [*made.parameters(), *made.buffers()])
    if count > _MOST_ELEMENTS:
        raise ConfigError(
            "config.values",
            expected=f"settings of which a small model has at most {_MOST_ELEMENTS:,} parameters",
            got=f"{count:,}",
        )
    return make()


def stirred(config: HfDecoderConfig) -> Any:
    """Return the library's model with its own attention, moved off ones and zeros, which would hide mistakes."""
    library = config.library()
    return stir(affordable(lambda: new_network(library, attention="eager")))


def stir(network: Any) -> Any:
    """Return a model in fp32 whose parameters are all moved."""
    network = network.float()
    for parameter in network.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=_STIR)
    return network


def draw_ids(config: HfDecoderConfig) -> Sequence[Tensor]:
    """Return the ids of some samples."""
    return [torch.randint(1, config.vocabulary, (length,)) for length in _LENGTHS]


def draw_places(samples: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return for each sample places [S, 3] in time, down and across, other ones on each axis."""
    return [torch.stack((rows, rows // 2, rows % 3), 1) for rows in (torch.arange(len(ids)) for ids in samples)]


def batch_of(samples: Sequence[Tensor], places: Sequence[Tensor] = ()) -> LanguageBatch:
    """Return samples as packed rows, each of which but the last of a sample has the next id as its label.

    Args:
        samples: ids of each.
        places: of their rows in time, down and across; nothing where each is its position.
    """
    labels = [torch.cat((ids[1:], ids.new_tensor([NO_LABEL]))) for ids in samples]
    positions = torch.cat([torch.arange(len(ids)) for ids in samples])
    lengths = tuple(map(len, samples))
    grid = torch.cat(list(places)) if places else None
    return LanguageBatch.of(
        torch.cat(list(samples)), torch.cat(labels), positions, lengths=lengths, grid_positions=grid
    )


def general(path: str) -> str:
    """Return a path with ``*`` for each number."""
    return ".".join("*" if word.isdigit() else word for word in path.split("."))


@cache
def constants(description: str) -> Mapping[str, float]:
    """Return what begins with the same number everywhere, by its `general` path in the library's model."""
    with trying():
        library = small_config(description).library()
        return constants_of(affordable(lambda: new_network(library)))


def constants_of(network: Any) -> Mapping[str, float]:
    """Return the same of a model that is built."""
    found: dict[str, float] = {}
    for path, tensor in [*network.named_parameters(), *network.named_buffers()]:
        flat = tensor.detach().flatten()
        if flat.numel() and bool((flat == flat[0]).all()):
            found[general(path)] = float(flat[0])
    return found

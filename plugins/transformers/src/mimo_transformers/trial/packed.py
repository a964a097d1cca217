"""Whether a family computes on packed rows what the library computes on each sample alone, tried on a small one of it.

A layer that mixes rows by anything else than the library's attention interface, as a convolution or a scan does, would
mix samples too, and nothing in its config says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mimo.hooks import ConfigError, UserError
from mimo.model import Stage
from mimo.model.runtime import LanguageBatch
from mimo_transformers.family import HfDecoderConfig
from mimo_transformers.model.modules import turns_by_grids
from mimo_transformers.model.small import (
    batch_of,
    described,
    draw_ids,
    draw_places,
    small_config,
    stirred,
    trying,
)
from mimo_transformers.model.stage import HfStage

_STAGES = 2
_TOLERANCE = 1e-5


_BY_LONGEST = frozenset({"dynamic", "longrope"})
"""Rotary positions that stretch by the longest sample of a microbatch, so that samples change each other."""


def check_config(config: HfDecoderConfig) -> None:
    """Refuse what a config says and no layout could keep.

    Raises:
        ConfigError: by its key.
    """
    where, values = "modules.language.config", config.library().to_dict()
    if config.vocabulary == 0:
        raise ConfigError(f"{where}.vocabulary", expected="a number of ids, or a tokenizer to take it from", got="0")
    if config.deepstack > config.layers:
        expected = f"at most values.num_hidden_layers = {config.layers}"
        raise ConfigError(f"{where}.deepstack", expected=expected, got=repr(config.deepstack))
    stretched = sorted(_BY_LONGEST & set(_rope_types(values)))
    if stretched:
        raise ConfigError(
            f"{where}.values.rope_parameters",
            expected="rotary positions of each sample by itself",
            got=f"rope_type = {stretched[0]!r}, which depends on the longest sample of a microbatch",
            fix="Set another rope_type, such as 'default' or 'yarn'.",
        )
    if values.get("output_router_logits"):
        raise ConfigError(
            f"{where}.values.output_router_logits",
            expected="false, since the library's losses on routers are not trained on here",
            got="true",
            fix="Leave it out. `decoder` trains families such as qwen3_moe with these losses.",
        )


def _rope_types(values: Any) -> Iterator[str]:
    """Yield all ``rope_type`` in nested keys."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if key == "rope_type" and isinstance(value, str):
                yield value
            yield from _rope_types(value)


def prove(config: HfDecoderConfig) -> None:
    """Refuse a family of which a small model on packed rows, whole or in stages, isn't the library's on each sample.

    Raises:
        ConfigError: it computes something else, or can't be tried.
    """
    if problem := _problem(described(config)):
        raise ConfigError(
            "modules.language.config.model_type",
            expected="a family that computes on packed rows what transformers computes on each sample",
            got=f"{config.model_type!r}: {problem}",
            fix="plugins/transformers/README.md lists those that can be trained.",
        )


@cache
def _problem(description: str) -> str:
    try:
        with trying():
            differences = _differences(small_config(description))
    except UserError as error:
        return str(error)
    except _RandomError:
        return "a small one draws random numbers while it trains"
    except Exception as error:  # noqa: BLE001 - whatever a model of the library does
        return f"a small one fails with {type(error).__name__}: {error}"
    for what, difference in differences.items():
        if not difference <= _TOLERANCE:
            return f"logits of a small one differ by {difference:.1e} {what}"
    return ""


class _RandomError(Exception):
    """A model draws random numbers, which would be others in each layout."""


def _differences(config: HfDecoderConfig) -> dict[str, float]:
    """Return by how much logits differ from the library's, over the largest."""
    network = stirred(config).eval()
    samples = draw_ids(config)
    places = draw_places(samples) if turns_by_grids(network) else [None] * len(samples)
    wanted = torch.cat([_of_library(network, ids, own) for ids, own in zip(samples, places, strict=True)])
    found = {}
    for what, count in (("on packed rows", 1), (f"in {_STAGES} pipeline stages", _STAGES)):
        batch = batch_of(samples, [own for own in places if own is not None])
        logits = _logits(config, network, batch, count)
        found[what] = float((logits - wanted).abs().max() / wanted.abs().max())
    return found


def _of_library(network: Any, ids: Tensor, places: Tensor | None) -> Tensor:
    """Return the library's logits [S, V] of one sample; with places [S, 3] where it turns by these."""
    turned = {} if places is None else {"position_ids": places.T.unsqueeze(1)}
    logits: Tensor = network(input_ids=ids.unsqueeze(0), use_cache=False, **turned).logits[0]
    return logits


def _logits(config: HfDecoderConfig, network: Any, batch: LanguageBatch, count: int) -> Tensor:
    hidden: Tensor | None = None
    for index in range(count):
        stage = HfStage(config, Stage(index, count))  # as it is trained: what is random then differs too
        stage.read(network)
        chance = torch.get_rng_state()
        hidden = stage(batch, {}, hidden)
        if not torch.equal(chance, torch.get_rng_state()):
            raise _RandomError
    assert hidden is not None
    return stage.logits(hidden)

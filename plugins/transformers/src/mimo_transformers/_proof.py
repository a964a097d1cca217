"""Whether a family computes on packed rows what the library computes on each sample alone, tried on a small one of it.

A layer that mixes rows by anything else than the library's attention interface, as a convolution or a scan does, would
mix samples too, and nothing in its config says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mimo.hooks import ConfigError, UserError
from mimo.model import Stage
from mimo.model.runtime import LanguageBatch
from mimo_transformers._config import HfDecoderConfig
from mimo_transformers._library import new_network, quiet
from mimo_transformers._shrink import shrink
from mimo_transformers._stage import HfStage

_LENGTHS = (7, 3, 5)
_STAGES = 2
_TOLERANCE = 1e-5
_STIR = 0.05


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
    problem = _problem(json.dumps([config.model_type, *_kinds(config.library())], sort_keys=True, default=str))
    if problem:
        raise ConfigError(
            "modules.language.config.model_type",
            expected="a family that computes on packed rows what transformers computes on each sample",
            got=f"{config.model_type!r}: {problem}",
            fix="plugins/transformers/README.md lists those that can be trained.",
        )


def _kinds(library: Any) -> tuple[Mapping[str, Any]]:
    """Return the keys of a small model with all that the config says but for its sizes."""
    values = library.to_dict()
    return ({**{key: value for key, value in values.items() if value is not None}, **shrink(library)},)


@cache
def _problem(described: str) -> str:
    model_type, values = json.loads(described)
    for key in ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype"):
        values.pop(key, None)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
            torch.default_generator.manual_seed(0)
            differences = _differences(HfDecoderConfig(model_type=model_type, values=values))
    except UserError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a model of the library does
        return f"a small one fails with {type(error).__name__}: {error}"
    for what, difference in differences.items():
        if not difference <= _TOLERANCE:
            return f"logits of a small one differ by {difference:.1e} {what}"
    return ""


def _differences(config: HfDecoderConfig) -> dict[str, float]:
    """Return by how much logits differ from the library's, over the largest."""
    network = new_network(config.library(), attention="eager").float().eval()
    for parameter in network.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=_STIR)  # ones and zeros would hide mistakes
    ids = torch.randint(1, config.vocabulary or network.config.vocab_size, (sum(_LENGTHS),))
    samples = [network(input_ids=part.unsqueeze(0), use_cache=False).logits[0] for part in ids.split(list(_LENGTHS))]
    wanted = torch.cat(samples)
    found = {}
    for what, count in (("on packed rows", 1), (f"in {_STAGES} pipeline stages", _STAGES)):
        logits = _logits(config, network, ids, count)
        found[what] = float((logits - wanted).abs().max() / wanted.abs().max())
    return found


def _logits(config: HfDecoderConfig, network: Any, ids: Tensor, count: int) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    batch = LanguageBatch.of(ids, ids, positions, lengths=_LENGTHS)
    hidden: Tensor | None = None
    for index in range(count):
        stage = HfStage(config, Stage(index, count))  # as it is trained: what is random then differs too
        load_library(stage, network)
        hidden = stage(batch, {}, hidden)
    assert hidden is not None
    return stage.logits(hidden)


def load_library(stage: HfStage, network: Any) -> None:
    """Fill a stage with the parameters and buffers of a model of the library.

    Args:
        stage: plain, on the CPU.
        network: of the same config.
    """
    theirs = dict(network.named_buffers()) | dict(network.named_parameters(remove_duplicate=False))
    names = stage.library_names(network)
    with torch.no_grad():
        for path, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            tensor.copy_(theirs[names[path]])

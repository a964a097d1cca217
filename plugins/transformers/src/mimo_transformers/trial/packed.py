"""Whether a family computes on packed rows what the library computes on each sample alone, tried on a small one of it.

A layer may mix rows in other ways than through the library's attention interface, and nothing in its config says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from mimo.hooks import ConfigError, JsonNode, UserError
from mimo.model import Stage
from mimo.model.runtime import (
    DrawKeys,
    Drawn,
    Dropout,
    LanguageBatch,
    attach_draws,
    create_on,
    sample_rows,
    step_key,
)
from mimo_transformers.family import HfDecoderConfig, check_dropout, new_network, rates_in, without_refused
from mimo_transformers.model.drops import replace_drops
from mimo_transformers.model.mixing import mixing
from mimo_transformers.model.modules import turns_by_grids
from mimo_transformers.model.routers import router_loss_names
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
from mimo_transformers.trial.record import Form, recall

_STAGES = 2
_VALUES = "modules.language.config.values"
_DRAWS = "a small one draws random numbers while it trains"
_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 1e-4
"""Of gradients, which are sums over all rows that may cancel one another."""
_SMALL_GRADIENT = 1e-3
"""Share of the whole gradient's norm below which a parameter's is compared with that share instead of itself."""


_BY_LONGEST = frozenset({"dynamic", "longrope"})
"""Rotary positions that stretch by the longest sample of a microbatch, so that samples change each other."""
_VOCABULARY_LOSS = "z_loss_coefficient"
"""Of Bamba, whose class adds to its loss the squares of the logits' sums."""


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
    if values.get(_VOCABULARY_LOSS):
        raise ConfigError(
            f"{where}.values.{_VOCABULARY_LOSS}",
            expected="0, since the library's loss on the logits of the vocabulary is not trained on here",
            got=repr(values[_VOCABULARY_LOSS]),
            fix="Leave it out.",
        )
    router_loss_names(config)


def check_context(config: HfDecoderConfig) -> None:
    """Refuse context ranks for a family that mixes rows by other means than attention.

    Raises:
        ConfigError: by the key ``cp`` of the module.
    """
    if found := mixing(described(config)).parts:
        names = ", ".join(sorted(one.__name__ for one in found))
        raise ConfigError(
            "cp",
            expected="1, since this model has parts that read all rows of a sample one after the other",
            got=f"more for {config.model_type!r} with {names}",
            fix="Leave cp out; any number of lanes (dp) and stages (pp) works.",
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
        ConfigError: it computes something else, or can't be tried; by its key, it drops what no layout could keep.
    """
    kept = without_refused(config)
    problem = _problem(described(kept))
    if problem == _DRAWS:
        _check_functions(kept)
    if problem:
        raise ConfigError(
            "modules.language.config.model_type",
            expected="a family that computes on packed rows what transformers computes on each sample",
            got=f"{config.model_type!r}: {problem}",
            fix="plugins/transformers/README.md lists those that can be trained.",
        )
    check_dropout(config, where=_VALUES)


def _check_functions(config: HfDecoderConfig) -> None:
    """Refuse the first key by which a model drops by a function in its layers, since none of its modules does.

    Raises:
        ConfigError: by the key.
    """
    with trying(), create_on("meta"):
        replaced = replace_drops(new_network(small_config(described(config)).library()))
    rates = rates_in(config.library().to_dict())
    left = [key for key, rate in rates.items() if rate not in {part.rate for part in replaced.values()}]
    if left:
        raise ConfigError(
            f"{_VALUES}.{left[0]}",
            expected="0.0, as what a function draws follows the layout",
            got=f"{left[0]} = {rates[left[0]]!r}, at which {config.model_type!r} drops by a function in its layers",
            fix=f"Set {', '.join(f'{key} = 0.0' for key in left)} there to train without.",
        )


@cache
def _problem(description: str) -> str:
    return recall("packed rows", description, lambda: _try(description), _PASSED)


def _read_passed(node: JsonNode) -> str:
    if node.value is not True:
        raise node.fail("true")
    return ""


_PASSED = Form[str](write=lambda problem: None if problem else True, read=_read_passed)


def _try(description: str) -> str:
    try:
        with trying():
            for what, difference, allowed in _differences(small_config(description)):
                if not difference <= allowed:
                    return f"{what} of a small one differ by {difference:.1e}"
    except UserError as error:
        return str(error)
    except _RandomError:
        return _DRAWS
    except Exception as error:  # noqa: BLE001 - whatever a model of the library does
        return f"a small one fails with {type(error).__name__}: {error}"
    return ""


class _RandomError(Exception):
    """A model draws random numbers, which would be others in each layout."""


def _differences(config: HfDecoderConfig) -> Iterator[tuple[str, float, float]]:
    """Yield by how much what a family computes differs from what the library does, over the largest, and may."""
    network = stirred(config).eval()
    samples, factors = draw_ids(config), torch.randn(config.vocabulary)
    places = draw_places(samples) if turns_by_grids(network) else ()

    def learned(logits: Tensor) -> None:
        ((logits * factors).sum() / logits.detach().abs().max()).backward()

    with torch.enable_grad():
        wanted = torch.cat([_of_library(network, ids, own) for ids, own in zip_longest(samples, places)])
        learned(wanted)
    (stage,) = _stages(config, network, 1)
    with torch.enable_grad():
        logits = _logits([stage], samples, places)
        learned(logits)
    yield "logits on packed rows", _difference(logits, wanted), _TOLERANCE
    if config.layers >= _STAGES:
        stages = _stages(config, network, _STAGES)
        yield f"logits in {_STAGES} pipeline stages", _difference(_logits(stages, samples, places), wanted), _TOLERANCE
        if any(isinstance(part, Dropout) for part in stage.modules()):
            dropped, in_stages = (_logits(some, samples, places, draws=True) for some in ([stage], stages))
            yield f"logits with dropout in {_STAGES} pipeline stages", _difference(in_stages, dropped), _TOLERANCE
    yield "gradients on packed rows", _gradient_difference(stage, network), _GRADIENT_TOLERANCE
    others = [ids if index else torch.where(ids > 1, ids - 1, ids + 1) for index, ids in enumerate(samples)]
    start = len(samples[0])
    difference = _difference(_logits([stage], others, places)[start:], logits[start:])
    # No bit, but where the number of rows of an expert, and with it the order of its sums, follows from all samples.
    yield "logits of one sample after a change to another", difference, _TOLERANCE if config.experts else 0.0


def _of_library(network: Any, ids: Tensor, places: Tensor | None) -> Tensor:
    """Return the library's logits [S, V] of one sample; with places [S, 3] where it turns by these."""
    turned = {} if places is None else {"position_ids": places.T.unsqueeze(1)}
    logits: Tensor = network(input_ids=ids.unsqueeze(0), use_cache=False, **turned).logits[0]
    return logits


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _gradient_difference(stage: HfStage, network: Any) -> float:
    """Return by how much the gradient of any parameter differs, over its norm."""
    theirs = {name: one.grad for name, one in network.named_parameters(remove_duplicate=False)}
    floor = _SMALL_GRADIENT * float(torch.stack([one.norm() for one in theirs.values() if one is not None]).norm())
    found: dict[str, Tensor] = {}
    published = stage.published(network)
    for path, parameter in stage.named_parameters():
        name = published[path].name
        if parameter.requires_grad and theirs.get(name) is not None:
            whole = found.setdefault(name, torch.zeros_like(network.get_parameter(name)))
            published[path].view(whole).add_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return max(float((one - theirs[name]).norm() / theirs[name].norm().clamp_min(floor)) for name, one in found.items())


def _stages(config: HfDecoderConfig, network: Any, count: int) -> list[HfStage]:
    """Return the stages of a model as they are trained: what is random then differs too."""
    stages = [HfStage(config, Stage(index, count)) for index in range(count)]
    for stage in stages:
        stage.read(network)
    return stages


def draw_in(stage: HfStage, batch: LanguageBatch) -> AbstractContextManager[None]:
    """Return a context in which a stage, as it is for now, drops what it does in a step."""
    keys = DrawKeys(module="language")
    attach_draws(stage, keys, device=batch.tokens.device, draws=lambda _path: True)
    return keys.at(Drawn(sample_rows(step_key(0, 0), batch.samples, batch.positions)))


def _logits(
    stages: Sequence[HfStage], samples: Sequence[Tensor], places: Sequence[Tensor], *, draws: bool = False
) -> Tensor:
    hidden: Tensor | None = None
    for stage in stages:
        chance, batch = torch.get_rng_state(), batch_of(samples, places)
        with draw_in(stage, batch) if draws else nullcontext():
            hidden = stage(batch, {}, hidden)
        if not torch.equal(chance, torch.get_rng_state()):
            raise _RandomError
    assert hidden is not None
    return stages[-1].logits(hidden)

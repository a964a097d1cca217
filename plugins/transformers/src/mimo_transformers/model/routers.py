"""What the library's routers decide in a forward, and our loss on unequal loads of experts of it.

Which module returns a router's logits, the library's classes say themselves, for ``output_router_logits``; which
experts are chosen is what these are given. Shapes: T rows, E experts, k chosen by each row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import attrs
import torch
from torch import nn

from mimo.hooks import ConfigError
from mimo.model import AuxLossNames, load_name
from mimo.model.runtime import Choices, ExpertAxis, LanguageBatch, Routing, TensorAxis, add_router_losses, create_on
from mimo_transformers.family import HfDecoderConfig, base_path_of, new_network, quiet
from mimo_transformers.model.attention import RoutedRows, register_attention, rows_of
from mimo_transformers.model.experts import BridgedExperts, is_experts
from mimo_transformers.model.parts import find_parts
from mimo_transformers.model.per_sample import mix_in

_RECORDED = "router_logits"
"""Name under which the library's classes say which module returns them."""
_PLACE = "_mimo_place"
"""Attribute of a router: the number of its layer, and where the logits are in what it returns."""


@attrs.frozen(kw_only=True)
class RouterPlace:
    """Where a layer has its router.

    Args:
        path: inside of the layer.
        index: of the logits in what it returns, if that is a tuple.
    """

    path: str
    index: int


@attrs.frozen(kw_only=True)
class _Losses:
    """Coefficients, see `mimo.model.RouterLosses`."""

    balance_loss: float
    z_loss: float = 0.0


def router_loss_names(config: HfDecoderConfig) -> AuxLossNames:
    """Return what stages of a config add beside the loss.

    Raises:
        ConfigError: its routers aren't known, see `find_routers`.
    """
    if config.balance_loss is None:
        return AuxLossNames()
    layers = _routed_layers(json.dumps(attrs.asdict(config), sort_keys=True))
    return AuxLossNames(
        losses=("balance",) if config.balance_loss else (),
        counts={load_name(f"layers.{index}"): config.experts for index in layers},
    )


@cache
def _routed_layers(described: str) -> tuple[int, ...]:
    register_attention()
    config = HfDecoderConfig(**json.loads(described))
    with quiet(), create_on("meta"):
        path = find_parts(new_network(config.library())).layers
        network = new_network(config.library())
    return tuple(find_routers(network, path))


def find_routers(network: Any, layers: str, mixers: Collection[type[nn.Module]] = ()) -> dict[int, RouterPlace]:
    """Return by layer where it has a router, of those layers that have experts.

    Args:
        network: of the library, as it was built.
        layers: path of their list in its base model.
        mixers: classes of parts that run on one sample after the other.

    Raises:
        ConfigError: there are none, or one is of a form that isn't known here.
    """
    base = network.get_submodule(base_path_of(network))
    said = (base._can_record_outputs or {}).get(_RECORDED)  # noqa: SLF001 - the library says it nowhere else
    recorders: list[Any] = [one for one in (said if isinstance(said, list) else [said]) if hasattr(one, "layer_name")]
    found: dict[int, RouterPlace] = {}
    for number, layer in enumerate(base.get_submodule(layers)):
        by_sample = {one for part in layer.modules() if type(part) in mixers for one in part.modules()}
        experts = [part for part in layer.modules() if is_experts(part)]
        routers = [
            RouterPlace(path=path, index=recorder.index)
            for path, part in layer.named_modules()
            for recorder in recorders
            if isinstance(part, recorder.target_class) and _has_name(f"{number}.{path}", recorder.layer_name)
        ]
        if len(routers) > 1 or len(routers) != len(experts) or by_sample & set(experts):
            raise _refusal(network.config.model_type)
        if routers:
            (found[number],) = routers
    if not found:
        raise _refusal(network.config.model_type)
    return found


def _refusal(model_type: str) -> ConfigError:
    return ConfigError(
        "modules.language.config.values.output_router_logits",
        expected="false, since this model's routers or experts are of a form that isn't known here",
        got=f"true for {model_type!r}",
        fix="Leave it out: it is then trained without a loss on the loads of experts.",
    )


def _has_name(path: str, name: str | None) -> bool:
    """Tell whether a path has the words of a name in it, as the library's own recording wants them."""
    return name is None or f".{name.strip('.')}." in f".{path}."


def record_choices(layer: nn.Module, number: int, place: RouterPlace) -> None:
    """Have a layer's router and experts take down what is chosen, in forwards whose rows ask for it.

    Args:
        layer: with our experts.
        number: of it.
        place: of its router.
    """
    router = layer.get_submodule(place.path)
    mix_in(router, RecordedRouter)
    vars(router)[_PLACE] = number, place.index
    (experts,) = (part for part in layer.modules() if isinstance(part, BridgedExperts))
    experts.layer = number


class RecordedRouter(nn.Module):
    """Mixed into the class of a router: it takes down its logits."""

    stays_eager = "it takes down what it decides"

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return what the library's router does."""
        found = super().forward(*given, **named)
        number, index = vars(self)[_PLACE]
        if (routed := rows_of(self).routed) is not None:
            routed[number] = RoutedRows(logits=found[index] if isinstance(found, tuple) else found)
        return found


def add_balance_loss(
    routed: Mapping[int, RoutedRows],
    batch: LanguageBatch,
    *,
    coefficient: float,
    layers: int,
    axis: TensorAxis,
    experts: ExpertAxis,
) -> None:
    """Add the loads of experts and the loss on them to ``batch.aux_losses``.

    The loss is `mimo.model.runtime.add_router_losses`, with the softmax of logits as scores. The coefficient is that of
    the library's loss (Fedus et al. 2022, arXiv:2101.03961, equations 4 to 6), in which all layers together count once
    and equal loads come to k: that of ours is k / ``layers`` times as much.

    Args:
        routed: by layer of this stage, what was decided of the rows of ``batch``, padding included.
        batch: the microbatch.
        coefficient: of the library's loss; 0 for counting alone.
        layers: with routers, of all stages.
        axis: the tensor ranks, each of which has decided of all rows.
        experts: sums over the ranks that share the rows of this lane.
    """
    routing, count = Routing.of(batch, axis), len(batch.tokens)
    chosen = {f"layers.{number}": _choices(one, routing, count) for number, one in routed.items()}
    per_row = next(iter(chosen.values())).experts.shape[1]
    config = _Losses(balance_loss=coefficient * per_row / layers)
    add_router_losses(routing, chosen, batch=batch, config=config, experts=experts)


def _choices(routed: RoutedRows, routing: Routing, count: int) -> Choices:
    """Return the choices of the rows that are routed here, of the first ``count`` ones."""
    assert routed.chosen is not None
    logits = routing.take(routed.logits.flatten(0, -2)[:count])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    experts, weights = (routing.take(one[:count]) for one in routed.chosen)
    return Choices(logits=logits, scores=logits.softmax(1), experts=experts, weights=weights)

"""What a stage takes, from the shapes of its weights and from what its layers ask of attention and of experts.

A forward of a few rows without storage records these calls, and what autograd saves of each row beside them; nothing is
computed, and which experts are chosen, as nothing says, is each in turn. What parts that mix rows do between their
weights, as scans do, is found by running them so on longer samples. Where no forward runs so, weights alone count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import attrs
import torch
from torch import Tensor, nn

from mimo.model import OpCost, Stage
from mimo.model.runtime import Embedding, GroupedLinear, LanguageBatch, create_on
from mimo_transformers.cost.mixers import MixerCost, mixer_calls, mixer_costs
from mimo_transformers.cost.products import ForwardCounter, repeated
from mimo_transformers.family import HfDecoderConfig
from mimo_transformers.model.attention import AttentionCall, CallRecord
from mimo_transformers.model.experts import BridgedExperts
from mimo_transformers.model.stage import HfStage

_ROWS = 2
_OF_EXPERTS = 3
"""Dims of weights of experts that keep a form of their own: experts, outputs, inputs."""
_HEAD = "head"
_PARTS = {"embedding": "embedding", "before": "embedding", "layers": "layers"}
"""Which part the first word of a parameter's path says; all others are of the head."""


@attrs.define
class _Matrices:
    """What one part of a stage multiplies rows with.

    Args:
        weights: elements of all its parameters.
        experts: of these, those of experts.
        products: elements of its matrices, each as often as one row is multiplied with it.
        ends: inputs and outputs of these products.
        expert_ends: of these, those of `GroupedLinear`, which the counted forward doesn't run.
        widest: the most outputs of a product.
        largest: elements of the largest matrix, of all experts together.
    """

    weights: int = 0
    experts: int = 0
    products: int = 0
    ends: int = 0
    expert_ends: int = 0
    widest: int = 0
    largest: int = 0

    def add(self, outputs: int, inputs: int, *, times: int = 1, experts: int = 1) -> None:
        """Count a matrix with which each row is multiplied, so many times; of experts how many there are."""
        self.products += times * outputs * inputs
        self.ends += times * (outputs + inputs)
        self.widest = max(self.widest, times * outputs)
        self.largest = max(self.largest, experts * outputs * inputs)


@attrs.frozen(kw_only=True)
class _Forward:
    """What a forward of all layers of a stage asks for.

    Args:
        attention: calls of it, each as often as it was made.
        mixers: what parts that mix rows by themselves take.
        chosen: by module of experts, how many of them each row goes to.
        copied: elements that autograd saves of a row, but for all of these, of tensors as wide as the rows between
            layers.
        split: of others.
        is_product: whether rows are multiplied with a weight as a matrix.
    """

    attention: Mapping[AttentionCall, int]
    mixers: Sequence[MixerCost]
    chosen: Mapping[nn.Module, int]
    copied: float
    split: float
    is_product: Callable[[Tensor], bool]


def decoder_cost(
    config: HfDecoderConfig, stage: Stage, recompute: str, lengths: Sequence[int], labels: int
) -> Mapping[str, OpCost]:
    """Return by part what a forward of ``stage`` takes over samples of these lengths; see `LanguageModelSpec.flops`."""
    parts, forward = _counted(json.dumps(attrs.asdict(config), sort_keys=True), stage)
    rows, found = sum(lengths), {}
    for part, matrices in parts.items():
        some = labels if part == _HEAD else rows
        logits = labels * config.vocabulary if part == _HEAD and stage.is_last else 0
        found[part] = OpCost(
            weighted=2.0 * some * matrices.products,
            logits=logits,
            copied=some * matrices.ends - logits + (rows if part == "embedding" and stage.is_first else 0),
            operands=some * matrices.ends,
            weights=matrices.weights,
            expert_weights=matrices.experts,
            largest=matrices.largest,
        )
    if "layers" in found:
        # As of a gated part: gradients of two of its tensors take the place of the product's.
        layers = attrs.evolve(found["layers"], working=2.0 * rows * parts["layers"].widest)
        if forward is not None:
            split = rows * (forward.split + parts["layers"].expert_ends)
            layers = attrs.evolve(layers, copied=rows * forward.copied, split=split)
            for call, count in forward.attention.items():
                layers += _attention(call, lengths, count)
            for mixer in forward.mixers:
                layers += mixer.cost(lengths)
        found["layers"] = layers
        if recompute == "full":
            count = len(stage.layers(config.layers))
            found["layers"] = repeated(found["layers"], count, count * rows * config.hidden)
    return found


def _attention(call: AttentionCall, lengths: Sequence[int], count: int) -> OpCost:
    """Return what some equal calls take: products of queries with keys, and of scores with values, half as causal."""
    pairs = sum(length * length for length in lengths) / 2
    if call.window:
        pairs -= sum(max(0, length - call.window) ** 2 for length in lengths) / 2
    saved = float(count * sum(lengths) * call.saved)
    return OpCost(inner=2.0 * count * pairs * call.heads * (call.scored + call.summed), split=saved)


@cache
def _counted(described: str, stage: Stage) -> tuple[Mapping[str, _Matrices], _Forward | None]:
    """Return what parts multiply with, in the order of data, and what else a forward takes, if that is known."""
    config = HfDecoderConfig(**json.loads(described))
    with create_on("meta"):
        built = HfStage(config, stage)
    forward = _run(built, config)
    chosen = {} if forward is None else forward.chosen
    times = {
        linear: chosen.get(experts, 1)
        for experts in built.modules()
        if isinstance(experts, BridgedExperts)
        for linear in experts.modules()
    }
    parts = {part: _Matrices() for part in ("embedding", "layers", _HEAD)}
    for path, module in built.named_modules():
        name = _PARTS.get(path.partition(".")[0], _HEAD)
        part = parts[name]
        for leaf, parameter in module.named_parameters(recurse=False):
            part.weights += parameter.numel()
            if isinstance(module, GroupedLinear):
                part.experts += parameter.numel()
                if leaf == "weight":
                    before = part.ends
                    part.add(*parameter.shape[1:], times=times.get(module, 1), experts=len(parameter))
                    part.expert_ends += part.ends - before
            elif name == "layers" and forward is not None and not forward.is_product(parameter):
                continue
            elif parameter.dim() == _OF_EXPERTS and parameter.shape[0] == config.experts:
                part.add(*parameter.shape[1:], times=config.experts_per_token, experts=len(parameter))
            elif parameter.dim() > 1 and not isinstance(module, Embedding | nn.Embedding):
                part.add(parameter.shape[0], parameter.shape[1:].numel())
    if built.stage.is_last and built.tied:
        parts[_HEAD].add(config.vocabulary, config.hidden)
    return {name: part for name, part in parts.items() if part.weights or part.products}, forward


def _run(built: HfStage, config: HfDecoderConfig) -> _Forward | None:
    """Return what a stage without storage asks for in a forward and saves; None of one that can't run so."""
    ids = torch.zeros(_ROWS, dtype=torch.long)
    batch = LanguageBatch.of(ids, ids, torch.arange(_ROWS), lengths=[_ROWS])
    hidden = None if built.stage.is_first else torch.zeros(_ROWS, config.hidden, device="meta")
    built.record, counter = CallRecord(), ForwardCounter((one, None) for one in built.parameters())
    try:
        with mixer_calls(built.modules(), counter.saved) as calls, counter.counting():
            built(batch, {}, hidden)
        mixers = mixer_costs(calls, config.hidden)
    except RuntimeError:  # it reads numbers back that depend on weights
        return None
    sizes = [(shape[-1:] == (config.hidden,), elements / _ROWS) for shape, elements in counter.saved.elements()]
    return _Forward(
        attention=Counter(built.record.attention),
        mixers=mixers,
        chosen=built.record.chosen,
        copied=sum(size for is_row, size in sizes if is_row),
        split=sum(size for is_row, size in sizes if not is_row),
        is_product=counter.is_product,
    )

"""What a stage takes, from the shapes of its weights and from what its layers ask of attention and of experts.

A forward of a few rows without storage records these calls, and what autograd saves of each row beside them; nothing is
computed. What parts that mix rows do between their weights, as scans do, is left out; so is attention where no forward
runs so, as that of JetMoe, whose routers say how many rows each expert takes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import attrs
import torch
from torch import nn

from mimo.model import OpCost, Stage
from mimo.model.runtime import Embedding, GroupedLinear, LanguageBatch, create_on
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
        expert_ends: of these, those of experts.
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

    def add(self, outputs: int, inputs: int, *, times: int = 1, experts: int = 0) -> None:
        """Count a matrix with which each row is multiplied, so many times; of experts how many there are."""
        self.products += times * outputs * inputs
        self.ends += times * (outputs + inputs)
        self.expert_ends += times * (outputs + inputs) if experts else 0
        self.widest = max(self.widest, times * outputs)
        self.largest = max(self.largest, max(experts, 1) * outputs * inputs)


@attrs.frozen
class _Saved:
    """Elements that autograd saves of a row in a forward of all layers, but for attention and experts.

    Args:
        copied: of tensors as wide as the rows between layers.
        split: of others.
    """

    copied: float = 0
    split: float = 0


def decoder_cost(
    config: HfDecoderConfig, stage: Stage, recompute: str, lengths: Sequence[int], labels: int
) -> Mapping[str, OpCost]:
    """Return by part what a forward of ``stage`` takes over samples of these lengths; see `LanguageModelSpec.flops`."""
    parts, attention, saved = _counted(json.dumps(attrs.asdict(config), sort_keys=True), stage)
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
        if saved is not None:
            split = rows * (saved.split + parts["layers"].expert_ends)
            layers = attrs.evolve(layers, copied=rows * saved.copied, split=split)
        found["layers"] = layers
        for call, count in attention.items():
            found["layers"] += _attention(call, lengths, count)
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
def _counted(
    described: str, stage: Stage
) -> tuple[Mapping[str, _Matrices], Mapping[AttentionCall, int], _Saved | None]:
    """Return what parts multiply with, in the order of data, calls of attention, and what else is saved, if known."""
    config = HfDecoderConfig(**json.loads(described))
    with create_on("meta"):
        built = HfStage(config, stage)
    record, saved = _record(built, config)
    times = {
        linear: record.chosen.get(experts, 1)
        for experts in built.modules()
        if isinstance(experts, BridgedExperts)
        for linear in experts.modules()
    }
    parts = {part: _Matrices() for part in ("embedding", "layers", _HEAD)}
    for path, module in built.named_modules():
        part = parts[_PARTS.get(path.partition(".")[0], _HEAD)]
        for leaf, parameter in module.named_parameters(recurse=False):
            part.weights += parameter.numel()
            if isinstance(module, GroupedLinear):
                part.experts += parameter.numel()
                if leaf == "weight":
                    part.add(*parameter.shape[1:], times=times.get(module, 1), experts=len(parameter))
            elif parameter.dim() == _OF_EXPERTS and parameter.shape[0] == config.experts:
                part.add(*parameter.shape[1:], times=config.experts_per_token, experts=len(parameter))
            elif parameter.dim() > 1 and not isinstance(module, Embedding | nn.Embedding):
                part.add(parameter.shape[0], parameter.shape[1:].numel())
    if built.stage.is_last and built.tied:
        parts[_HEAD].add(config.vocabulary, config.hidden)
    found = {name: part for name, part in parts.items() if part.weights or part.products}
    return found, Counter(record.attention), saved


def _record(built: HfStage, config: HfDecoderConfig) -> tuple[CallRecord, _Saved | None]:
    """Return what a stage without storage asks for in a forward and saves; nothing of one that can't run so."""
    ids = torch.zeros(_ROWS, dtype=torch.long)
    batch = LanguageBatch.of(ids, ids, torch.arange(_ROWS), lengths=[_ROWS])
    hidden = None if built.stage.is_first else torch.zeros(_ROWS, config.hidden, device="meta")
    built.record, counter = CallRecord(), ForwardCounter((one, None) for one in built.parameters())
    try:
        with counter.counting():
            built(batch, {}, hidden)
    except RuntimeError:  # it reads numbers back that depend on weights
        return CallRecord(), None
    sizes = [(width == config.hidden, elements / _ROWS) for width, elements in counter.saved.elements()]
    return built.record, _Saved(
        copied=sum(size for is_row, size in sizes if is_row), split=sum(size for is_row, size in sizes if not is_row)
    )

"""What a stage takes, from the shapes of its weights and from what its layers ask of attention and of experts.

A forward of a few rows without storage takes down the calls; nothing is computed. What parts that mix rows do between
their weights, as scans do, is left out; of the few families that can't run without storage, attention too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache

import attrs
import torch
from torch import nn

from mimo.model import OpCost, Stage
from mimo.model.runtime import GroupedLinear, LanguageBatch, create_on
from mimo_transformers.family import HfDecoderConfig
from mimo_transformers.model.attention import AttentionCall, CallRecord
from mimo_transformers.model.experts import BridgedExperts
from mimo_transformers.model.stage import HfStage

_ROWS = 2


@attrs.frozen(kw_only=True)
class _Counted:
    """What a stage has.

    Args:
        weights: elements of its parameters, by part.
        read: by part, outputs, inputs and a factor of each matrix with which all rows are multiplied, or as many times
            the rows.
        experts: of these, elements of experts, by part.
        attention: calls of it.
    """

    weights: Mapping[str, int]
    read: Mapping[str, Sequence[tuple[int, int, int]]]
    experts: Mapping[str, int]
    attention: Sequence[AttentionCall]


def decoder_cost(
    config: HfDecoderConfig, stage: Stage, recompute: str, lengths: Sequence[int], labels: int
) -> Mapping[str, OpCost]:
    """Return by part what a forward of ``stage`` takes over samples of these lengths; see `LanguageModelSpec.flops`."""
    counted, rows = _counted(json.dumps(attrs.asdict(config), sort_keys=True), stage), sum(lengths)
    found = {}
    for part, weights in counted.weights.items():
        work = OpCost(weights=weights, expert_weights=counted.experts[part])
        for outputs, inputs, times in counted.read[part]:
            some = (labels if part == "head" else rows) * times
            ends = some * (outputs + inputs)
            work += OpCost(weighted=2.0 * some * outputs * inputs, copied=ends, operands=ends)
        found[part] = work + OpCost(copied=rows) if part == "embedding" and stage.is_first else work
    if "layers" in found:
        work = found["layers"] + sum((_attention(call, lengths) for call in counted.attention), OpCost())
        count = len(stage.layers(config.layers))
        found["layers"] = _repeated(work, count, rows * config.hidden) if recompute == "full" else work
    return found


def _attention(call: AttentionCall, lengths: Sequence[int]) -> OpCost:
    """Return what one call takes: products of queries with keys, and of scores with values; half of all, as causal."""
    pairs = sum(length * length for length in lengths) / 2
    if call.window:
        pairs -= sum(max(0, length - call.window) ** 2 for length in lengths) / 2
    saved = sum(lengths) * call.heads * (call.summed + 1.0)
    return OpCost(inner=2.0 * pairs * call.heads * (call.scored + call.summed), split=saved)


def _repeated(layers: OpCost, count: int, inputs: float) -> OpCost:
    """Return the cost of layers that save their inputs, so many elements each, and compute all else again in turn."""
    one = (layers.split + layers.copied) / max(count, 1)
    return attrs.evolve(
        layers, repeated=layers.forward, split=0, copied=inputs * count, recomputed=max(0.0, one - inputs)
    )


@cache
def _counted(described: str, stage: Stage) -> _Counted:
    config = HfDecoderConfig(**json.loads(described))
    with create_on("meta"):
        built = HfStage(config, stage)
    built.record = record = CallRecord()
    with torch.no_grad(), suppress(RuntimeError):  # some read numbers back, or have tensors elsewhere
        _run(built, config)
    chosen = {
        part: record.chosen.get(module, 1)
        for module in built.modules()
        if isinstance(module, BridgedExperts)
        for part in module.modules()
    }
    parts = dict.fromkeys(("embedding", "layers", "head"))
    weights, experts = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0)
    read: dict[str, list[tuple[int, int, int]]] = {part: [] for part in parts}
    for path, module in built.named_modules():
        part = {"embedding": "embedding", "before": "embedding", "layers": "layers"}.get(path.split(".")[0], "head")
        for leaf, parameter in module.named_parameters(recurse=False):
            weights[part] += parameter.numel()
            if isinstance(module, GroupedLinear):
                experts[part] += parameter.numel()
                if leaf == "weight":
                    read[part].append((*parameter.shape[1:], chosen.get(module, 1)))
            elif parameter.dim() > 1 and not _is_table(module):
                read[part].append((parameter.shape[0], parameter.shape[1:].numel(), 1))
    if built.stage.is_last and built.tied:
        read["head"].append((config.vocabulary, config.hidden, 1))
    held = {part for part in parts if weights[part] or read[part]}
    return _Counted(
        weights={part: weights[part] for part in parts if part in held},
        read=read,
        experts=experts,
        attention=tuple(record.attention),
    )


def _run(built: HfStage, config: HfDecoderConfig) -> None:
    """Have a stage without storage run on rows of one sample."""
    ids = torch.zeros(_ROWS, dtype=torch.long)
    batch = LanguageBatch.of(ids, ids, torch.arange(_ROWS), lengths=[_ROWS])
    meta = {name: getattr(batch, name).to("meta") for name in ("tokens", "labels", "positions", "samples")}
    batch = attrs.evolve(batch, **meta)
    built(batch, {}, None if built.stage.is_first else torch.zeros(_ROWS, config.hidden, device="meta"))


def _is_table(part: nn.Module) -> bool:
    return isinstance(part, nn.Embedding) or "embedding" in type(part).__name__.lower()

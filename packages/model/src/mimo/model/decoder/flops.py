"""What a stage of the decoder takes, by formula. Free of torch; `model.py` says what is computed.

H hidden, T rows, N query heads of width D, K key-value heads, I width inside the feed-forward part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from mimo.model.decoder.config import DecoderConfig
from mimo.model.spec import OpCost, Stage, StageConfig, attention_cost, linear_cost
from mimo.topology import Recompute


def decoder_cost(
    config: DecoderConfig, stage: Stage, recompute: Recompute, lengths: Sequence[int], labels: int
) -> Mapping[str, OpCost]:
    """Return by part what a forward of ``stage`` takes over samples of these lengths.

    Args:
        config: of the decoder.
        stage: which of its stages.
        recompute: what its backward computes again.
        lengths: rows of each sample.
        labels: how many of all these rows have labels; the head reads no others.
    """
    mixed = [index in config.expert_layers for index in stage.layers(config.layers)]
    last = config.experts > 0
    of_kind = {kind: _layer(config, recompute, lengths, mixed=kind) for kind in {*mixed, last}}
    layers = [of_kind[kind] for kind in mixed]
    return stage_cost(config, stage, layers, of_kind[last], lengths=lengths, labels=labels)


def stage_cost(
    config: StageConfig,
    stage: Stage,
    layers: Iterable[OpCost],
    mtp_layers: OpCost,
    *,
    lengths: Sequence[int],
    labels: int,
) -> Mapping[str, OpCost]:
    """Return by part the cost of a stage, given those of its ``layers`` and of the layers of one MTP module."""
    hidden, rows, found = config.hidden, sum(lengths), {}
    if stage.is_first:
        found["embedding"] = OpCost(copied=rows, weights=config.vocabulary * hidden)
    found["layers"] = sum(layers, OpCost())
    if stage.is_last:
        head = linear_cost(labels, hidden, config.vocabulary)
        head = attrs.evolve(head, copied=(2.0 * rows + labels) * hidden, logits=labels * config.vocabulary)
        found["head"] = attrs.evolve(head, weights=0) if config.tied and stage.is_first else head
    if stage.is_last and config.next_tokens:
        if not (stage.is_first or config.tied):
            found["embedding"] = OpCost(copied=config.next_tokens * rows, weights=config.vocabulary * hidden)
        heads = (
            mtp_layers + mtp_cost(config, rows, max(labels - number * len(lengths), 0))
            for number in range(1, config.next_tokens + 1)
        )
        found["next_tokens"] = sum(heads, OpCost())
    return found


def mtp_cost(config: StageConfig, rows: int, labels: int) -> OpCost:
    """Return the cost of one MTP module without its layers; ``labels`` rows take part."""
    hidden = config.hidden
    head = attrs.evolve(linear_cost(labels, hidden, config.vocabulary), weights=0)  # the model's
    work = linear_cost(rows, 2 * hidden, hidden) + head
    # Saved: embeddings, the joined halves, the last norm's rows and its, and those of them that the head reads.
    return work + OpCost(copied=(5.0 * rows + labels) * hidden, logits=labels * config.vocabulary)


def _layer(config: DecoderConfig, recompute: Recompute, lengths: Sequence[int], *, mixed: bool) -> OpCost:
    rows = sum(lengths)
    layer = attention_layer_cost(config, recompute, lengths)
    layer += experts_cost(config, recompute, rows) if mixed else mlp_cost(config, recompute, rows, config.intermediate)
    layer += OpCost(copied=4.0 * rows * config.hidden)  # the rows before each of the two parts, and their norms
    return repeated_layer(layer, rows * config.hidden) if recompute == "full" else layer


def repeated_layer(layer: OpCost, inputs: float) -> OpCost:
    """Return the cost of a layer that saves its inputs, so many elements, and computes all else again."""
    return attrs.evolve(
        layer,
        repeated=layer.forward,
        split=0,
        copied=inputs,
        recomputed=layer.split + layer.copied - inputs,
    )


def attention_layer_cost(config: DecoderConfig, recompute: Recompute, lengths: Sequence[int]) -> OpCost:
    """Return what attention takes, with its products, without its norm."""
    rows, hidden = sum(lengths), config.hidden
    queries, keys = config.heads * config.head_width, config.key_value_heads * config.head_width
    bias = config.biased_inputs
    work = linear_cost(rows, hidden, queries, bias=bias) + linear_cost(
        rows, queries, hidden, bias=config.attention_bias
    )
    key = linear_cost(rows, hidden, keys, bias=bias, shared=True)
    work += key + key
    work += attention_cost(lengths, width=queries, causal=True, window=config.sliding_window)
    # Saved: queries, keys and values turned, and what they attend to with its log-sum, in the order of the kernel's
    # calls; what they attend to in the order of rows too.
    work += OpCost(split=rows * (3.0 * queries + 2.0 * keys + config.heads))
    normed = queries + keys if config.query_key_norm else 0  # saved before they are turned too
    work += OpCost(split=float(rows * normed))
    return _again(work, recompute, rows * (normed + 2.0 * queries + config.heads), repeated=work.inner)


def mlp_cost(
    config: DecoderConfig, recompute: Recompute, rows: float, width: int, *, bias: bool | None = None
) -> OpCost:
    """Return what a feed-forward part of this width takes, without its norm."""
    bias = config.mlp_bias if bias is None else bias
    up, down = linear_cost(rows, config.hidden, width, bias=bias), linear_cost(rows, width, config.hidden, bias=bias)
    if not config.gated:  # the ReLU and its square are saved
        work = up + down + OpCost(split=2.0 * rows * width, working=rows * width)
        return _again(work, recompute, rows * width, recomputed=2.0 * rows * width)
    gate = linear_cost(rows, config.hidden, width, bias=bias, shared=True)
    # Gate and up, the gate's SiLU and their product are saved. When the product is gone, its gradient and those of two
    # more have taken its place.
    work = up + gate + down + OpCost(split=4.0 * rows * width, working=2.0 * rows * width)
    return _again(work, recompute, 2.0 * rows * width)


def experts_cost(config: DecoderConfig, recompute: Recompute, rows: float) -> OpCost:
    """Return what a mixture of experts takes, without its norm."""
    width = config.expert_intermediate or config.intermediate
    chosen = config.experts_per_token * rows
    routed = mlp_cost(config, recompute, chosen, width, bias=False)
    weights = config.experts * routed.weights
    split = routed.split + 2.0 * chosen * config.hidden
    largest = config.experts * routed.largest
    routed = attrs.evolve(routed, weights=weights, expert_weights=weights, split=split, largest=largest)
    routed += linear_cost(rows, config.hidden, config.experts) + OpCost(copied=2.0 * rows * config.experts)
    if config.shared_intermediate:
        routed += mlp_cost(config, recompute, rows, config.shared_intermediate)
    return routed


def _again(
    work: OpCost, recompute: Recompute, dropped: float, *, repeated: float = 0, recomputed: float | None = None
) -> OpCost:
    """Return ``work``; with ``selective`` recomputation it saves ``dropped`` elements less, and computes them again."""
    if recompute != "selective":
        return work
    recomputed = dropped if recomputed is None else recomputed
    return attrs.evolve(work, repeated=repeated, split=work.split - dropped, recomputed=recomputed)

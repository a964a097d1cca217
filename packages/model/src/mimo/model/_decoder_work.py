"""What a stage of the decoder takes, by formula. Free of torch; `_decoder.py` says what is computed.

H hidden, T rows, N query heads of width D, K key-value heads, I width inside the feed-forward part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.model._decoder_spec import DecoderConfig
from mimo.model._specs import Stage
from mimo.model._work import Work, attention, product
from mimo.topology import Recompute


def decoder_work(
    config: DecoderConfig, stage: Stage, recompute: Recompute, lengths: Sequence[int], labels: int
) -> Mapping[str, Work]:
    """Return by part what a forward of ``stage`` takes over samples of these lengths.

    Args:
        config: of the decoder.
        stage: which of its stages.
        recompute: what its backward computes again.
        lengths: rows of each sample.
        labels: how many of all these rows have labels; the head reads no others.
    """
    rows, hidden, found = sum(lengths), config.hidden, {}
    if stage.is_first:
        found["embedding"] = Work(copied=rows, weights=config.vocabulary * hidden)
    layers = [
        _layer(config, recompute, lengths, mixed=index in config.expert_layers) for index in stage.layers(config.layers)
    ]
    found["layers"] = sum(layers, Work())
    if stage.is_last:
        head = product(labels, hidden, config.vocabulary)
        head = attrs.evolve(head, copied=(2.0 * rows + labels) * hidden, split=labels * config.vocabulary)
        found["head"] = attrs.evolve(head, weights=0) if config.tied and stage.is_first else head
    return found


def _layer(config: DecoderConfig, recompute: Recompute, lengths: Sequence[int], *, mixed: bool) -> Work:
    rows, hidden = sum(lengths), config.hidden
    queries, keys = config.heads * config.head_width, config.key_value_heads * config.head_width
    bias = config.attention_bias
    mixing = product(rows, hidden, queries, bias=bias) + product(rows, queries, hidden, bias=bias)
    key = product(rows, hidden, keys, bias=bias, shared=True)
    mixing += key + key
    mixing += attention(lengths, width=queries, causal=True)
    # Kept: the rows and their norm; queries, keys and values turned, what they attend to and its log-sum.
    mixing += Work(copied=2.0 * rows * hidden, split=rows * (2.0 * queries + 2.0 * keys + config.heads))
    feeding = _experts(config, rows) if mixed else _mlp(rows, hidden, config.intermediate, bias=config.mlp_bias)
    feeding += Work(copied=2.0 * rows * hidden)
    layer = mixing + feeding
    match recompute:
        case "none":
            return layer
        case "selective":  # what lies between the products: attention itself, the gate's SiLU and what it gates
            widths = config.experts_per_token * (config.expert_intermediate or config.intermediate)
            widths = widths + config.shared_intermediate if mixed else config.intermediate
            again = rows * (queries + config.heads + 2.0 * widths)
            return attrs.evolve(layer, repeated=layer.inner, split=layer.split - again, recomputed=again)
        case "full":
            return attrs.evolve(
                layer,
                repeated=layer.forward,
                split=0,
                copied=rows * hidden,
                recomputed=layer.split + layer.copied - rows * hidden,
            )


def _mlp(rows: float, hidden: int, width: int, *, bias: bool) -> Work:
    gate, up = (product(rows, hidden, width, bias=bias, shared=shared) for shared in (False, True))
    # Gate and up, the gate's SiLU and their product are kept.
    return gate + up + product(rows, width, hidden, bias=bias) + Work(split=4.0 * rows * width)


def _experts(config: DecoderConfig, rows: float) -> Work:
    width = config.expert_intermediate or config.intermediate
    chosen = config.experts_per_token * rows
    routed = _mlp(chosen, config.hidden, width, bias=False)
    weights = config.experts * routed.weights
    split = routed.split + 2.0 * chosen * config.hidden
    routed = attrs.evolve(routed, weights=weights, expert_weights=weights, split=split)
    routed += product(rows, config.hidden, config.experts) + Work(copied=2.0 * rows * config.experts)
    if config.shared_intermediate:
        routed += _mlp(rows, config.hidden, config.shared_intermediate, bias=config.mlp_bias)
    return routed

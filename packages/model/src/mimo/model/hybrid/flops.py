"""What a stage of the hybrid takes, by formula. Free of torch; `model.py` and `mamba.py` say what is computed.

T rows, H hidden, N heads of P columns, G groups, S columns of the state, Q rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from mimo.model.decoder.flops import attention_layer_cost, experts_cost, mlp_cost, repeated_layer, stage_cost
from mimo.model.hybrid.config import ATTENTION, EXPERTS, MAMBA, HybridConfig
from mimo.model.spec import OpCost, Stage, linear_cost
from mimo.topology import Recompute


def hybrid_cost(
    config: HybridConfig, stage: Stage, recompute: Recompute, lengths: Sequence[int], labels: int
) -> Mapping[str, OpCost]:
    """Return by part what a forward of ``stage`` takes over samples of these lengths.

    Args:
        config: of the hybrid.
        stage: which of its stages.
        recompute: what its backward computes again.
        lengths: rows of each sample.
        labels: how many of all these rows have labels; the head reads no others.
    """
    letters = [config.pattern[index] for index in stage.layers(config.layers)]
    mtp_letters = config.next_pattern if stage.is_last and config.next_tokens else ""
    of_kind = {letter: _layer(config, letter, recompute, lengths) for letter in {*letters, *mtp_letters}}
    layers, each = ([of_kind[letter] for letter in some] for some in (letters, mtp_letters))
    return stage_cost(config, stage, layers, sum(each, OpCost()), lengths=lengths, labels=labels)


def _layer(config: HybridConfig, letter: str, recompute: Recompute, lengths: Sequence[int]) -> OpCost:
    rows = sum(lengths)
    if letter == MAMBA:
        layer = _mamba(config, recompute, rows)
    elif letter == EXPERTS:
        layer = experts_cost(config.decoder, recompute, rows)
    elif letter == ATTENTION:
        layer = attention_layer_cost(config.decoder, recompute, lengths)
    else:
        layer = mlp_cost(config.decoder, recompute, rows, config.intermediate)
    layer += OpCost(copied=2.0 * rows * config.hidden)  # the rows and their norm
    return repeated_layer(layer, rows * config.hidden) if recompute == "full" else layer


def _mamba(config: HybridConfig, recompute: Recompute, rows: int) -> OpCost:
    hidden, width, bias = config.hidden, config.mamba_width, config.mamba_bias
    heads, shared = config.mamba_heads, config.mamba_groups * config.mamba_state
    mixed = width + 2 * shared
    work = linear_cost(rows, hidden, width, bias=bias) + linear_cost(rows, width, hidden, bias=bias)
    for outputs in (width, shared, shared, heads):
        work += linear_cost(rows, hidden, outputs, bias=bias, shared=True)
    chunk = max(1, min(config.mamba_chunk, rows))
    count = -(-rows // chunk)
    # Within chunks all pairs are multiplied, for each group and for each head, whose steps are added up by them too;
    # states are made and read by rows.
    inside = 2.0 * count * chunk * chunk * (shared + width + heads)
    states = 2.0 * 2.0 * count * chunk * width * config.mamba_state
    work += OpCost(inner=inside + states)
    work += OpCost(weights=mixed * (config.mamba_taps + config.mamba_conv_bias) + 3 * heads + width)
    # The scan keeps pairs, in float64 which there are, of each group's once, of each head's decays and products;
    # states at the starts and ends of chunks, the rows that it multiplies; the convolution its taps; the norm the gate,
    # its SiLU, what it gates and norms.
    pairs = count * chunk * chunk * (config.mamba_groups + 3.0 * heads + 2.0)
    saved = pairs + 3.0 * count * width * config.mamba_state + rows * (6.0 * width + 2.0 * shared)
    saved += rows * mixed * (config.mamba_taps + 1.0) + 5.0 * rows * width
    work += OpCost(split=rows * (mixed + heads + 2.0 * width) + saved)
    if recompute != "selective":
        return work
    return attrs.evolve(work, repeated=work.inner, split=work.split - saved, recomputed=saved)

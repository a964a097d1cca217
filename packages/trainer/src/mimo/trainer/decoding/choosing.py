"""The next token of each running sequence, chosen from the logits: the likeliest, or one drawn.

A draw depends on the seed, the prompt's number and the token's place in its sequence alone: not on which ranks draw,
which other sequences run beside it, or what was drawn before.
Shapes: B sequences, V ids of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mimo.hooks import RunError
from mimo.trainer.decoding.sampling import Sampling

_UNIT = 2.0**-53


def choose(
    sampling: Sampling, logits: Tensor, seen: Sequence[Sequence[int]], prompts: Sequence[int] | None = None
) -> list[int]:
    """Return the next id of each sequence.

    Args:
        sampling: how.
        logits: [B, V] fp32.
        seen: of each sequence the ids before, those of the prompt included; their number is the next token's place.
        prompts: of each sequence, the number of its prompt; None: as they stand.

    Raises:
        RunError: of a sequence no logit is the largest, since one is not a number, or infinite.
    """
    top = logits.amax(1)  # [B]
    if not bool(top.isfinite().all()):
        row = int((~top.isfinite()).nonzero()[0])
        raise RunError(
            "modules.language",
            expected="finite logits",
            got=f"{float(top[row])} among those of the token at position {len(seen[row])}",
            fix="The weights, or what the prompt makes of them, are no numbers: try an earlier checkpoint.",
        )
    if sampling.repetition_penalty != 1:
        logits = penalised(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(1).tolist()
    numbers = range(len(seen)) if prompts is None else prompts
    draws = [_draw(sampling.seed, number, len(ids)) for number, ids in zip(numbers, seen, strict=True)]
    # By id and not by size: where two are nearly equal, a rounding must not exchange their places.
    sums = probabilities(sampling, logits).double().cumsum(1)
    whole = sums[:, -1:]
    at = torch.minimum(whole.new_tensor(draws).unsqueeze(1) * whole, whole.nextafter(whole.new_zeros(())))
    return (sums <= at).sum(1).tolist()


def probabilities(sampling: Sampling, logits: Tensor) -> Tensor:
    """Return the probability [B, V] with which each id is drawn, of logits [B, V] that repetition has been taken from.

    By the operations of the logits processors of `transformers`, in fp32 as there, so that of equal ids the same stay.
    """
    smallest = torch.finfo(logits.dtype).tiny
    temperature = max(sampling.temperature, smallest)
    scores = logits / temperature
    if not bool(scores.amax(1).isfinite().all()):  # so low that the likeliest alone is left
        scores = (logits - logits.amax(1, keepdim=True)) / temperature
    if sampling.top_k:
        last = scores.topk(min(sampling.top_k, scores.shape[1])).values[:, -1:]
        scores = scores.masked_fill(scores < last, -torch.inf)
    if sampling.top_p < 1:
        ascending, ids = scores.sort()  # not stable: which of equal ids stay at the cut is as in the library
        goes = ascending.softmax(1).cumsum(1) <= 1 - sampling.top_p
        goes[:, -1] = False
        scores = scores.masked_fill(goes.scatter(1, ids, goes), -torch.inf)
    shares = scores.softmax(1)
    if sampling.min_p:
        goes = shares < sampling.min_p * shares.amax(1, keepdim=True)
        shares = scores.masked_fill(goes, -torch.inf).softmax(1)
    return shares


def penalised(logits: Tensor, seen: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Return logits [B, V] in which ids that were seen are less likely; ids beyond V are passed over."""
    lesser = torch.where(logits < 0, logits * penalty, logits / penalty)
    found = logits.clone()
    for row, ids in enumerate(seen):
        own = torch.tensor([token for token in set(ids) if token < logits.shape[1]], device=logits.device)
        found[row, own] = lesser[row, own]
    return found


def _draw(seed: int, prompt: int, place: int) -> float:
    """Return a number from 0 to below 1."""
    sequence = np.random.SeedSequence(seed, spawn_key=(prompt, place))
    return float(np.random.Philox(sequence).random_raw() >> 11) * _UNIT

"""What predicts further tokens, beside the same written out sample by sample and row by row."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from mimo.hooks import ConfigError
from mimo.model import DECODER, HYBRID, DecoderConfig, HybridConfig, LanguageModelSpec, Stage
from mimo.model.language.rotary import Rotation
from mimo.model.language.routing import Routing
from mimo.model.runtime import NO_LABEL, LanguageBatch, Segments, Sequences, TensorAxis

SMALL = DecoderConfig(vocabulary=11, hidden=12, layers=2, heads=2, intermediate=10, next_tokens=2, next_tokens_loss=0.3)
MIXED = HybridConfig(
    vocabulary=11, hidden=12, pattern="M*E", heads=2, experts=4, intermediate=10, mamba_heads=4, mamba_head_dim=3,
    mamba_state=5, next_tokens=2, next_tokens_loss=0.3,
)  # fmt: skip
CONFIGS: dict[str, tuple[LanguageModelSpec, Any]] = {
    "decoder": (DECODER, SMALL),
    "decoder, tied": (DECODER, attrs.evolve(SMALL, tied=True)),
    "hybrid": (HYBRID, MIXED),
    "hybrid, a pattern of its own": (HYBRID, attrs.evolve(MIXED, next_tokens_pattern="EM", next_tokens=1)),
}
LENGTHS = (7, 0, 2, 6)
UNLABELLED = (2, 6, 8, 14)
"""Of the packed rows: one before a placeholder, and the last of each sample."""

LEAVE = "Leave it out, or set next_tokens."


def _batch(
    next_tokens: int,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    first: int = 0,
    padding: int = 1,
    weights: Tensor | None = None,
) -> LanguageBatch:
    """Return samples of these lengths, which begin at a row of all; ``weights`` are those of all rows' labels."""
    stop = first + sum(lengths)
    tokens, labels = torch.arange(16) * 7 % 11, torch.arange(1, 17) * 7 % 11
    labels[list(UNLABELLED)] = NO_LABEL
    positions = torch.cat([torch.arange(length) for length in (*lengths, 0)])
    return LanguageBatch.of(
        functional.pad(tokens[first:stop], (0, padding)),
        functional.pad(labels[first:stop], (0, padding), value=NO_LABEL),
        functional.pad(positions, (0, padding)),
        lengths=lengths,
        next_tokens=next_tokens,
        weights=None if weights is None else functional.pad(weights[first:stop], (0, padding)),
    )


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _through(config: Any, batch: LanguageBatch) -> Callable[[Any, Tensor], Tensor]:
    """Return what runs a layer over the rows of one sample."""
    rows = len(batch.tokens)
    segments = Segments.of((rows,), causal=True)
    if isinstance(config, DecoderConfig):
        rotation = Rotation.of(batch, config)
        return lambda layer, x: layer(x, segments, rotation, None)[0]
    sequences = Sequences.of((rows,), rows=rows, chunk=config.mamba_chunk)
    routing = Routing.of(batch, TensorAxis.single())
    return lambda layer, x: layer(x, segments, sequences, routing)[0]


def _further_loss(module: Any, config: Any, sample: LanguageBatch) -> Tensor:
    """Return what the further tokens of one sample add to the loss."""
    hidden: Tensor = module(sample, {}, None)
    labels, table = sample.labels.tolist(), module.embedding.weight
    output = table if config.tied else module.head.weight
    total, run = hidden.new_zeros(()), _through(config, sample)
    for k, head in enumerate(module.next_tokens.values(), start=1):
        joined = []
        for row, before in enumerate(hidden):
            between = labels[row : row + k]
            known = len(between) == k and NO_LABEL not in between
            token = table[between[-1]] if known else torch.zeros(config.hidden)
            halves = (
                _norm(token, head.token_norm.weight, config.norm_eps),
                _norm(before, head.hidden_norm.weight, config.norm_eps),
            )
            joined.append(head.project.weight @ torch.cat(halves))
        x = torch.stack(joined)
        for layer in head.layers.values():
            x = run(layer, x)
        hidden = _norm(x, head.norm.weight, config.norm_eps)
        found, shares = [], []
        for row, after in enumerate(hidden):
            wanted = labels[row : row + k + 1]
            if len(wanted) == k + 1 and NO_LABEL not in wanted:
                found.append(functional.cross_entropy(output @ after, torch.tensor(wanted[-1])))
                shares.append(1.0 if sample.weights is None else float(sample.weights[row + k]))
        if sum(shares):
            mean = sum(loss * share for loss, share in zip(found, shares, strict=True)) / sum(shares)
            total = total + mean * sum(_weights_of(sample))
    result: Tensor = total * config.next_tokens_loss / config.next_tokens
    return result


def _weights_of(sample: LanguageBatch) -> list[float]:
    """Return the weight of each label of a sample."""
    if sample.weights is None:
        return [float(label != NO_LABEL) for label in sample.labels.tolist()]
    return sample.weights.tolist()


WEIGHTS = torch.tensor([0.5, 0.0, 0.0, 0.0, 2.0, 0.25, 0.0, 3.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.75, 0.0, 0.0])
"""Of the labels of all rows: what precedes may weigh nothing, what is predicted further on something."""


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["no weights", "weights"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_loss_written_out(name: str, weights: Tensor | None) -> None:
    """Value and every gradient, over samples of which one is empty and one too short for any further token."""
    spec, config = CONFIGS[name]
    torch.manual_seed(3)
    module = spec.build(config, Stage())
    batch = _batch(config.next_tokens, weights=weights)
    module(batch, {}, None)
    ours = batch.aux_losses.losses["next_tokens"]
    parameters = {path: value for path, value in module.named_parameters() if value.requires_grad}
    given = torch.autograd.grad(ours, list(parameters.values()), allow_unused=True)
    firsts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    samples = [
        _batch(0, (length,), first=first, padding=0, weights=weights)
        for length, first in zip(LENGTHS, firsts, strict=False)
        if length
    ]
    truth = torch.stack([_further_loss(module, config, sample) for sample in samples]).sum()
    torch.testing.assert_close(ours, truth, rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(truth, list(parameters.values()), allow_unused=True)
    for path, one, other in zip(parameters, given, wanted, strict=True):
        assert (one is None) == (other is None), path
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=path)


def test_a_row_takes_part_that_has_labels_as_far_as_it_looks() -> None:
    """None before a placeholder, none that would look into the next sample or into padding; all are counted."""
    first, second = _batch(2).mtp_labels
    assert first.rows.tolist() == [0, 3, 4, 9, 10, 11, 12]
    assert second.rows.tolist() == [3, 9, 10, 11]
    assert (first.counts, second.counts) == ((3, 0, 0, 4), (1, 0, 0, 3))
    labels = _batch(0).labels
    for k, found in enumerate((first, second), start=1):
        assert found.labels[found.rows].tolist() == labels[found.rows + k].tolist()
        assert int((found.labels != NO_LABEL).sum()) == len(found.rows)
    empty = LanguageBatch.of(*(torch.zeros(0, dtype=torch.long),) * 3, lengths=(0,), next_tokens=1)
    assert empty.mtp_labels[0].counts == (0,)


@pytest.mark.parametrize("lengths", [(), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize("name", ["decoder", "hybrid"])
def test_samples_without_a_row_that_takes_part_are_ordinary(name: str, lengths: tuple[int, ...]) -> None:
    """The loss is 0, and its gradient too, of every parameter that has one for longer samples."""
    spec, config = CONFIGS[name]
    module: Any = spec.build(config, Stage())
    found: dict[bool, set[str]] = {}
    for some in (LENGTHS, lengths):
        batch = _batch(2, some, first=1, padding=0)
        module(batch, {}, None)
        module.zero_grad()
        batch.aux_losses.losses["next_tokens"].backward()
        found[some is lengths] = {path for path, value in module.named_parameters() if value.grad is not None}
    assert found[True] == found[False]
    assert batch.aux_losses.losses["next_tokens"].item() == 0
    assert all(not value.grad.any() for value in module.parameters() if value.grad is not None)


@pytest.mark.parametrize("name", ["decoder", "hybrid"])
def test_without_them_nothing_is_there_and_nothing_is_done(name: str) -> None:
    """A model without has no more parameters; of one with them a batch that does not ask gets the same rows."""
    spec, config = CONFIGS[name]
    torch.manual_seed(3)
    module: Any = spec.build(config, Stage())
    bare: Any = spec.build(attrs.evolve(config, next_tokens=0, next_tokens_loss=0.1), Stage())
    more = {path for path, _ in module.named_parameters()} - {path for path, _ in bare.named_parameters()}
    assert more == {path for path, _ in module.named_parameters() if path.startswith("next_tokens.")} != set()
    bare.load_state_dict({path: value for path, value in module.state_dict().items() if path not in more})
    asked, plain = _batch(2), _batch(0)
    assert torch.equal(module(asked, {}, None), bare(plain, {}, None))
    assert asked.aux_losses.losses.keys() == {"next_tokens"}
    assert plain.aux_losses.losses == {}
    module(plain, {}, None)
    assert plain.aux_losses.losses == {}


def test_what_a_spec_says_of_them() -> None:
    """Their loss and loads are announced, their part is the last stage's, which holds the embedding too."""
    config = attrs.evolve(MIXED, balance_loss=0.1, next_tokens=1)
    assert HYBRID.aux_losses(config).losses == ("balance", "next_tokens")
    assert HYBRID.aux_losses(config).counts == {"layers.2.load": 4, "next_tokens.0.layers.1.load": 4}
    assert HYBRID.aux_losses(MIXED).losses == ("next_tokens",)
    assert (HYBRID.next_tokens(config), HYBRID.tied(config)) == (1, True)
    assert HYBRID.stage_parts(config, Stage(1, 2)) == {"embedding", "layers", "head", "next_tokens"}
    assert HYBRID.stage_parts(config, Stage(0, 2)) == {"embedding", "layers"}
    assert DECODER.aux_losses(SMALL).counts == {}


@pytest.mark.parametrize(
    ("pattern", "resolved"),
    [("MEMEM*EMEM", "*E"), ("M-M*", "*-"), ("ME-", "ME"), ("M", "M"), ("*", "*"), ("-", "-")],
)
def test_layers_are_of_kinds_that_the_pattern_has(pattern: str, resolved: str) -> None:
    """Attention and a feed-forward part where there are some."""
    config = HybridConfig(hidden=16, pattern=pattern, next_tokens=1, experts=4 * ("E" in pattern))
    assert config.next_pattern == resolved


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: DecoderConfig(next_tokens=-1),
            "modules.language.config.next_tokens: expected 0 or more, got -1",
        ),
        (
            lambda: DecoderConfig(next_tokens=1, next_tokens_loss=0.0),
            "modules.language.config.next_tokens_loss: expected a finite number above 0, got 0.0",
        ),
        (
            lambda: DecoderConfig(next_tokens_loss=0.3),
            f"modules.language.config.next_tokens_loss: expected 0.1, since next_tokens is 0, got 0.3. {LEAVE}",
        ),
        (
            lambda: HybridConfig(next_tokens_loss=0.3),
            f"modules.language.config.next_tokens_loss: expected 0.1, since next_tokens is 0, got 0.3. {LEAVE}",
        ),
        (
            lambda: HybridConfig(next_tokens_pattern="*"),
            f"modules.language.config.next_tokens_pattern: expected nothing, since next_tokens is 0, got '*'. {LEAVE}",
        ),
        (
            lambda: HybridConfig(next_tokens=1, next_tokens_pattern="*E"),
            "modules.language.config.next_tokens_pattern: expected letters of the pattern 'M-M*', got '*E'",
        ),
    ],
    ids=["negative", "no loss", "a loss of none", "a loss of none, hybrid", "a pattern of none", "other letters"],
)
def test_settings_that_mean_nothing_are_refused(make: Callable[[], Any], expected: str) -> None:
    """With the key, what it can be, and what to do."""
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        make()


@pytest.mark.parametrize("name", ["decoder", "decoder, tied"])
def test_work_counts_their_products_and_weights(name: str) -> None:
    """Multiplications are those that PyTorch counts; weights are all but norms' scales, the head's not once more."""
    spec, config = CONFIGS[name]
    lengths, labels = (7, 6), 11
    tokens = torch.arange(13) % 11
    targets = tokens.clone()
    targets[[6, 12]] = NO_LABEL
    batch = LanguageBatch.of(tokens, targets, tokens, lengths=lengths, next_tokens=2)
    module: Any = spec.build(config, Stage())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.losses(module(batch, {}, None), targets)
    by_operation = counter.get_flop_counts()["Global"]
    assert spec.flops is not None
    found = spec.flops(config, Stage(), "none", lengths, labels)
    assert [*found] == ["embedding", "layers", "head", "next_tokens"]
    assert sum(one.weighted for one in found.values()) == sum(
        count for operation, count in by_operation.items() if "attention" not in str(operation)
    )
    matrices = sum(value.numel() for value in module.parameters() if value.dim() > 1)
    assert sum(one.weights for one in found.values()) == matrices
    last = spec.flops(config, Stage(1, 2), "none", lengths, labels)
    held = spec.build(config, Stage(1, 2)).parameters()
    assert sum(one.weights for one in last.values()) == sum(value.numel() for value in held if value.dim() > 1)

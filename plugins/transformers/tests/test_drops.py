"""Dropout of the library's own models: what a plain run of theirs on each sample drops, by masks that are made here."""

import hashlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from library import compare_gradients, stirred
from small_models import is_older, known, small
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo.model import Stage
from mimo.model.runtime import (
    DrawKeys,
    Drawn,
    LanguageBatch,
    attach_draws,
    fold,
    item_keys,
    keep,
    sample_rows,
    step_key,
)
from mimo_transformers import HF_DECODER, HF_ENCODER, HfEncoderConfig
from mimo_transformers.family import check_dropout, config_of, new_tower, quiet, rates_in, without_refused
from mimo_transformers.model.attention import PackedRows, hold_rows
from mimo_transformers.model.drops import BridgedDropout, replace_drops
from mimo_transformers.model.per_sample import run_per_sample
from mimo_transformers.model.small import batch_of, thin_values
from mimo_transformers.model.stage import HfStage
from mimo_transformers.tower import trial
from mimo_transformers.tower.encoder import features
from mimo_transformers.trial.encoders import UnfitError

LENGTHS, SAMPLES = (7, 3, 5), (4, 9, 2)
STEP = step_key(1, 1)
IMAGES = 5
PATH = 0.6
"""Rate at which whole branches are dropped."""
Masked: TypeAlias = Callable[[Tensor, float, Tensor], Tensor]
"""Returns what is left of rows, by the key of a place and a rate."""


def _draw_in(module: nn.Module, name: str) -> DrawKeys:
    keys = DrawKeys(module=name)
    attach_draws(module, keys, device=torch.device("cpu"), draws=lambda _path: True)
    return keys


def _rate(part: nn.Module) -> float:
    rate: float = part.p if type(part) is nn.Dropout else getattr(part, "drop_prob", 0.0) or 0.0
    return rate


def _mask_by_hand(network: Any, rename: Callable[[str], str], masked: Masked) -> int:
    """Have what drops in a model of the library drop by masks, and return how many modules that are."""
    count = 0
    for path, part in network.named_modules():
        if (rate := _rate(part)) and not list(part.children()):
            part.forward = partial(_in_turn, itertools.count(), rename(path), rate, masked)
            count += 1
    return count


def _in_turn(calls: "itertools.count[int]", name: str, rate: float, masked: Masked, x: Tensor) -> Tensor:
    """Drop by the key of the place: that of the module's name, or of its later calls in one forward."""
    site = torch.tensor(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True))
    call = next(calls)
    return masked(fold(site, call) if call else site, rate, x)


def _kept(key: Tensor, site: Tensor, rate: float, count: int) -> Tensor:
    """Return what stays of features, [count], as numbers by which they are multiplied."""
    return keep(fold(key, site).view(1), count, round(rate * 2**32))[0] / (1 - rate)


def _masked_rows(sample: int, site: Tensor, rate: float, x: Tensor) -> Tensor:
    """Return rows [1, S, H] of a sample, dropped one after the other."""
    owner = fold(fold(STEP, sample), 0)
    rows = [row * _kept(fold(owner, position), site, rate, len(row)) for position, row in enumerate(x[0])]
    return torch.stack(rows).unsqueeze(0)


def _stage_path(base: str, path: str) -> str:
    inside = path.removeprefix(f"{base}.")
    return f"language.{inside}" if inside.startswith("layers.") else f"language.drops.{inside.replace('.', '_')}"


@pytest.mark.parametrize(
    ("model_type", "rates", "places"),
    [
        ("phi", {"resid_pdrop": 0.2, "embd_pdrop": 0.3}, 5),
        ("gpt_neox", {"hidden_dropout": 0.4}, 9),
    ],
)
def test_packed_rows_in_stages_drop_what_the_library_would_of_each_sample(
    model_type: str, rates: dict[str, float], places: int
) -> None:
    """The loss and every gradient, with a mask by seed, step, sample, row, layer and feature in each place."""
    torch.manual_seed(3)
    config = small(model_type, **rates)
    network = stirred(config).eval()
    ids = torch.randint(1, config.vocabulary, (sum(LENGTHS),))
    wanted = torch.zeros(())
    base = network.base_model_prefix
    for sample, part in zip(SAMPLES, ids.split(list(LENGTHS)), strict=True):
        found = _mask_by_hand(network, partial(_stage_path, base), partial(_masked_rows, sample))
        assert found == places
        wanted = wanted + network(input_ids=part.unsqueeze(0), labels=part.unsqueeze(0)).loss * (len(part) - 1)
    wanted.backward()

    labels = torch.cat([torch.cat((part[1:], part.new_tensor([-100]))) for part in ids.split(list(LENGTHS))])
    positions = torch.cat([torch.arange(count) for count in LENGTHS])
    batch = LanguageBatch.of(ids, labels, positions, lengths=LENGTHS)
    rows = sample_rows(STEP, torch.tensor(SAMPLES).repeat_interleave(torch.tensor(LENGTHS)), positions)
    stages, hidden = [HfStage(config, Stage(index, 2)) for index in range(2)], None
    for stage in stages:
        stage.read(network)
        with _draw_in(stage, "language").at(Drawn(rows)):
            hidden = stage(batch, {}, hidden)
    assert hidden is not None
    loss = stages[-1].losses(hidden, labels).sum()
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    compare_gradients(
        stages, network, {name: one.grad for name, one in network.named_parameters(remove_duplicate=False)}
    )
    assert hidden.isfinite().all()
    for index, stage in enumerate(stages):  # a stage without rows drops nothing of its row of padding
        none = LanguageBatch.of(ids[:0], labels[:0], positions[:0], lengths=())
        with _draw_in(stage, "language").at(Drawn(rows[:0])):
            assert stage(none, {}, None if index == 0 else hidden[:0]).shape == (0, config.hidden)


def _masked_images(key: Tensor, site: Tensor, rate: float, x: Tensor) -> Tensor:
    """Return [1, …] of an image: whole where a branch adds it, dropped one row after the other where it is embedded."""
    if rate == PATH:
        return x * _kept(key, site, rate, 1)
    rows = [row * _kept(fold(key, place), site, rate, len(row)) for place, row in enumerate(x.flatten(0, -2))]
    return torch.stack(rows).view(x.shape)


def _tower(model_type: str, **values: Any) -> HfEncoderConfig:
    library = config_of(known(model_type), {})
    return HfEncoderConfig(model_type=model_type, values={**thin_values(library), "num_hidden_layers": 3, **values})


def test_a_tower_drops_of_images_in_a_batch_what_it_drops_of_each_alone() -> None:
    """Features of embedded rows, and what each branch of a layer adds to an image, by one module for both."""
    torch.manual_seed(5)
    config = _tower("dinov2", hidden_dropout_prob=0.3, drop_path_rate=PATH)
    encoder: Any = HF_ENCODER.build(config, 5)
    keys = _draw_in(encoder, "vision")
    with quiet():
        network = new_tower(config.library()).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    encoder.read(network)
    pixels = torch.randn(IMAGES, config.channels, config.side, config.side)
    numbers, places = [3, 3, 4, 9, 7], [0, 1, 0, 0, 2]
    drawn, wanted = item_keys(STEP, numbers, places), []
    for key, image in zip(drawn, pixels, strict=True):
        count = _mask_by_hand(network, lambda path: f"vision.encoder.{path}", partial(_masked_images, key))
        assert count == (7 if is_older("5.23") else 4)  # before, each branch of a layer had one of its own
        wanted.append(features(network, image.unsqueeze(0), config)[0])
    with keys.at(Drawn(items=drawn)):
        found = encoder.tower_rows([{"pixels": image} for image in pixels])
        assert encoder.tower_rows([]).shape == (0, found.shape[1])
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-5)
    targets = torch.randn_like(found)
    for rows in (found, torch.cat(wanted)):
        (rows * targets).sum().backward()
    theirs = {f"encoder.{path}": one.grad for path, one in network.named_parameters()}
    for path, parameter in encoder.named_parameters():
        if path in theirs and parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, theirs[path], rtol=1e-4, atol=1e-4)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.again = self.drop

    def forward(self, x: Tensor) -> Tensor:
        """Return [2, T, F]: what is left of rows [1, T, F] in two places."""
        return torch.cat((self.drop(x), self.again(x)))


def test_a_dropout_that_serves_in_several_places_drops_others_in_each() -> None:
    """And the same ones in each forward, and where parts run on one sample after the other."""
    part: Any = _Twice()
    found = replace_drops(part)
    assert sorted(found) == ["again", "drop"]
    assert found["drop"] is found["again"] is part.drop
    assert isinstance(part.drop, BridgedDropout)
    assert part.drop.p == 0.5
    keys, x = _draw_in(part, "language"), torch.ones(1, 5, 40)
    rows = sample_rows(STEP, torch.tensor([1, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 0, 1]))
    with keys.at(Drawn(rows)):
        first = part(x)
    assert not torch.equal(first[0], first[1])
    with keys.at(Drawn(rows)):
        assert torch.equal(part(x), first)
    alone: Any = nn.Sequential(nn.Identity(), part.drop)
    run_per_sample(alone)
    alone.draw_keys = keys
    batch = batch_of([torch.arange(3), torch.arange(2)])
    with hold_rows(alone, PackedRows.of(batch)), keys.at(Drawn(rows)):
        assert torch.equal(alone(x)[0], first[0])


REFUSED = r"expected 0\.0, as nothing of that kind is dropped here, got"
FUNCTION = r"expected 0\.0, as what a function draws follows the layout, got"


@pytest.mark.parametrize(
    ("model_type", "rates", "text"),
    [
        (
            "llama",
            {"attention_dropout": 0.1},
            rf"{REFUSED} attention_dropout = 0\.1, at which 'llama' drops weights of att",
        ),
        ("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.2}, rf"attn_pdrop: {REFUSED} attn_pdrop = 0\.2, at which 'gpt2'"),
        (
            "starcoder2",
            {"residual_dropout": 0.1, "embedding_dropout": 0.2, "attention_dropout": 0.1},
            rf"{FUNCTION} .*a function in its layers\. Set residual_dropout = 0\.0, embedding_dropout = 0\.0 there ",
        ),
        ("phimoe", {}, r"'phimoe': a small one draws random numbers while it trains\. plugins/transformers/README"),
    ],
)
def test_what_a_language_model_draws_without_keys_is_refused_by_its_key(
    model_type: str, rates: dict[str, float], text: str
) -> None:
    """Weights of attention, whole layers, and what functions in the library's code drop; jitter has no such key."""
    config = small(model_type, **rates)
    with pytest.raises(ConfigError, match=rf"^modules\.language\.config\..*{text}"):
        HF_DECODER.build(config, Stage())
    assert HF_DECODER.flops is not None
    with pytest.raises(ConfigError, match=text):  # of `mimo check`, which computes costs and builds nothing
        HF_DECODER.flops(config, Stage(), "none", (5, 3), 4)


def test_what_a_tower_draws_without_keys_is_refused_by_its_key() -> None:
    """What makes it none that could be trained without is said first."""
    text = rf"^config\.values\.attention_probs_dropout_prob: {REFUSED} .* = 0\.1, at which 'vit' drops weights of att"
    with pytest.raises(ConfigError, match=text):
        HF_ENCODER.build(_tower("vit", attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.1), 8)
    with pytest.raises(ConfigError, match=r"^config\.model_type: .* got 'yolos' with rows that don't end"):
        HF_ENCODER.build(HfEncoderConfig(model_type=known("yolos"), values={"attention_probs_dropout_prob": 0.1}), 8)


def test_rates_of_each_depth_are_set_to_zero_together() -> None:
    """Where they are refused; others stay."""
    rates = [0.0, 0.2, 0.0]
    config = HfEncoderConfig(model_type=known("cvt"), values={"attention_drop_rate": rates})
    assert without_refused(config).values == {"attention_drop_rate": [0.0, 0.0, 0.0]}
    with pytest.raises(
        ConfigError, match=rf"attention_drop_rate: {REFUSED} attention_drop_rate = \[0\.0, 0\.2, 0\.0\]"
    ):
        check_dropout(config, where="config.values")
    layers, text = (
        small("opt", layerdrop=0.1),
        r"'opt' drops whole layers\. Set layerdrop = 0\.0 there to train",
    )
    with pytest.raises(ConfigError, match=rf"^values\.layerdrop: .* at which {text} without\.$"):
        check_dropout(layers, where="values")
    plain = HfEncoderConfig(model_type="vit", values={"hidden_dropout_prob": 0.1})
    assert without_refused(plain) is plain


def test_a_tower_that_drops_otherwise_in_a_batch_is_refused() -> None:
    """Here one that has its images in another order."""
    encoder: Any = HF_ENCODER.build(_tower("dinov2", hidden_dropout_prob=0.3), 5)
    pixels = torch.randn(3, encoder.config.channels, encoder.config.side, encoder.config.side)
    items = [{"pixels": image} for image in pixels]
    with torch.no_grad():
        trial._check_dropped(encoder, items)
    forward = encoder.tower_rows
    encoder.tower_rows = lambda some: forward(list(some)[::-1]).unflatten(0, (len(some), -1)).flip(0).flatten(0, 1)
    expected = r"^rows of a thin one that differ by .* in a batch of images, with dropout$"
    with torch.no_grad(), pytest.raises(UnfitError, match=expected):
        trial._check_dropped(encoder, items)


def test_rates_are_read_of_keys_that_drop() -> None:
    """Numbers above 0; of heads for tasks, and of what isn't a rate, none."""
    values = {
        "resid_pdrop": 0.1,
        "hidden_dropout_prob": 0,
        "classifier_dropout": 0.5,
        "drop_path_rate": [0.0, 0.1],
        "summary_first_dropout": 0.1,
        "attn_drop_rate": 0.3,
        "layerdrop": None,
        "drop_mask": 1.0,
        "dropout": 0.25,
    }
    assert rates_in(values) == {"resid_pdrop": 0.1, "drop_path_rate": 0.1, "attn_drop_rate": 0.3, "dropout": 0.25}


def test_what_is_dropped_of_rows_that_enter_belongs_to_the_embedding() -> None:
    """On the first stage, where freezing that part has nothing dropped of them."""
    config = small("phi", embd_pdrop=0.3)
    stages = [HfStage(config, Stage(index, 2)) for index in range(2)]
    found = [[path for path, part in stage.named_modules() if isinstance(part, BridgedDropout)] for stage in stages]
    assert found == [["drops.embed_dropout"], []]
    assert "drops" in HF_DECODER.parts["embedding"]

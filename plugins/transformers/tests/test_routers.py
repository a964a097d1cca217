"""The loss on loads of experts of `hf-decoder`: by the library's own function, and in layouts as in the whole."""

import importlib
from typing import Any

import attrs
import pytest
import torch
from library import compare_gradients, stirred
from small_models import small
from torch import Tensor

from mimo.hooks import ConfigError
from mimo.model import AuxLossNames, Stage
from mimo.model.runtime import LanguageBatch
from mimo.model.testing import LanguageLayout, assert_language_layouts
from mimo_transformers import HF_DECODER, HfDecoderConfig
from mimo_transformers.model.stage import HfStage

LENGTHS = (7, 3, 5)
COEFFICIENT = 0.7
KEYS = {"jetmoe": "aux_loss_coef"}
FAMILIES = ("mixtral", "gpt_oss", "jamba", "qwen3_next")
"""Of these one has layers without experts, and in its oldest release a plain linear as router; the last has a scan."""


def balanced(model_type: str, **changes: Any) -> HfDecoderConfig:
    """Return the config of a small mixture that is trained towards equal loads."""
    loss = {"output_router_logits": True, KEYS.get(model_type, "router_aux_loss_coef"): COEFFICIENT}
    config = small(model_type, **changes)
    return attrs.evolve(config, values={**config.values, **loss})


def packed(samples: list[Tensor]) -> LanguageBatch:
    """Return samples as a batch, each row but the last of a sample with the next id as its label."""
    labels = torch.cat([torch.cat((part[1:], part.new_tensor([-100]))) for part in samples])
    positions = torch.cat([torch.arange(len(part)) for part in samples])
    return LanguageBatch.of(torch.cat(samples), labels, positions, lengths=[len(part) for part in samples])


def learned(stage: HfStage, batch: LanguageBatch) -> Tensor:
    """Return the loss of a batch, summed over its labels, that a stage has learnt from."""
    losses = stage.losses(stage(batch, {}, None), batch.labels)
    total = losses.sum() + torch.stack(list(batch.aux_losses.losses.values())).sum()
    total.backward()
    return total


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_loss_is_the_librarys_function_of_each_sample_and_layer(model_type: str) -> None:
    """Its mean over layers and over samples by their labels, beside their losses; every gradient with it."""
    torch.manual_seed(3)
    config = balanced(model_type)
    network = stirred(config)
    function = importlib.import_module(type(network).__module__).load_balancing_loss_func
    samples = list(torch.randint(1, config.vocabulary, (sum(LENGTHS),)).split(list(LENGTHS)))
    wanted = torch.zeros(())
    for ids in samples:
        found = network(input_ids=ids.unsqueeze(0), use_cache=False)
        losses = torch.nn.functional.cross_entropy(found.logits[0, :-1], ids[1:], reduction="sum")
        each = [function((logits,), network.num_experts, network.num_experts_per_tok) for logits in found.router_logits]
        wanted = wanted + losses + COEFFICIENT * torch.stack(each).mean() * (len(ids) - 1)
    wanted.backward()

    stage, batch = HfStage(config, Stage()), packed(samples)
    stage.read(network)
    assert learned(stage, batch).item() == pytest.approx(wanted.item(), rel=1e-6)
    compare_gradients(
        [stage], network, {name: one.grad for name, one in network.named_parameters(remove_duplicate=False)}
    )
    assert batch.aux_losses.losses.keys() == {"balance"}
    assert all(
        int(load.sum()) == sum(LENGTHS) * network.num_experts_per_tok for load in batch.aux_losses.counts.values()
    )


def test_of_one_sample_and_one_layer_with_experts_it_is_the_loss_of_the_librarys_class() -> None:
    """Which is the mean over labels, and takes all layers and samples of a batch together."""
    torch.manual_seed(3)
    config = balanced("mixtral", num_hidden_layers=1)
    network = stirred(config)
    ids = torch.randint(1, config.vocabulary, (9,))
    wanted = network(input_ids=ids.unsqueeze(0), labels=ids.unsqueeze(0), use_cache=False).loss
    wanted.backward()

    stage, batch = HfStage(config, Stage()), packed([ids])
    stage.read(network)
    assert learned(stage, batch).item() / 8 == pytest.approx(wanted.item(), rel=1e-6)
    theirs = {name: one.grad for name, one in network.named_parameters(remove_duplicate=False)}
    compare_gradients([stage], network, {name: one if one is None else 8 * one for name, one in theirs.items()})


@pytest.mark.newest
@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", *(pytest.param(one, marks=pytest.mark.soak) for one in ("gpt_oss", "jamba"))]
)
def test_layouts_compute_what_the_whole_does(model_type: str) -> None:
    """Losses, loads and every gradient, routers' too, in stages, context, tensor and expert ranks and ragged lanes."""
    config, one, two = balanced(model_type), ((7, 3, 5),), ((7, 3, 5), (4, 6))
    layouts = [
        LanguageLayout(recompute="full", lanes=(*two, ())),
        LanguageLayout(tp=2, pp=2, ep=2, etp=2, lanes=two),
    ]
    if model_type != "jamba":  # which reads all rows of a sample one after the other
        layouts += [LanguageLayout(cp=2, tp=2, lanes=one), LanguageLayout(cp=2, ep=2, lanes=one)]
    assert_language_layouts(HF_DECODER, layouts, config=config)


def test_all_layers_with_experts_are_announced() -> None:
    """Those of other stages too; nothing where nothing asks for it; loads alone where the coefficient is 0."""
    config = balanced("jamba")
    layers = [index for index in range(config.layers) if index % 2]
    loads = {f"layers.{index}.load": config.experts for index in layers}
    assert HF_DECODER.aux_losses(config) == AuxLossNames(losses=("balance",), counts=loads)
    silent = attrs.evolve(config, values={**config.values, "router_aux_loss_coef": 0.0})
    assert HF_DECODER.aux_losses(silent) == AuxLossNames(counts=loads)
    assert HF_DECODER.aux_losses(small("jamba")) == AuxLossNames()
    assert HF_DECODER.aux_losses(small("llama")) == AuxLossNames()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            lambda: balanced("deepseek_v3"),
            r"values\.output_router_logits: expected false, since transformers .* got true for 'deepseek_v3'",
        ),
        (
            lambda: balanced("jetmoe"),
            r"values\.output_router_logits: expected false, since this model's routers .* got true for 'jetmoe'",
        ),
        (
            lambda: attrs.evolve(
                balanced("mixtral"), values={"output_router_logits": True, "router_aux_loss_coef": -1.0}
            ),
            r"language\.config\.values\.router_aux_loss_coef: expected a finite number of 0 or more, got -1\.0",
        ),
        (
            lambda: small("bamba", z_loss_coefficient=0.1),
            r"config\.values\.z_loss_coefficient: expected 0, since the library's loss on the logits .* got 0\.1",
        ),
    ],
)
def test_a_loss_that_cannot_be_had_is_refused_by_its_key(config: Any, text: str) -> None:
    """Where the library has none, where routers can't be found, and where it isn't one of routers."""
    with pytest.raises(ConfigError, match=text):
        HF_DECODER.build(config(), Stage())

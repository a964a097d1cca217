"""`hf-decoder` against the library's own models, each sample alone, and its layouts against the whole."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from library import compare_gradients, stirred
from safetensors import safe_open
from small_models import is_older, small
from torch import Tensor

from mimo.hooks import ConfigError, PluginError
from mimo.model import Stage, check_module
from mimo.model.runtime import ExpertAxis, LanguageBatch, create_on
from mimo.model.testing import LanguageLayout, assert_language_layouts, assert_language_model_conforms
from mimo.topology import Grid
from mimo_transformers import HF_DECODER, HfDecoderConfig, shrink
from mimo_transformers.family import config_of, is_causal, new_network
from mimo_transformers.model.stage import HfStage
from mimo_transformers.trial.tensor import expert_splits

LENGTHS = (7, 3, 5)
FAMILIES = (
    *("llama", "gemma3_text", "gpt_oss", "qwen3_moe", "cohere2", "granite"),
    *("stablelm", "jamba", "qwen3_next", "lfm3"),
)
"""Of the first row one has windows and scaled embeddings, one sinks, two experts, one parallel layers, one scaled
logits; of the second one passes no keyword arguments to its attention, and the others have a scan, linear attention or
short convolutions in some layers."""


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("stages", [1, 2])
def test_losses_and_every_gradient_are_those_of_the_library_on_each_sample(model_type: str, stages: int) -> None:
    """Packed rows, whole or in stages, learn what the library's model learns of one sample after the other."""
    torch.manual_seed(3)
    config = small(model_type)
    network = stirred(config)
    ids = torch.randint(1, config.vocabulary, (sum(LENGTHS),))
    wanted = torch.stack([_library_loss(network, part) for part in ids.split(list(LENGTHS))]).sum()
    wanted.backward()

    parts = [HfStage(config, Stage(index, stages)) for index in range(stages)]
    labels = torch.cat([torch.cat((part[1:], part.new_tensor([-100]))) for part in ids.split(list(LENGTHS))])
    batch = LanguageBatch.of(ids, labels, torch.cat([torch.arange(n) for n in LENGTHS]), lengths=LENGTHS)
    hidden: Tensor | None = None
    for part in parts:
        part.read(network)
        hidden = part(batch, {}, hidden)
    assert hidden is not None
    found = parts[-1].losses(hidden, labels).sum()
    found.backward()

    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    compare_gradients(
        parts, network, {name: one.grad for name, one in network.named_parameters(remove_duplicate=False)}
    )


def _library_loss(network: Any, ids: Tensor) -> Tensor:
    logits = network(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")


@pytest.mark.newest
@pytest.mark.parametrize(
    "model_type",
    [
        *("deepseek_v3", "gpt_oss"),
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("phi3", "gemma3_text", "olmo2", "qwen3_moe")),
    ],
)
def test_layouts_compute_what_the_whole_does(model_type: str) -> None:
    """Stages, context ranks, tensor and expert ranks and ragged lanes, one of them empty, agree with one process.

    Of these one norms each head, one all heads together, one has fused products, one latent attention, and the last
    biases of experts.
    """
    config, one, two = small(model_type), ((7, 3, 5),), ((7, 3, 5), (4, 6))
    layouts = [
        LanguageLayout(pp=2, tp=2, lanes=one),
        LanguageLayout(pp=3, lanes=one),
        LanguageLayout(cp=2, tp=2, lanes=one),
        LanguageLayout(lanes=(*two, ())),
    ]
    if config.experts:
        layouts += [
            LanguageLayout(ep=2, lanes=two),
            LanguageLayout(etp=2, lanes=((7, 3, 5), ())),
            LanguageLayout(tp=2, pp=2, ep=2, etp=2, lanes=two),
        ]
    assert_language_layouts(HF_DECODER, layouts, config=config)


@pytest.mark.newest
@pytest.mark.parametrize("model_type", ["gemma3_text", pytest.param("cohere2", marks=pytest.mark.soak)])
def test_tensor_ranks_share_heads_of_keys_that_are_fewer(model_type: str) -> None:
    """Also where a rank's queries look at several of them, unequally many at each."""
    config = small(model_type, hidden_size=48, num_attention_heads=12, num_key_value_heads=3)
    layouts = [LanguageLayout(tp=2, pp=2, lanes=((7, 3, 5), (4, 6))), LanguageLayout(tp=4, lanes=((7, 3, 5),))]
    assert_language_layouts(HF_DECODER, layouts, config=config)


def test_it_keeps_the_promises_of_a_language_model() -> None:
    """The conformance kit finds names, initial values, caches, empty microbatches and deferred gradients in order."""
    assert_language_model_conforms(HF_DECODER, config=small("olmo2"))


def test_a_model_of_one_layer_is_tried_without_stages() -> None:
    """There is nothing to cut."""
    module = HF_DECODER.build(small("llama", num_hidden_layers=1), Stage())
    assert isinstance(module, HfStage)
    assert module.span == range(1)


def test_a_tensor_plan_that_is_not_right_is_refused_with_what_differs() -> None:
    """DiffLlama's heads work in pairs that lie apart, so that no plan cuts between them."""
    grid = Grid(name="language", ranks=range(2), tp=2)
    expected = r"modules.language.tp: expected 1, since no tensor plan .* got more for 'diffllama', of which the loss"
    with pytest.raises(ConfigError, match=expected):
        check_module(HF_DECODER, small("diffllama"), grid=grid)
    with pytest.raises(ConfigError, match=r"language.tp: expected a divisor of values.num_attention_heads = 3, got 2"):
        check_module(
            HF_DECODER, small("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=1), grid=grid
        )


def test_experts_of_a_form_of_their_own_stay_together() -> None:
    """JetMoe's are no experts as other families have them."""
    module = HfStage(small("jetmoe"), Stage())
    with pytest.raises(ConfigError, match=r"language\.ep: expected 1, since the experts .* got 2 and 'jetmoe'"):
        expert_splits(module, ExpertAxis(ep=2))


def test_what_no_layout_can_keep_is_refused_by_its_key() -> None:
    """Stretching by the longest sample, too many layers, and an unknown vocabulary."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match=r"values\.rope_parameters: .* got rope_type = 'dynamic', which depends on"):
        HF_DECODER.build(small("llama", rope_parameters=rope), Stage())
    with pytest.raises(ConfigError, match=r"values\.num_hidden_layers: expected at most 1"):
        HF_DECODER.layers(HfDecoderConfig(model_type="gpt_neox", values={"num_hidden_layers": 2**40}))
    with pytest.raises(ConfigError, match=r"config\.vocabulary: expected a number of ids, or a tokenizer"):
        HF_DECODER.build(HfDecoderConfig(model_type="llama"), Stage())


def test_the_families_and_settings_of_the_readme_can_be_trained() -> None:
    """The page's settings build, and some of the families that it lists for this library pass their trial."""
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    shown = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])["modules"]["language"]["config"]
    HF_DECODER.build(HfDecoderConfig(vocabulary=29, **shown), Stage(1, 2))
    listed = page.partition("gives them:\n\n")[2].partition(" (transformers")[0].replace("\n", " ").split(", ")
    assert len(listed) > 60
    known = [model_type for model_type in listed if model_type in transformers.CONFIG_MAPPING]
    assert known == listed or is_older("5.23")  # the page is of this one
    for model_type in known[::9]:
        HF_DECODER.build(small(model_type), Stage())


def test_a_key_that_is_misspelt_or_said_elsewhere_is_refused() -> None:
    """The library would take it over, and nothing would follow from it."""
    for values, text in (
        ({"hiden_size": 64}, r"values\.hiden_size: expected a key of 'llama', .* Did you mean 'hidden_size'\?"),
        ({"vocab_size": 64}, r"values\.vocab_size: expected nothing, as vocabulary says it, got 64"),
        ({"dtype": "bfloat16"}, r"values\.dtype: expected nothing, as run\.precision says it"),
        ({"num_hidden_layers": 0}, r"values\.num_hidden_layers: expected 1 or more, got 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            HF_DECODER.layers(HfDecoderConfig(model_type="llama", values=values))
    with pytest.raises(ConfigError, match=r"config\.null: expected hidden_size to be a table"):
        HF_DECODER.layers(HfDecoderConfig(model_type="llama", values={"hidden_size": 8}, null=("hidden_size.x",)))


def test_a_small_model_that_is_large_is_refused() -> None:
    """Some keys make any model of their kind large; nothing of it is then allocated."""
    with pytest.raises(ConfigError, match=r"a small model has at most 100,000,000 parameters, got"):
        HF_DECODER.build(small("opt", max_position_embeddings=10**8), Stage())


def test_attention_that_is_called_twice_in_a_layer_has_two_caches() -> None:
    """DiffLlama's is; a sample that is read in pieces has the rows of the whole."""
    assert_language_model_conforms(HF_DECODER, config=small("diffllama"), checks=["decode cache"])


def test_an_unknown_model_type_is_refused_with_the_closest() -> None:
    """A misspelt family is named, and so is a known one that is no language model."""
    with pytest.raises(ConfigError, match=r"got 'llamma'\. Did you mean 'llama'\?"):
        HF_DECODER.layers(HfDecoderConfig(model_type="llamma"))
    with pytest.raises(ConfigError, match="a class for causal language modelling, got 'siglip_vision_model'"):
        new_network(config_of("siglip_vision_model", {}))


def test_texts_of_composed_models_get_a_head() -> None:
    """Text models of which the library has no class with a head; what else becomes of logits is refused by its key."""
    assert all(map(is_causal, ("glm4v_moe_text", "qwen2_vl_text")))
    assert is_causal("paddleocr_vl_text") or is_older("5.23")  # where its class says that it takes the whole's config
    assert not any(map(is_causal, ("clip_text_model", "siglip_text_model", "paddleocr_vl", "t5gemma")))
    values = shrink(config_of("glm4v_moe_text", {}))
    network = new_network(config_of("glm4v_moe_text", values), attention="eager")
    assert type(network).__name__ == "Glm4vMoeTextModel"
    capped = config_of("glm4v_moe_text", {**values, "final_logit_softcapping": 30.0})
    with pytest.raises(ConfigError) as refused:
        new_network(capped)
    assert str(refused.value) == (
        "modules.language.config.values.final_logit_softcapping: expected None, as the library has no class of "
        "'glm4v_moe_text' that makes logits by it, got 30.0."
    )


def test_a_mixture_inside_a_composed_model_is_written_as_there(tmp_path: Path) -> None:
    """Experts one by one, as GLM-4.5V writes them, though its text model alone would be written whole."""
    small_one = config_of("glm4v_moe_text", shrink(config_of("glm4v_moe_text", {})))
    new_network(small_one, attention="eager").save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.1.mlp.experts.0.gate_proj.weight" in file.keys()  # noqa: SIM118 - no mapping


def test_attention_outside_of_layers_is_refused() -> None:
    """Attention that runs beside the layers, of whose rows nothing is known."""
    from mimo_transformers.model.attention import packed_attention

    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(PluginError, match=r"expected attention inside of layers alone, .* from Identity"):
        packed_attention(torch.nn.Identity(), x, x, x)


def test_initial_values_need_no_storage() -> None:
    """A large model is built on the meta device, with the values of its rotary positions alone."""
    with create_on("meta"):
        stage = HfStage(small("gemma3_text"), Stage())
    assert all(parameter.is_meta for parameter in stage.parameters())
    assert not any(buffer.is_meta for buffer in stage.buffers())

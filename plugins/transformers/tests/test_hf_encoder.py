"""`hf-encoder` against the library's own towers, and its layouts against the whole."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_models import is_older, known
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from mimo.hooks import ConfigError
from mimo.model import ProjectorConfig, check_module
from mimo.model.testing import ModuleLayout, assert_conforms, assert_layouts
from mimo.topology import Grid
from mimo_transformers import HF_ENCODER, HfEncoderConfig
from mimo_transformers.family import config_of, is_tower, new_tower, quiet
from mimo_transformers.model.small import thin_values

IMAGES = [Image.effect_noise(size, 80).convert("RGB") for size in ((40, 30), (12, 50), (64, 64))]


def small(model_type: str, **settings: Any) -> HfEncoderConfig:
    """Return the config of a thin tower with three layers."""
    library = config_of(known(model_type), {})
    return HfEncoderConfig(model_type=model_type, values={**thin_values(library), "num_hidden_layers": 3}, **settings)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        pytest.param("siglip_vision_model", {}, marks=pytest.mark.soak),
        ("clip_vision_model", {"feature_layer": -2, "class_tokens": 1}),
        pytest.param("dinov2", {"projector": ProjectorConfig(shuffle=2)}, marks=pytest.mark.newest),
    ],
)
def test_it_keeps_the_promises_of_an_encoder(model_type: str, settings: dict[str, Any]) -> None:
    """The conformance kit finds rows, empty batches, initial values, tensor ranks and the seam in order."""
    assert_conforms(HF_ENCODER, IMAGES, config=small(model_type, **settings))


@pytest.mark.newest
@pytest.mark.parametrize("model_type", [pytest.param("vit", marks=pytest.mark.soak), "internvl_vision"])
def test_layouts_compute_what_the_whole_does(model_type: str) -> None:
    """Tensor ranks and recomputation, with and without images."""
    layouts = [ModuleLayout(tp=2), ModuleLayout(recompute="full")]
    assert_layouts(HF_ENCODER, [IMAGES, IMAGES[:1], []], layouts, config=small(model_type))


def test_rows_are_those_of_the_library_on_each_image() -> None:
    """Of the layer that is asked for, without the class token."""
    config = small("clip_vision_model", feature_layer=-2, projector=ProjectorConfig(kind="linear", bias=False))
    encoder: Any = HF_ENCODER.build(config, 5)
    with quiet(), torch.no_grad():
        network = new_tower(config.library()).eval()
        encoder.read(network)
        items = [HF_ENCODER.prepare(config, image) for image in IMAGES]
        found = encoder(items)
        each = [network(item["pixels"].unsqueeze(0), output_hidden_states=True).hidden_states[-2] for item in items]
        wanted = torch.cat([rows[0, 1:] for rows in each]) @ encoder.projector.linear.weight.T
    assert len(found) == sum(HF_ENCODER.rows(config, image.size) for image in IMAGES)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_kernel_that_writes_down_all_scores_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a tower's attention, one a layer, is first offered to the two kernels that don't."""
    attention, orders = functional.scaled_dot_product_attention, list[list[SDPBackend]]()

    def noted(*rows: Any, **how: Any) -> torch.Tensor:
        orders.append(_cur_sdpa_kernel_backends(with_priority=True))
        return attention(*rows, **how)

    config = small("clip_vision_model")
    encoder = HF_ENCODER.build(config, 5)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    encoder([HF_ENCODER.prepare(config, image) for image in IMAGES])
    assert len(orders) == 3
    known_kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    assert all([one for one in order if one in known_kernels] == known_kernels for order in orders)


def test_what_nothing_depends_on_is_not_trained() -> None:
    """A head for a task, and with an earlier layer all that lies behind it."""
    encoder = HF_ENCODER.build(small("siglip_vision_model", feature_layer=-2), 8)
    still = {path for path, parameter in encoder.named_parameters() if not parameter.requires_grad}
    prefixes = {".".join(path.split(".")[1:4]) for path in still}
    assert "encoder.encoder.layers.2.mlp.fc1.weight" in still
    assert "encoder.encoder.layers.1.mlp.fc1.weight" not in still
    assert prefixes == {"encoder.layers.2", "head.attention.in_proj_weight", "head.attention.in_proj_bias"} | {
        prefix for prefix in prefixes if prefix.startswith(("head.", "post_layernorm."))
    }


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("resnet", "got 'resnet' with rows of a thin one that differ by .* in a batch of images"),
        ("dinov3_vit", "got 'dinov3_vit' with a thin one draws random numbers while it trains"),
        ("yolos", "got 'yolos' with rows that don't end with those of its patches"),
        ("vivit", "got 'vivit' with a forward that fails with ValueError"),
        ("siglip2_vision_model", "got 'siglip2_vision_model' with a forward that fails with TypeError"),
    ],
)
def test_what_cannot_be_an_encoder_is_refused(model_type: str, text: str) -> None:
    """Norms over a batch, chance, detections behind patches, videos, and masks that nobody gives."""
    with pytest.raises(ConfigError, match=text):
        HF_ENCODER.build(HfEncoderConfig(model_type=known(model_type)), 8)


def test_a_tower_that_no_plan_cuts_has_no_tensor_ranks() -> None:
    """PoolFormer is made of convolutions."""
    grid = Grid(name="vision", ranks=range(2), tp=2)
    with pytest.raises(ConfigError, match=r"modules.vision.tp: expected 1, .* more for 'poolformer', of which nothing"):
        check_module(HF_ENCODER, HfEncoderConfig(model_type=known("poolformer")), grid=grid)


def test_what_does_not_go_together_is_refused_by_its_key() -> None:
    """Before anything is built."""
    size = (40, 30)
    with pytest.raises(ConfigError, match=r"config.class_tokens: expected at most 1, as there are, got 2"):
        HF_ENCODER.rows(small("clip_vision_model", class_tokens=2), size)
    with pytest.raises(ConfigError, match=r"config.projector.shuffle: expected a divisor of 3, got 2"):
        HF_ENCODER.rows(small("dinov2", size=42, projector=ProjectorConfig(shuffle=2)), size)
    with pytest.raises(ConfigError, match=r"config.feature_layer: expected one whose rows the tower returns"):
        HF_ENCODER.rows(small("clip_vision_model", feature_layer=-9), size)
    with pytest.raises(ConfigError, match=r"config.mean: expected one number, or one for each of 3 channels"):
        HF_ENCODER.rows(small("clip_vision_model", mean=(0.1, 0.2)), size)
    with pytest.raises(ConfigError, match=r"config.std: expected numbers above 0"):
        small("clip_vision_model", std=(0.0,))
    with pytest.raises(ConfigError, match=r"config.feature_layer: expected -1 or less"):
        small("clip_vision_model", feature_layer=0)
    with pytest.raises(ConfigError, match=r"config.values.num_hidden_layers: expected at most 1024"):
        HF_ENCODER.rows(HfEncoderConfig(model_type="vit", values={"num_hidden_layers": 2**30}), size)
    with pytest.raises(ConfigError, match=r"config.values.image_size: expected at most"):
        _ = HfEncoderConfig(model_type="vit", values={"image_size": 2**30}).side


def test_the_towers_and_settings_of_the_readme_can_be_trained() -> None:
    """The page's settings build, and some of the towers that it lists for this library pass their trial."""
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").partition("## Vision towers")[2]
    shown = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])["modules"]["vision"]["config"]
    HF_ENCODER.build(HfEncoderConfig(**{**shown, "projector": ProjectorConfig(**shown["projector"])}), 8)
    listed = page.partition("gives them:\n\n")[2].partition("\n(5.23)")[0].replace("\n", " ").split(", ")
    assert len(listed) >= 29
    if not is_older("5.23"):  # of which the page is
        assert all(map(is_tower, listed))
        for model_type in listed[3::9]:
            HF_ENCODER.build(small(model_type), 8)

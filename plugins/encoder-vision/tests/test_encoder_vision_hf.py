"""The published families against `transformers`: rows, every gradient, and weights both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mimo.hooks import CheckpointError, ConfigError
from mimo.model import EncoderSpec, HfFamily, ProjectorConfig
from mimo.model.runtime import read_hf, write_hf
from mimo.testing.comparison import check_gradients, check_rows, draw, put_gradients
from mimo_encoder_vision import CLIP, SIGLIP, VisionConfig

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 4,
}
SQUARE = ((12, 12), (12, 12))
MIXED = ((8, 20), (12, 12), (16, 4), (24, 28), (4, 4))
OURS = ProjectorConfig(kind="linear", bias=False)  # as wide as the rows, with ones on its diagonal


@attrs.frozen(kw_only=True)
class Case:
    """A published model, how ours is set, and images of which sizes."""

    spec: EncoderSpec
    family: HfFamily
    published: Any
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    sizes: Sequence[tuple[int, int]] = SQUARE
    layer: int = -1


SIGLIP_1, SIGLIP_2 = SIGLIP.hf
CLIP_1 = CLIP.hf[0]
KINDS: dict[str, Any] = {
    "siglip_vision_model": SiglipVisionModel,
    "siglip2_vision_model": Siglip2VisionModel,
    "clip_vision_model": CLIPVisionModel,
}
CASES = {
    "siglip": Case(spec=SIGLIP, family=SIGLIP_1, published=SiglipVisionConfig(**SMALL, image_size=12)),
    "siglip, pixels left over": Case(
        spec=SIGLIP, family=SIGLIP_1, published=SiglipVisionConfig(**SMALL, image_size=14), sizes=((14, 14),)
    ),
    "siglip, other sizes": Case(
        spec=SIGLIP,
        family=SIGLIP_1,
        published=SiglipVisionConfig(**SMALL, image_size=12, hidden_act="gelu"),
        settings={"mode": "native"},
        sizes=MIXED,
    ),
    "siglip 2": Case(spec=SIGLIP, family=SIGLIP_2, published=Siglip2VisionConfig(**SMALL, num_patches=16), sizes=MIXED),
    "clip": Case(
        spec=CLIP,
        family=CLIP_1,
        published=CLIPVisionConfig(**SMALL, image_size=12),
        settings={"keep_class_token": True, "final_norm": False},
    ),
    "clip, the layer before the last": Case(
        spec=CLIP,
        family=CLIP_1,
        published=CLIPVisionConfig(**SMALL, image_size=12),
        settings={"feature_layer": -2, "final_norm": False},
        layer=-2,
    ),
    "clip, other sizes": Case(
        spec=CLIP,
        family=CLIP_1,
        published=CLIPVisionConfig(**SMALL, image_size=12, layer_norm_eps=1e-3),
        settings={"mode": "native", "final_norm": False},
        sizes=MIXED,
    ),
}


def _theirs(case: Case) -> Any:
    model = KINDS[case.family.model_type](case.published).eval()
    draw(model.parameters())
    return model


def _ours(case: Case) -> tuple[VisionConfig, Any]:
    found = {**case.family.settings(case.published.to_dict()), **case.settings, "projector": OURS}
    config = case.spec.config(**found)
    module: Any = case.spec.build(config, config.width)
    draw(module.parameters(), seed=2)
    with torch.no_grad():
        module.projector.linear.weight.copy_(torch.eye(config.width))
    return config, module


def _images(sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 3, *size, generator=generator) for size in sizes]


def _run_theirs(case: Case, model: Any, images: Sequence[Tensor]) -> Tensor:
    """Return the rows that ours should give, image by image."""
    if case.family is SIGLIP_2:
        grids = [(image.shape[2] // 4, image.shape[3] // 4) for image in images]
        most = max(down * across for down, across in grids)
        pixels, mask = torch.randn(len(images), most, 48), torch.zeros(len(images), most, dtype=torch.long)
        for index, image in enumerate(images):
            patches = image[0].unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 3, 4, 0).reshape(-1, 48)
            pixels[index, : len(patches)], mask[index, : len(patches)] = patches, 1
        out = model(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=torch.tensor(grids))
        return torch.cat([rows[: down * across] for rows, (down, across) in zip(out[0], grids, strict=True)])
    rows = []
    for image in images:
        out = model(image, output_hidden_states=True, interpolate_pos_encoding=case.sizes is MIXED)
        found = out.last_hidden_state if case.family is SIGLIP_1 else out.hidden_states[case.layer]
        dropped = case.family is CLIP_1 and not case.settings.get("keep_class_token")
        rows.append(found[0, int(dropped) :])
    return torch.cat(rows)


def _check_rows_and_gradients(_rank: int, name: str) -> None:
    case = CASES[name]
    theirs, (config, ours) = _theirs(case), _ours(case)
    left = read_hf(ours, case.family, config, theirs.state_dict())
    assert left == ("projector.linear.weight",)
    images = _images(case.sizes)
    wanted = _run_theirs(case, theirs, images)
    found = ours([{"pixels": image} for image in images])
    check_rows(found, wanted)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
    wanted.backward(gradient)
    found.backward(gradient)
    idle = [f"layers.{index}.*" for index in range(config.depth, config.layers)]
    idle += [] if config.final_norm else ["norm.*"]
    for path, parameter in ours.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, path
    for model in (ours, theirs):
        put_gradients(model.parameters())
    expected = case.spec.build(config, config.width)
    read_hf(expected, case.family, config, theirs.state_dict())
    of_ours, of_theirs = (
        {path: value for path, value in module.named_parameters() if not path.startswith("projector")}
        for module in (ours, expected)
    )
    check_gradients(of_ours, of_theirs, idle=idle)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_published_model(run_ranks: Callable[..., list[Any]], name: str) -> None:
    """Rows to 1e-4 of their length, and each gradient to 1e-4 of its own."""
    run_ranks(1, _check_rows_and_gradients, name)


def _check_both_ways(_rank: int) -> None:
    for case in CASES.values():
        theirs, (config, ours) = _theirs(case), _ours(case)
        published = dict(theirs.state_dict())
        read_hf(
            ours, case.family, config, {f"vision_tower.vision_model.{name}": one for name, one in published.items()}
        )
        written = write_hf(ours, case.family, config)
        assert {name for name in published if name not in written} == {name for name in published if "head." in name}
        assert all(torch.equal(published[name], one) for name, one in written.items())
        _, again = _ours(case)
        read_hf(again, case.family, config, written)
        pairs = zip(ours.named_parameters(), again.parameters(), strict=True)
        assert all(torch.equal(one, other) for (path, one), other in pairs if "projector" not in path)
        described = type(case.published)(**case.family.describe(config))
        assert case.family.settings(described.to_dict()) == case.family.settings(case.published.to_dict())


def test_weights_go_both_ways(run_ranks: Callable[..., list[Any]]) -> None:
    """What is written is what was read, bit for bit, its description too; a tower in a composed model is found."""
    run_ranks(1, _check_both_ways)


def _check_refused(_rank: int) -> None:
    case = CASES["siglip"]
    config, ours = _ours(case)
    tensors = dict(_theirs(case).state_dict())
    tensors["embeddings.position_embedding.weight"] = torch.zeros(16, 24)
    tensors["embeddings.more"] = tensors.pop("post_layernorm.bias")
    with pytest.raises(CheckpointError) as caught:
        read_hf(ours, case.family, config, tensors)
    for message in (
        "post_layernorm.bias is missing",
        r"embeddings.position_embedding.weight has the shape [16, 24], not [9, 24]",
        "embeddings.more is read by nothing",
    ):
        assert message in str(caught.value)


def test_other_weights_are_refused(run_ranks: Callable[..., list[Any]]) -> None:
    """What is missing, of another shape, or unknown is named."""
    run_ranks(1, _check_refused)


@pytest.mark.parametrize(
    ("family", "published", "message"),
    [
        (SIGLIP_1, {"hidden_act": "tanh"}, r"config\.json: hidden_act: expected one of gelu, .*, got 'tanh'"),
        (
            SIGLIP_1,
            {"patch_size": [4, 8]},
            r"config\.json: patch_size: expected one number for both sides, got \[4, 8\]",
        ),
        (CLIP_1, {"image_size": [4, 8]}, r"config\.json: image_size: expected one number for both sides"),
        (
            CLIP_1,
            {"attention_dropout": 0.1},
            r"config\.json: attention_dropout: expected 0\.0, as ours drops nothing of that kind at random, got 0\.1",
        ),
        (SIGLIP_2, {"num_patches": 200}, r"config\.json: num_patches: expected a square number, got 200"),
    ],
)
def test_refused_configurations(family: HfFamily, published: dict[str, Any], message: str) -> None:
    """A key of ``config.json`` that ours can't follow is named."""
    with pytest.raises(ConfigError, match=message):
        family.settings(published)


def test_keys_left_out_mean_the_published_defaults() -> None:
    """Old files hold only what differs from the first model of the family."""
    found = SIGLIP.config(**SIGLIP_1.settings({}))
    assert (found.width, found.layers, found.patch, found.size, found.places) == (768, 12, 16, 224, 14)
    found = CLIP.config(**CLIP_1.settings({}))
    assert (found.patch, found.activation, found.eps, found.places) == (32, "quick_gelu", 1e-5, 7)
    found = SIGLIP.config(**SIGLIP_2.settings({"num_patches": 256}))
    assert (found.mode, found.enlarge, found.max_patches, found.places) == ("native", True, 256, 16)
    with pytest.raises(ConfigError, match=r"config\.activation: expected one of .*'gelu', got 'squared_relu'"):
        SIGLIP_1.describe(SIGLIP.config(activation="squared_relu"))

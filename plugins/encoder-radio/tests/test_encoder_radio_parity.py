"""The encoder against `transformers`' RadioModel, and against the tower and projector of Nemotron 3 Nano Omni."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import RadioConfig as TheirConfig
from transformers import RadioModel
from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3
from transformers.models.radio.modeling_radio import RadioDropPath

from mimo.hooks import CheckpointError, ConfigError
from mimo.model import ProjectorConfig
from mimo.model.runtime import (
    DrawKeys,
    Drawn,
    attach_draws,
    item_keys,
    read_hf,
    step_key,
    write_hf,
)
from mimo.testing.comparison import check_gradients, check_rows, draw, put_gradients, saved, tensors_of
from mimo_encoder_radio import RADIO, RadioConfig

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "mlp_ratio": 2.3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-3,
    "patch_size": 4,
    "max_img_size": 40,
    "num_cls_tokens": 2,
    "num_registers": 3,
    "norm_mean": [0.4, 0.5, 0.6],
    "norm_std": [0.2, 0.3, 0.4],
}
PREFIX = 5
GRIDS = ((3, 5), (1, 1), (12, 4), (3, 14))
(FAMILY,) = RADIO.hf


def _drawn(model: Any) -> Any:
    """Draw all weights anew, but for scales that are always one."""
    draw((value for name, value in model.named_parameters() if "lambda1" not in name), seed=3)
    return model.eval()


def _their(**changes: Any) -> Any:
    return _drawn(RadioModel(TheirConfig(**{**SMALL, **changes, "attn_implementation": "eager"})))


def _ours(folder: Path, **changes: Any) -> tuple[nn.Module, RadioConfig]:
    """Return the encoder of a folder; its projector changes nothing, and lets through all rows."""
    settings = FAMILY.settings(json.loads((folder / "config.json").read_text()))
    config = RadioConfig(**{**settings, "projector": ProjectorConfig(kind="linear"), **changes})
    module = RADIO.build(config, config.width)
    assert read_hf(module, FAMILY, config, tensors_of(folder))
    if config.projector.kind == "linear":
        weights = dict(module.named_parameters())
        nn.init.eye_(weights["projector.linear.weight"])
        nn.init.zeros_(weights["projector.linear.bias"])
    return module, config


def _pixels(grids: Sequence[tuple[int, int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.rand(3, 4 * down, 4 * across, generator=generator) for down, across in grids]


def _items(pixels: Sequence[Tensor], config: RadioConfig) -> list[dict[str, Tensor]]:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (config.mean, config.std))
    return [{"pixels": ((each - mean) / std)[None]} for each in pixels]


def _packed(pixels: Sequence[Tensor]) -> Tensor:
    """Return the patches of images as their packed form wants them."""
    pieces = [each.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1) for each in pixels]
    return torch.cat(pieces)


def _check_gradients(module: nn.Module, model: Any, config: RadioConfig, folder: Path) -> None:
    """Compare gradients through the same table as weights: theirs are saved as if they were weights."""
    put_gradients(value for name, value in model.named_parameters() if "lambda1" not in name)
    wanted = RADIO.build(config, config.width)
    read_hf(wanted, FAMILY, config, saved(model, folder))
    put_gradients(module.parameters())
    found, expected = (
        {name: value for name, value in one.named_parameters() if not name.startswith("projector")}
        for one in (module, wanted)
    )
    check_gradients(found, expected)


def _check_packed(_rank: int, folder: Path) -> None:
    model = _their()
    saved(model, folder)
    pixels = _pixels(GRIDS)
    output = model(_packed(pixels), image_grid_hw=torch.tensor(GRIDS))
    module, config = _ours(folder)
    rows = module(_items(pixels, config))
    check_rows(rows, output.features)
    gradient = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    rows.backward(gradient)
    output.features.backward(gradient)
    _check_gradients(module, model, config, folder)
    module, config = _ours(folder, keep=tuple(range(PREFIX)))
    check_rows(
        module(_items(pixels, config)), model(_packed(pixels), image_grid_hw=torch.tensor(GRIDS)).last_hidden_state
    )


def test_packed_images_have_their_features_and_gradients(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Images of many aspect ratios at once, larger and smaller than the table of positions; class tokens too."""
    run_ranks(1, _check_packed, tmp_path)


def _check_dense(_rank: int, folder: Path) -> None:
    for activation, grid in (("gelu", (6, 3)), ("quick_gelu", (2, 11)), ("relu2", (10, 10))):
        model = _their(hidden_act=activation)
        saved(model, folder)
        pixels = _pixels([grid] * 3)
        output = model(torch.stack(pixels))
        module, config = _ours(folder, keep=(0, 1))
        rows = module(_items(pixels, config)).unflatten(0, (3, -1))
        check_rows(rows[:, 2:], output.features)
        check_rows(rows[:, :2].flatten(1), output.summary)
        gradient = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
        rows.backward(gradient)
        torch.autograd.backward((output.features, output.summary), (gradient[:, 2:], gradient[:, :2].flatten(1)))
        _check_gradients(module, model, config, folder)


def test_images_of_one_size_have_theirs(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """As a batch, with its summary in the class tokens that are kept."""
    run_ranks(1, _check_dense, tmp_path)


def _check_paths(_rank: int, folder: Path) -> None:
    model = _their(drop_path_rate=0.4, hidden_dropout_prob=0.9).train()
    saved(model, folder)
    pixels = _pixels([(6, 3)] * 3)
    module, config = _ours(folder)
    assert (config.drop_path, FAMILY.describe(config)["drop_path_rate"]) == (0.4, 0.4)
    keys = DrawKeys(module="vision")
    attach_draws(module, keys, device=torch.device("cpu"), draws=lambda _path: True)
    drawn = Drawn(items=item_keys(step_key(1, 1), [4, 4, 9], [0, 1, 0]))
    with keys.at(drawn):
        rows = module(_items(pixels, config)).unflatten(0, (3, -1))
    named = dict(module.named_modules())
    layers = range(config.layers)
    left = [named[f"layers.{layer}.{name}"] for layer in layers for name in ("attention_drop", "mlp_drop")]

    def drop(x: Tensor) -> Tensor:
        with keys.at(drawn), keys.at(keys.parts([1] * 3)), keys.at(keys.stacked(x.device)):
            return cast("Tensor", left.pop(0)(x))

    for layer in model.modules():
        if isinstance(layer, RadioDropPath):
            layer.forward = drop  # type: ignore[method-assign,assignment]
    output = model(torch.stack(pixels))
    assert not left
    check_rows(rows, output.features)
    gradient = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    rows.backward(gradient)
    output.features.backward(gradient)
    _check_gradients(module, model, config, folder)


def test_paths_are_dropped_where_the_published_encoder_drops_them(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Given our masks in the order of its forward; at ``hidden_dropout_prob`` nothing is dropped, by either."""
    run_ranks(1, _check_paths, tmp_path)


def _check_omni(_rank: int, folder: Path) -> None:
    config = NemotronH_Omni_Reasoning_V3_Config(
        vision_config={**SMALL, "model_type": "radio", "video_temporal_patch_size": 2},
        text_config={
            "model_type": "nemotron_h",
            "hidden_size": 16,
            "layers_block_type": ["attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "vocab_size": 32,
        },
        vision_hidden_size=24,
        projector_hidden_size=20,
        audio_config=None,
    )
    model = _drawn(NemotronH_Omni_Reasoning_V3(config))
    files = saved(model, folder)
    grids = ((4, 6), (2, 2), (12, 4))
    pixels = _pixels(grids)
    settings = FAMILY.settings(json.loads((folder / "config.json").read_text())["vision_config"])
    projector = ProjectorConfig(hidden=20, shuffle=2, norm="rms", activation="squared_relu", bias=False)
    ours = RadioConfig(**settings, projector=projector)
    module = RADIO.build(ours, 16)
    tower = {name: value for name, value in files.items() if name.startswith("vision_model.")}
    rest = read_hf(module, FAMILY, ours, tower)
    assert rest == ("projector.norm.weight", "projector.mlp.up.weight", "projector.mlp.down.weight")
    weights = dict(module.named_parameters())
    with torch.no_grad():
        for mine, theirs in zip(rest, ("mlp1.0", "mlp1.1", "mlp1.3"), strict=True):
            weights[mine].copy_(files[f"{theirs}.weight"])
    items = _items(pixels, ours)  # a composed model's tower gets pixels that are normed already
    patches = _packed([item["pixels"][0] for item in items])
    wanted = model.get_image_features(patches, image_grid_hw=torch.tensor(grids)).pooler_output
    check_rows(module(items), torch.cat(wanted))


def test_tower_of_a_composed_model_with_its_projector(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Under its prefix, without a conditioner; shuffled, normed and projected as there."""
    run_ranks(1, _check_omni, tmp_path)


def _check_back(_rank: int, folder: Path) -> None:
    model = _their()
    files = saved(model, folder)
    module, config = _ours(folder)
    written = write_hf(module, FAMILY, config)
    assert {name for name in files if name not in written} == {
        name for name in files if any(each in name for each in ("layer_scale", "input_conditioner", "summary_idxs"))
    }
    assert all(torch.equal(files[name], value) for name, value in written.items())
    described = {**FAMILY.describe(config), "model_type": FAMILY.model_type, "architectures": [FAMILY.architecture]}
    assert FAMILY.settings(described) == FAMILY.settings(json.loads((folder / "config.json").read_text()))
    (folder / "again").mkdir()
    (folder / "again" / "config.json").write_text(json.dumps(described))
    save_file(written, folder / "again" / "model.safetensors", metadata={"format": "pt"})
    pixels, grids = _pixels(GRIDS), torch.tensor(GRIDS)
    again: Any = RadioModel.from_pretrained(folder / "again")
    again.eval()
    check_rows(
        again(_packed(pixels), image_grid_hw=grids).features, model(_packed(pixels), image_grid_hw=grids).features
    )


def test_what_is_written_is_what_was_read(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Bitwise, and `transformers` makes the same model of it."""
    run_ranks(1, _check_back, tmp_path)


def _check_left_out(_rank: int, folder: Path) -> None:
    files = saved(_their(), folder)
    module, config = _ours(folder)
    root = "radio_model"
    changes: Mapping[str, tuple[Tensor, str]] = {
        f"{root}.model.blocks.1.layer_scale2.lambda1": (torch.full((24,), 0.9), r"lambda1 is not \[1.0\]"),
        f"{root}.input_conditioner.norm_mean": (torch.zeros(3, 1, 1), r"norm_mean is not \[0.4, 0.5, 0.6\]"),
        f"{root}.input_conditioner.norm_std": (torch.ones(3, 1, 1), r"norm_std is not \[0.2, 0.3, 0.4\]"),
        f"{root}.model.norm.weight": (torch.ones(24), "radio_model.model.norm.weight is read by nothing"),
    }
    for name, (value, message) in changes.items():
        with pytest.raises(CheckpointError, match=message):
            read_hf(module, FAMILY, config, {**files, name: value})
    bare = {name: value for name, value in files.items() if ".layer_scale" not in name}
    read_hf(module, FAMILY, config, {name: value.bfloat16() for name, value in bare.items()})


def test_nothing_that_counts_is_left_out(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Layer scales other than one and another conditioner are refused by name; published folders lack the former."""
    run_ranks(1, _check_left_out, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_swiglu_ffn", True, r"config\.json: use_swiglu_ffn: expected False, as ours knows no other, got True"),
        ("qkv_bias", False, r"config\.json: qkv_bias: expected True, as ours knows no other, got False"),
        ("layerscale_value", 0.1, r"config\.json: layerscale_value: expected 1\.0, as ours knows no other, got 0\.1"),
        ("attention_probs_dropout_prob", 0.2, r"config\.json: attention_probs_dropout_prob: expected 0\.0"),
        ("hidden_act", "mish", r"config\.json: hidden_act: expected one of gelu, .*, got 'mish'"),
    ],
)
def test_models_that_it_cannot_be(key: str, value: Any, message: str) -> None:
    """Each key of a config.json that asks for something else is named."""
    with pytest.raises(ConfigError, match=message):
        FAMILY.settings({**SMALL, key: value})


def test_any_width_of_the_feed_forward_part_comes_back() -> None:
    """A config.json has it as a ratio, which is rounded down when it is read."""
    for width in (24, 29, 49, 1280):
        for intermediate in (*range(1, 200), 5120, 4304):
            config = RadioConfig(width=width, heads=1, intermediate=intermediate)
            assert FAMILY.settings(FAMILY.describe(config))["intermediate"] == intermediate
    config = RadioConfig()
    assert attrs.evolve(config, **FAMILY.settings({})) == config

"""The encoder against the published one, built small and random: from sound to rows, gradients, and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import gelu, linear
from transformers import WhisperConfig as Published
from transformers import WhisperFeatureExtractor, WhisperForAudioClassification, WhisperForConditionalGeneration
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mimo.hooks import CheckpointError, ConfigError
from mimo.model import ProjectorConfig
from mimo.model.runtime import (
    DrawKeys,
    Drawn,
    Dropout,
    attach_draws,
    item_keys,
    read_hf,
    step_key,
    write_hf,
)
from mimo.testing.comparison import check_gradients, check_rows, draw, put_gradients, saved
from mimo_encoder_audio import WHISPER, WhisperConfig
from mimo_encoder_audio._config import Silence, own_rows

WIDTH, MELS, POSITIONS = 24, 10, 50  # a window of one second
CONFIG = WhisperConfig(
    mels=MELS,
    width=WIDTH,
    layers=3,
    heads=4,
    intermediate=40,
    positions=POSITIONS,
    projector=ProjectorConfig(kind="linear", bias=False),
)
PUBLISHED: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "num_mel_bins": MELS,
    "max_source_positions": POSITIONS,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 12,
    "vocab_size": 30,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
(FAMILY,) = WHISPER.hf


def _published(**more: Any) -> WhisperEncoder:
    torch.manual_seed(0)
    encoder = WhisperEncoder(Published(**PUBLISHED, **more))
    encoder.config._attn_implementation = "eager"
    encoder.eval()
    draw(encoder.parameters(), seed=3)
    return encoder


def _ours(encoder: WhisperEncoder, silence: Silence) -> tuple[WhisperConfig, nn.Module]:
    """Return ours with the same weights, and a projector that changes nothing."""
    config = WhisperConfig(
        **{**FAMILY.settings(encoder.config.to_dict()), "silence": silence, "projector": CONFIG.projector}
    )
    module = WHISPER.build(config, WIDTH)
    assert read_hf(module, FAMILY, config, encoder.state_dict()) == ("projector.linear.weight",)
    with torch.no_grad():
        module.get_parameter("projector.linear.weight").copy_(torch.eye(WIDTH))
    return config, module


def _clips() -> list[NDArray[np.float32]]:
    """Return clips from one sample to the whole window; where one ends loudly, its peak is in the last frames."""
    random = np.random.default_rng(5)
    clips = [(random.standard_normal(samples) * 0.1).astype(np.float32) for samples in (1, 1600, 3200, 15_999, 16_000)]
    clips[2][-1] = 1
    return clips


def _heard(encoder: WhisperEncoder, mel: Tensor, rows: int) -> Tensor:
    """Return what the published layers make of one clip where none of its rows sees the silence behind it."""
    hidden = gelu(encoder.conv2(gelu(encoder.conv1(mel)))).transpose(1, 2) + encoder.embed_positions.weight
    mask = torch.zeros(1, 1, POSITIONS, POSITIONS)
    mask[..., rows:] = -torch.inf
    for layer in encoder.layers:
        hidden = layer(hidden, mask)
    normed: Tensor = encoder.layer_norm(hidden)
    return normed[0, :rows]


def _wanted(encoder: WhisperEncoder, clips: list[NDArray[np.float32]], silence: Silence) -> Tensor:
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
    mel = torch.from_numpy(extractor(clips, sampling_rate=16_000, return_tensors="np").input_features)
    rows = [own_rows(CONFIG, (len(clip), 16_000)) for clip in clips]
    if silence == "skip":
        return torch.cat([_heard(encoder, each[None], count) for each, count in zip(mel, rows, strict=True)])
    hidden = encoder(mel).last_hidden_state
    return torch.cat([each if silence == "keep" else each[:count] for each, count in zip(hidden, rows, strict=True)])


@pytest.mark.parametrize("silence", ["skip", "hear", "keep"])
def test_equals_the_published_encoder(silence: Silence) -> None:
    """From sound to rows within 1e-4, and every gradient, whatever becomes of the silence."""
    encoder = _published()
    config, module = _ours(encoder, silence)
    clips = _clips()
    raws = [(clip, 16_000) for clip in clips]
    found = module([WHISPER.prepare(config, raw) for raw in raws], [WHISPER.measure(raw) for raw in raws])
    wanted = _wanted(encoder, clips, silence)
    assert len(found) == sum(WHISPER.rows(config, WHISPER.measure(raw)) for raw in raws)
    check_rows(found, wanted)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    found.backward(gradient)
    wanted.backward(gradient)
    _check_gradients(encoder, config, module)


def test_drops_where_the_published_encoder_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given our masks in the order of its forward, and its rates, the published encoder has our rows and gradients."""
    rates = {"dropout": 0.2, "activation_dropout": 0.3}
    encoder = _published(**rates)
    config, module = _ours(encoder, "keep")
    keys = DrawKeys(module="audio")
    attach_draws(module, keys, device=torch.device("cpu"), draws=lambda _path: True)
    raw = (_clips()[3], 16_000)
    with keys.at(Drawn(items=item_keys(step_key(1, 1), [4], [0]))):
        found = module([WHISPER.prepare(config, raw)], [WHISPER.measure(raw)])
    places = [part for part in module.modules() if isinstance(part, Dropout) and part.site is not None]
    by_name = {path: part for path, part in module.named_modules() if part in places}
    left = [by_name.pop("embedding_drop")]
    for layer in range(config.layers):
        left += [by_name.pop(f"layers.{layer}.{name}") for name in ("attention_dropout", "mlp.drop", "mlp_dropout")]
    assert not by_name

    def drop(x: Tensor, p: float, training: bool) -> Tensor:  # as the library calls it
        assert training
        if not p:  # of weights of attention
            return x
        part = left.pop(0)
        assert part.rate == p
        with (
            keys.at(Drawn(items=item_keys(step_key(1, 1), [4], [0]))),
            keys.at(keys.packed([POSITIONS], device=x.device)),
        ):
            return cast("Tensor", part(x))

    monkeypatch.setattr(nn.functional, "dropout", drop)
    wanted = _wanted(encoder.train(), [raw[0]], "keep")
    assert not left
    check_rows(found, wanted)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    found.backward(gradient)
    wanted.backward(gradient)
    _check_gradients(encoder, config, module)


def _check_gradients(encoder: WhisperEncoder, config: WhisperConfig, module: nn.Module) -> None:
    assert module.get_parameter("positions.weight").grad is None
    put_gradients(module.parameters())
    found = {name.removeprefix("encoder."): tensor for name, tensor in write_hf(module, FAMILY, config).items()}
    put_gradients(encoder.parameters())
    check_gradients(found, dict(encoder.named_parameters()), idle=["embed_positions.weight"])


def test_initial_positions_are_the_published_ones() -> None:
    """A fresh encoder has the table that a fresh published one has."""
    with torch.random.fork_rng():
        fresh = WhisperEncoder(Published(**PUBLISHED))
    found = WHISPER.build(CONFIG, 8).get_parameter("positions.weight")
    assert torch.equal(found, fresh.embed_positions.weight)
    assert not found.requires_grad


@pytest.mark.parametrize("model", [WhisperEncoder, WhisperForAudioClassification, WhisperForConditionalGeneration])
def test_weights_come_and_go_bitwise(model: Any, tmp_path: Path) -> None:
    """From a published folder of any of its models, and into one that `transformers` loads, bit for bit."""
    published = model(Published(**PUBLISHED))
    draw(published.parameters(), seed=3)
    tensors = saved(published, tmp_path)
    settings = FAMILY.settings(json.loads((tmp_path / "config.json").read_text()))
    config = WhisperConfig(**settings)
    module = WHISPER.build(config, 8)
    read_hf(module, FAMILY, config, tensors)
    written = write_hf(module, FAMILY, config)
    encoder = next(part for part in published.modules() if isinstance(part, WhisperEncoder))
    assert {f"encoder.{name}" for name in encoder.state_dict()} == written.keys()
    again = tmp_path / "again"
    again.mkdir()
    described = {"architectures": [FAMILY.architecture], "model_type": FAMILY.model_type, **FAMILY.describe(config)}
    (again / "config.json").write_text(json.dumps(described))
    save_file(written, again / "model.safetensors", metadata={"format": "pt"})
    loaded = WhisperForAudioClassification.from_pretrained(again).encoder
    assert loaded.config.encoder_layers == 3
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_another_size_is_refused() -> None:
    """The refusal of weights of another width has both shapes."""
    config = WhisperConfig(mels=MELS, width=WIDTH, layers=3, heads=4, intermediate=44, positions=POSITIONS)
    with pytest.raises(CheckpointError, match=r"layers\.0\.fc1\.weight has the shape \[40, 24\], not \[44, 24\]"):
        read_hf(WHISPER.build(config, 8), FAMILY, config, _published().state_dict())


@pytest.mark.parametrize(
    ("key", "value"), [("activation_function", "relu"), ("attention_dropout", 0.1), ("encoder_layerdrop", 0.5)]
)
def test_what_ours_cannot_do_is_refused(key: str, value: Any) -> None:
    """A published setting that would change the numbers is named."""
    with pytest.raises(ConfigError, match=rf"config\.json: {key}: expected .*, got {value!r}"):
        FAMILY.settings({**PUBLISHED, key: value})


def test_settings_and_description_are_inverse() -> None:
    """What is written reads back as the same settings, rates of dropout among them."""
    config = attrs.evolve(CONFIG, dropout=0.1, activation_dropout=0.2)
    described = FAMILY.describe(config)
    assert (described["dropout"], described["activation_dropout"], described["attention_dropout"]) == (0.1, 0.2, 0.0)
    assert WhisperConfig(**FAMILY.settings(described), projector=CONFIG.projector) == config
    ours = [key for key in PUBLISHED if key in described and not key.startswith("decoder_")]  # a decoder of no one's
    assert [described[key] for key in ours] == [PUBLISHED[key] for key in ours]
    assert described["decoder_attention_heads"] == CONFIG.heads


def test_neighbours_are_joined_in_order() -> None:
    """With ``stack`` each row that the projector reads is so many rows of 20 ms, one after the other."""
    encoder = _published()
    config, module = _ours(encoder, "keep")
    stacked = WhisperConfig(**{**FAMILY.settings(encoder.config.to_dict()), "silence": "keep", "stack": 5})
    joined = WHISPER.build(stacked, 7)
    read_hf(joined, FAMILY, stacked, encoder.state_dict())
    raws = [(clip, 16_000) for clip in _clips()]
    items, sizes = [WHISPER.prepare(config, raw) for raw in raws], [WHISPER.measure(raw) for raw in raws]
    rows = module(items, sizes).view(-1, 5 * WIDTH)
    up, down = (
        (joined.get_parameter(f"projector.mlp.{name}.weight"), joined.get_parameter(f"projector.mlp.{name}.bias"))
        for name in ("up", "down")
    )
    torch.testing.assert_close(joined(items, sizes), linear(gelu(linear(rows, *up)), *down), rtol=1e-4, atol=1e-5)

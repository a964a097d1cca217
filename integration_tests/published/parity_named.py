"""Parity of families that our own plugins name: ours beside the library's model, which is made of what ours writes.

A family is shrunk by the same rule as those that nobody names. Gradients are compared by our paths: the library's are
saved as if they were weights, and read as a published folder is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from parity import Kind, Outcome, Tensors, outcome_of
from parity_language import Beside
from parity_language import leak as leak_of_samples
from parity_language import measure as measure_language
from parity_towers import ITEMS, Case, Rows
from parity_towers import leak as leak_of_items
from parity_towers import measure as measure_encoder
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from mimo.model import EncoderSpec, HfFamily, LanguageModelSpec, ProjectorConfig, Stage, match_names
from mimo.model.runtime import read_hf, write_hf
from mimo.model.testing import BuiltLanguage, Subject
from mimo.testing.comparison import put_gradients, saved
from mimo_transformers import shrink
from mimo_transformers.family import causal_class, quiet

Spec = LanguageModelSpec | EncoderSpec
_LAYERS, _HEADS, _WIDTH = 4, 4, 24
_MORE: Mapping[str, Mapping[str, Any]] = {
    "siglip2_vision_model": {"num_patches": 16},
    "whisper": {
        **dict.fromkeys(("encoder_layers", "decoder_layers"), _LAYERS),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), _WIDTH),
        "max_source_positions": 50,  # of a second
    },
}
"""Keys that the rule doesn't know, and smaller numbers than it has."""
_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {"depth": 1, "embed_dim": 8, "num_heads": 2, "hidden_size": 32},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 32},
}
"""Whole models as they were published before sections of text: their towers, which their language models lie beside."""
_SETTINGS: Mapping[str, Mapping[str, Any]] = {"whisper": {"silence": "keep"}}  # which the library hears too
_HIDDEN = 8
_RATE = 16_000


def named_outcome(spec: Spec, model_type: str) -> Outcome:
    """Return what is found of a family that a plugin names."""
    family = next(family for family in spec.hf if family.model_type == model_type)
    small = partial(_small, spec, family)
    weights = partial(_weights, spec, family)
    if isinstance(spec, LanguageModelSpec):
        measured = partial(measure_language, spec, partial(_language, spec, family))
        kind = Kind(
            spec=spec,
            small=small,
            measure=measured,
            leak=partial(leak_of_samples, spec),
            weights=weights,
        )
    else:
        case = partial(_case, spec)
        measured = partial(measure_encoder, case, partial(_encoder, family))
        kind = Kind(spec=spec, small=small, measure=measured, leak=partial(leak_of_items, case), weights=weights)
    return outcome_of(kind, model_type)


def _published(model_type: str) -> tuple[Any, dict[str, Any]]:
    """Return a small config of the library, and the ``config.json`` of it that is read here."""
    make = transformers.AutoConfig.for_model
    with quiet():
        if tower := _TOWERS.get(model_type):
            text = make(f"{model_type}_text")
            keys = {**text.to_dict(), **shrink(text), "model_type": model_type}
            keys.pop("architectures", None)
            given = {key: value for key, value in keys.items() if key != "model_type"}
            return make(model_type, **given, vision_config=dict(tower)), keys
        config = make(model_type, **shrink(make(model_type)), **_MORE.get(model_type, {}))
    return config, config.to_dict()


def _small(spec: Spec, family: HfFamily, model_type: str) -> Any:
    _, keys = _published(model_type)
    settings = {**family.settings(keys), **_SETTINGS.get(model_type, {})}
    if isinstance(spec, EncoderSpec):
        settings["projector"] = ProjectorConfig(kind="linear", bias=False)
    return spec.config(**settings)


def _class(family: HfFamily, config: Any) -> Any:
    if family.export_note:  # of which the library has no class with a head
        return causal_class(config)
    return getattr(transformers, family.architecture)


def _network(family: HfFamily, written: Tensors) -> Any:
    """Return the library's model of tensors as ours writes them."""
    config, _ = _published(family.model_type)
    with tempfile.TemporaryDirectory() as folder, quiet():
        config.save_pretrained(folder)
        save_file(dict(written), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        network = _class(family, config).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    network.should_save_on_this_rank = lambda _main: True  # each has a folder of its own
    return network.eval()


def _whole(spec: Spec, config: Any) -> Any:
    """Return the whole plain module, with NaN for each value that is yet to come."""
    module: Any = spec.build(config, Stage()) if isinstance(spec, LanguageModelSpec) else spec.build(config, _HIDDEN)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.fill_(torch.nan)
    return module


def _fill(module: nn.Module, values: Tensors) -> nn.Module:
    held = dict(module.named_parameters())
    with torch.no_grad():
        for path, value in values.items():
            held[path].copy_(value)
    return module


def _theirs(spec: Spec, family: HfFamily, config: Any, network: Any) -> dict[str, Tensor]:
    """Return the gradients of the library's model by our paths, of what trains here; its values are gone then."""
    put_gradients(network.parameters())
    fixed = family.fixed(config)
    tensors = {name: one for name, one in _saved(network).items() if not any(fnmatchcase(name, each) for each in fixed)}
    module = _whole(spec, config)
    read_hf(module, family, config, tensors)
    return {
        path: parameter.detach()
        for path, parameter in module.named_parameters()
        if parameter.requires_grad and not bool(parameter.isnan().all())
    }


def _saved(network: Any) -> dict[str, Tensor]:
    """Return the tensors that the library writes, a tower's beside those of text as they lay before sections."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        return {name.replace("model.visual.", "visual."): one for name, one in saved(network, Path(folder)).items()}


def _language(spec: Spec, family: HfFamily, built: BuiltLanguage, config: Any) -> Beside:
    network = _network(family, write_hf(_fill(_whole(spec, config), built.values()), family, config))
    return Beside(network=network, ours=dict, theirs=partial(_theirs, spec, family, config, network))


def _case(spec: EncoderSpec, config: Any) -> Case:
    """Return an encoder with items of unlike sizes, where it may have such; the last is as large as the second."""
    random = np.random.default_rng(1)
    if spec.modality == "audio":
        raw: list[Any] = [
            ((random.standard_normal(samples) * 0.1).astype(np.float32), _RATE)
            for samples in (1600, 15_999, 3200, 15_999)
        ]
    else:
        sizes = ((48, 64), (64, 64), (80, 32), (64, 64))
        raw = [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    subject = Subject(spec=spec, config=config, hidden=_HIDDEN, raw=raw)
    return Case(subject=subject, items=subject.items(), sizes=subject.sizes())


def _encoder(family: HfFamily, case: Case, values: Tensors) -> Rows:
    spec: Any = case.subject.spec
    config = case.subject.config
    network = _network(family, write_hf(_fill(_whole(spec, config), values), family, config))
    weight = nn.Parameter(values["projector.linear.weight"].clone())
    rows = _ROWS[family.model_type](network, config, case)

    def learnt() -> Tensors:
        assert weight.grad is not None
        return {**_theirs(spec, family, config, network), "projector.linear.weight": weight.grad}

    return Rows(rows=rows @ weight.T, theirs=learnt)


def _of_squares(network: Any, config: Any, case: Case) -> Tensor:
    """Return rows of images of one size, after the last norm."""
    del config
    return torch.cat([network(item["pixels"]).last_hidden_state.flatten(0, 1) for item in case.items[:ITEMS]])


def _of_clip(network: Any, config: Any, case: Case) -> Tensor:
    """Return likewise what CLIP makes of patches; the norm is that of its class token alone there."""
    assert config.final_norm
    assert not config.keep_class_token
    rows = [network(item["pixels"]).last_hidden_state[0, 1:] for item in case.items[:ITEMS]]
    normed: Tensor = network.post_layernorm(torch.cat(rows))
    return normed


def _patches(pixels: Tensor, side: int) -> Tensor:
    """Return the patches [N, side * side * channels] of an image, as SigLIP 2 reads them."""
    return pixels.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1)


def _of_siglip2(network: Any, config: Any, case: Case) -> Tensor:
    rows = []
    for item in case.items[:ITEMS]:
        patches = _patches(item["pixels"][0], config.patch)
        grid = torch.tensor([[length // config.patch for length in item["pixels"].shape[2:]]])
        mask = torch.ones(1, len(patches), dtype=torch.long)
        out = network(pixel_values=patches[None], pixel_attention_mask=mask, spatial_shapes=grid)
        rows.append(out.last_hidden_state[0])
    return torch.cat(rows)


def _of_radio(network: Any, config: Any, case: Case) -> Tensor:
    """Return its features; it scales pixels of 0 .. 1 itself."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (config.mean, config.std))
    return torch.cat([network(item["pixels"] * std + mean).features.flatten(0, 1) for item in case.items[:ITEMS]])


def _of_whisper(network: Any, config: Any, case: Case) -> Tensor:
    seconds = config.positions // 50
    extractor = transformers.WhisperFeatureExtractor(feature_size=config.mels, chunk_length=seconds)
    clips = [clip for clip, _ in case.subject.raw[:ITEMS]]
    mel = extractor(clips, sampling_rate=_RATE, return_tensors="np").input_features
    hidden: Tensor = network.encoder(torch.from_numpy(mel)).last_hidden_state
    return hidden.flatten(0, 1)


_ROWS: Mapping[str, Callable[[Any, Any, Case], Tensor]] = {
    "siglip_vision_model": _of_squares,
    "siglip2_vision_model": _of_siglip2,
    "clip_vision_model": _of_clip,
    "radio": _of_radio,
    "whisper": _of_whisper,
}
"""By family, how the library's model makes rows of the first items."""


def _weights(spec: Spec, family: HfFamily, config: Any) -> int:
    """Have the library write a model, read that, write it again, and return how many tensors ours has of it."""
    torch.manual_seed(5)
    library, _ = _published(family.model_type)
    with quiet():
        network = _class(family, library)(library).float()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lambda1" not in name:  # of RADIO, which is always one
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    theirs = _saved(network)
    module = _whole(spec, config)
    left = [path for path in read_hf(module, family, config, theirs) if not path.startswith("projector.")]
    assert not left, f"parameters that nothing published is read into: {left[:4]}"
    back = write_hf(module, family, config)
    table = family.tensors(config)
    pairs = zip(match_names(family, table, ())[1], match_names(family, table, theirs)[1], strict=True)
    names = {one: other for here, there in pairs for one, other in zip(here.names, there.names, strict=True)}
    changed = [name for name, tensor in back.items() if not torch.equal(theirs[names[name]], tensor)]
    assert not changed, f"other values of {changed[:4]}"
    return len(back)

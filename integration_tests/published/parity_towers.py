"""Parity of vision towers: `hf-encoder` on several images beside the library's tower on each image alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from parity import Difference, Kind, difference_of
from PIL import Image
from torch import Tensor
from torch.nn import functional

from mimo.model.runtime import read_hf, write_hf
from mimo.model.testing import ModuleLayout, Subject
from mimo.testing.comparison import saved
from mimo_transformers import HF_ENCODER, HfEncoderConfig, shrink
from mimo_transformers.family import new_tower, quiet

HIDDEN = 8
LAYOUTS: Mapping[str, ModuleLayout] = {"one process": ModuleLayout(), "tp=2": ModuleLayout(tp=2)}


def small(model_type: str) -> HfEncoderConfig:
    """Return the config of a small tower of a family."""
    with quiet():
        return HfEncoderConfig(model_type=model_type, values=shrink(transformers.AutoConfig.for_model(model_type)))


def _items(config: HfEncoderConfig, count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (config.channels, config.side, config.side)
    return [{"pixels": torch.randn(shape, generator=generator)} for _ in range(count)]


def measure(rank: int, config: HfEncoderConfig, layouts: Sequence[str]) -> dict[str, Difference]:
    """Return by how much layouts differ from the library; collective over the default group's ranks."""
    raw = [Image.new("RGB", (8, 8))] * 2
    subject = Subject(spec=HF_ENCODER, config=config, hidden=HIDDEN, raw=raw)
    items = _items(config)
    found = {}
    for name in layouts:
        built = subject.build(LAYOUTS[name])
        library = _library(config, built.values())
        wanted = torch.cat([library([item]) for item in items])
        targets = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
        loss = functional.mse_loss(wanted, targets, reduction="sum")
        loss.backward()
        rows = built.encode(items, [(config.side, config.side)] * len(items))
        own = functional.mse_loss(rows, targets, reduction="sum")
        own.backward()
        theirs = {path: one.grad for path, one in library.named_parameters() if one.grad is not None}
        found[name] = difference_of(
            losses=(own.item(), loss.item()),
            outputs=(rows.detach(), wanted.detach()),
            gradients=(built.gradients(), theirs),
        )
    return found


def _library(config: HfEncoderConfig, values: Mapping[str, Tensor]) -> Any:
    """Return an encoder whose tower is the library's own, with these values."""
    encoder: Any = HF_ENCODER.build(config, HIDDEN)
    with quiet():
        encoder.encoder = new_tower(config.library()).float().eval()  # which drops nothing
    held = dict(encoder.named_buffers()) | dict(encoder.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for path, value in values.items():
            held[path].copy_(value)
    return encoder


def leak(config: HfEncoderConfig) -> float:
    """Return by how much one image changes the rows of others in a microbatch, over the largest."""
    encoder: Any = HF_ENCODER.build(config, HIDDEN)
    items = _items(config, 4)
    with torch.no_grad():
        one, other = encoder(items[:3]).chunk(3), encoder([items[0], items[3], items[2]]).chunk(3)
    assert not torch.equal(one[1], other[1]), "what is changed changes nothing"
    return max(float((one[place] - other[place]).abs().max() / one[place].abs().max()) for place in (0, 2))


@torch.no_grad()
def weights(config: HfEncoderConfig) -> int:
    """Have the library write a tower, read that, write it again, and return the number of tensors in it."""
    torch.manual_seed(5)
    family = HF_ENCODER.hf_any.of(config.model_type)  # type: ignore[union-attr]
    assert family is not None
    with tempfile.TemporaryDirectory() as folder, quiet():
        network = new_tower(config.library()).float()
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        theirs = saved(network, Path(folder))
        settings = family.settings(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    read = HfEncoderConfig(**settings)
    encoder = HF_ENCODER.build(read, HIDDEN)
    for parameter in encoder.parameters():
        parameter.fill_(torch.nan)
    left = [path for path in read_hf(encoder, family, read, theirs) if not path.startswith("projector.")]
    assert not left, f"parameters that nothing published is read into: {left[:4]}"
    back = write_hf(encoder, family, read)
    assert back.keys() == theirs.keys(), f"other names: {sorted(back.keys() ^ theirs.keys())[:4]}"
    changed = [name for name, tensor in back.items() if not torch.equal(theirs[name], tensor)]
    assert not changed, f"other values of {changed[:4]}"
    return len(back)


TOWERS = Kind(spec=HF_ENCODER, small=small, measure=measure, leak=leak, weights=weights)

"""Parity of encoders: a plugin's on several items beside the library's model on each item alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from parity import Difference, Kind, Tensors, difference_of
from PIL import Image
from torch import Tensor
from torch.nn import functional

from mimo.model.runtime import read_hf, write_hf
from mimo.model.testing import ModuleLayout, Subject
from mimo.testing.comparison import saved
from mimo_transformers import HF_ENCODER, HfEncoderConfig, shrink
from mimo_transformers.family import new_tower, quiet

HIDDEN, ITEMS = 8, 3
"""Width of a row that is delivered; how many items are encoded at once."""
LAYOUTS: Mapping[str, ModuleLayout] = {
    "one process": ModuleLayout(),
    "pp=2": ModuleLayout(pp=2),
    "tp=2": ModuleLayout(tp=2),
}


def small(model_type: str) -> HfEncoderConfig:
    """Return the config of a small tower of a family."""
    with quiet():
        return HfEncoderConfig(model_type=model_type, values=shrink(transformers.AutoConfig.for_model(model_type)))


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """An encoder with items to encode.

    Args:
        subject: the encoder.
        items: four, prepared; the last may stand in the place of the second.
        sizes: of them.
    """

    subject: Subject
    items: Sequence[Mapping[str, Tensor]]
    sizes: Sequence[tuple[int, ...]]


@attrs.frozen(kw_only=True, eq=False)
class Rows:
    """The rows that the library's model makes of items one by one, with the values of an encoder that is built here.

    Args:
        rows: [T, H] of all items in order.
        theirs: returns its gradients after a backward, by our paths; what they were taken of may be gone then.
    """

    rows: Tensor
    theirs: Callable[[], Tensors]


def measure(
    case: Callable[[Any], Case],
    beside: Callable[[Case, Tensors], Rows],
    rank: int,
    config: Any,
    layouts: Sequence[str],
) -> dict[str, Difference]:
    """Return by how much layouts of a plugin differ from the library; collective over the default group's ranks.

    Args:
        case: of a config, the encoder with its items.
        beside: of that and the values of its parameters, what the library makes of the first `ITEMS`.
        rank: of them.
        config: of the plugin.
        layouts: by name.
    """
    of, found = case(config), {}
    for name in layouts:
        built = of.subject.build(LAYOUTS[name])
        library = beside(of, built.values())
        wanted = library.rows
        targets = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
        loss = functional.mse_loss(wanted, targets, reduction="sum")
        loss.backward()
        rows = built.encode(of.items[:ITEMS], of.sizes[:ITEMS])
        own = functional.mse_loss(rows, targets, reduction="sum")
        own.backward()
        found[name] = difference_of(
            losses=(own.item(), loss.item()),
            outputs=(rows.detach(), wanted.detach()),
            gradients=(built.gradients(), library.theirs()),
        )
    return found


def _images(config: HfEncoderConfig) -> Case:
    """Return an encoder of `hf-encoder` with images of its one size."""
    generator = torch.Generator().manual_seed(1)
    size = (config.side, config.side)
    items = [{"pixels": torch.randn((config.channels, *size), generator=generator)} for _ in range(ITEMS + 1)]
    subject = Subject(spec=HF_ENCODER, config=config, hidden=HIDDEN, raw=[Image.new("RGB", (8, 8))] * 2)
    return Case(subject=subject, items=items, sizes=[size] * len(items))


def _bridged(case: Case, values: Tensors) -> Rows:
    """Return what an encoder makes of items whose tower is the library's own, with these values."""
    config = case.subject.config
    encoder: Any = HF_ENCODER.build(config, HIDDEN)
    with quiet():
        encoder.encoder = new_tower(config.library()).float().eval()  # which drops nothing
    held = dict(encoder.named_buffers()) | dict(encoder.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for path, value in values.items():
            held[path].copy_(value)

    def learnt() -> Tensors:
        return {path: one.grad for path, one in encoder.named_parameters() if one.grad is not None}

    return Rows(rows=torch.cat([encoder([item]) for item in case.items[:ITEMS]]), theirs=learnt)


def leak(case: Callable[[Any], Case], config: Any) -> float:
    """Return by how much one item changes the rows of others in a microbatch, over the largest."""
    of = case(config)
    built = of.subject.build()
    counts = [of.subject.spec.rows(config, size) for size in of.sizes[:ITEMS]]
    with torch.no_grad():
        one, other = (
            built.encode([of.items[place] for place in places], [of.sizes[place] for place in places]).split(counts)
            for places in ((0, 1, 2), (0, 3, 2))
        )
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


TOWERS = Kind(
    spec=HF_ENCODER,
    small=small,
    measure=partial(measure, _images, _bridged),
    leak=partial(leak, _images),
    weights=weights,
)

"""Parity of language models: a plugin's on packed rows beside the library's model on each sample alone."""

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
from bounds import gradient_bound
from parity import Difference, Kind, Tensors, difference_of
from small_models import as_published
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from truth import nudge

from mimo.model import LanguageModelSpec, Stage
from mimo.model.runtime import NO_LABEL, LanguageBatch, read_hf, write_hf
from mimo.model.testing import BuiltLanguage, LanguageLayout, LanguageSubject
from mimo.testing.comparison import saved
from mimo.topology import DATA_AXES
from mimo_transformers import HF_DECODER, HfDecoderConfig, shrink
from mimo_transformers.family import new_network, quiet

_ATEN = torch.ops.aten
LANES = ((7, 3, 5), (4, 6))
"""Tokens of each sample of two microbatches, which are two lanes where experts are spread."""
LAYOUTS: Mapping[str, LanguageLayout] = {
    "one process": LanguageLayout(lanes=LANES[:1]),
    "pp=2": LanguageLayout(lanes=LANES[:1], pp=2),
    "tp=2": LanguageLayout(lanes=LANES[:1], tp=2),
    "ep=2": LanguageLayout(lanes=LANES, ep=2),
}


def small(model_type: str) -> HfDecoderConfig:
    """Return the config of a small model of a family."""
    with quiet():
        values = shrink(transformers.AutoConfig.for_model(model_type))
    return HfDecoderConfig(model_type=model_type, vocabulary=values.pop("vocab_size", 0), values=values)


@attrs.frozen(kw_only=True, eq=False)
class Beside:
    """The library's model, with the values of one that is built here.

    Args:
        network: the library's.
        ours: of our gradients by path, the same by names that both have.
        theirs: returns the library's after a backward, by these names; what they were taken of may be gone then.
    """

    network: Any
    ours: Callable[[Tensors], Tensors]
    theirs: Callable[[], Tensors]


@attrs.frozen(kw_only=True, eq=False)
class Library:
    """What the library's model makes of all samples, one after the other.

    Args:
        loss: sum over all labels.
        logits: [T, V] by microbatch.
        gradients: by name.
    """

    loss: float
    logits: Sequence[Tensor]
    gradients: Tensors


def measure(
    spec: LanguageModelSpec,
    beside: Callable[[BuiltLanguage, Any], Beside],
    rank: int,
    config: Any,
    layouts: Sequence[str],
) -> dict[str, Difference]:
    """Return by how much layouts of a plugin differ from the library; collective over the default group's ranks."""
    subject = LanguageSubject(spec=spec, config=config)
    found = {}
    library: Library | None = None
    for name in layouts:
        layout = LAYOUTS[name]
        built = subject.build(layout)
        parts, axes = built.parts, built.axes
        other = beside(built, config)
        library = library or _library(other)  # parameters are stirred by their names, the same in every layout
        lanes = range(len(LANES)) if len(layout.lanes) == 1 else [axes.lane]
        losses, logits = [], []
        for lane in lanes:
            batch = _batch(lane, config.vocabulary)
            hidden = parts[0].language(batch, {}, None)
            for part in parts[1:]:
                hidden = part.language(batch, {}, hidden)
            losses.append(parts[-1].language.losses(hidden, batch.labels).sum())
            losses[-1].backward()
            span = parts[-1].module.logits(hidden.detach())  # type: ignore[operator]
            logits.append(axes.axis.collect(span.detach().T.contiguous(), config.vocabulary).T)
        found[name] = difference_of(
            losses=(float(axes.total(torch.stack(losses).sum().detach(), DATA_AXES)), library.loss),
            outputs=(torch.cat(logits), torch.cat([library.logits[lane] for lane in lanes])),
            gradients=(other.ours(built.gradients()), library.gradients),
        )
        if found[name].gradients > gradient_bound(config):
            found[name] = attrs.evolve(found[name], rounding=_rounding(other, library))
    return found


def _rounding(other: Beside, library: Library) -> float:
    """Return by how much the library's gradients change where each weight begins as the next number."""
    other.network.zero_grad()
    with torch.no_grad():
        nudge(other.network.parameters())
    moved = _library(other)
    return difference_of(losses=(moved.loss, library.loss), gradients=(moved.gradients, library.gradients)).gradients


def _bridged(built: BuiltLanguage, config: HfDecoderConfig) -> Beside:
    """Return the library's model of what `hf-decoder` has built; names are those of its parameters."""
    network = _network(config)
    theirs = _tensors(network)
    published: dict[str, Any] = {}
    for part in built.parts:
        published |= part.module.published(network)  # type: ignore[operator]
    with torch.no_grad():
        for path, value in built.values().items():
            published[path].view(theirs[published[path].name]).copy_(value)

    def ours(given: Tensors) -> Tensors:
        gradients: dict[str, Tensor] = {}
        for path, gradient in given.items():
            full = gradients.setdefault(published[path].name, torch.zeros_like(theirs[published[path].name]))
            piece = published[path].view(full)
            piece += gradient
        return gradients

    def learnt() -> Tensors:
        return {name: one.grad for name, one in network.named_parameters() if one.grad is not None}

    return Beside(network=network, ours=ours, theirs=learnt)


def _network(config: HfDecoderConfig) -> Any:
    with quiet():
        return new_network(config.library(), attention="eager").float()


def _tensors(network: Any) -> dict[str, Tensor]:
    return dict(network.named_buffers()) | dict(network.named_parameters(remove_duplicate=False))


def _samples(lane: int, vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(lane)
    return [torch.randint(1, vocabulary, (length,), generator=generator) for length in LANES[lane]]


def _batch(lane: int, vocabulary: int, changed: int | None = None) -> LanguageBatch:
    """Return a microbatch; of the sample ``changed`` with every id exchanged for another."""
    samples = _samples(lane, vocabulary)
    if changed is not None:
        samples[changed] = samples[changed] % (vocabulary - 1) + 1
    labels = torch.cat([torch.cat((ids[1:], ids.new_tensor([NO_LABEL]))) for ids in samples])
    positions = torch.cat([torch.arange(len(ids)) for ids in samples])
    return LanguageBatch.of(torch.cat(samples), labels, positions, lengths=LANES[lane])


def _library(other: Beside) -> Library:
    vocabulary = other.network.config.get_text_config().vocab_size
    loss, logits = torch.zeros(()), []
    for lane in range(len(LANES)):
        rows = []
        for ids in _samples(lane, vocabulary):
            rows.append(other.network(input_ids=ids.unsqueeze(0), use_cache=False).logits[0])
            loss = loss + functional.cross_entropy(rows[-1][:-1], ids[1:], reduction="sum")
        logits.append(torch.cat(rows).detach())
    loss.backward()
    return Library(loss=loss.item(), logits=logits, gradients=other.theirs())


class _RowByRow(TorchDispatchMode):
    """Makes each row of a product by itself, so that no bit of it follows from how many rows an expert has."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do an operation."""
        match func, *args:
            case _ATEN.mm.default, rows, weight:
                return self._products(rows, weight.expand(len(rows), *weight.shape))
            case _ATEN.addmm.default, bias, rows, weight if not kwargs:
                return bias + self._products(rows, weight.expand(len(rows), *weight.shape))
            case _ATEN._grouped_mm.default, rows, weights, ends, *_:
                experts = torch.searchsorted(ends.long(), torch.arange(len(rows)), right=True)
                return self._products(rows, weights[experts])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _products(rows: Tensor, weights: Tensor) -> Tensor:
        return torch.bmm(rows.unsqueeze(1), weights).squeeze(1)


def leak(spec: LanguageModelSpec, config: Any) -> float:
    """Return by how much one sample changes the logits of others in a microbatch, over the largest."""
    stage: Any = spec.build(config, Stage())
    most = 0.0
    with torch.no_grad(), _RowByRow():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        logits = [stage.logits(stage(_batch(0, config.vocabulary, changed), {}, None)) for changed in (None, *range(3))]
    for changed, found in enumerate(logits[1:]):
        others = [place for place, length in enumerate(LANES[0]) for _ in range(length)]
        kept = torch.tensor([place != changed for place in others])
        assert not torch.equal(found[~kept], logits[0][~kept]), "what is changed changes nothing"
        most = max(most, float((found[kept] - logits[0][kept]).abs().max() / logits[0].abs().max()))
    return most


@torch.no_grad()
def weights(config: HfDecoderConfig) -> int:
    """Have the library write a model, read that as published, write it again, and return how many tensors it has."""
    torch.manual_seed(5)
    network, family = _network(config), HF_DECODER.hf_any.of(config.model_type)  # type: ignore[union-attr]
    assert family is not None
    for parameter in network.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    with tempfile.TemporaryDirectory() as folder, quiet():
        theirs = as_published(saved(network, Path(folder)))
        settings = family.settings(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    read = HfDecoderConfig(**settings)
    stage = HF_DECODER.build(read, Stage())
    for parameter in stage.parameters():
        parameter.fill_(torch.nan)
    assert read_hf(stage, family, read, theirs) == (), "parameters that nothing published is read into"
    back = write_hf(stage, family, read)
    assert back.keys() == theirs.keys(), f"other names: {sorted(back.keys() ^ theirs.keys())[:4]}"
    changed = [name for name, tensor in back.items() if not torch.equal(theirs[name], tensor)]
    assert not changed, f"other values of {changed[:4]}"
    return len(back)


LANGUAGE = Kind(
    spec=HF_DECODER,
    small=small,
    measure=partial(measure, HF_DECODER, _bridged),
    leak=partial(leak, HF_DECODER),
    weights=weights,
    gradients=gradient_bound,
)

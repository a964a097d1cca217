"""Samples of a language model, and how a rank's share of them is packed.

Shapes: T rows, R rows of an encoder, W columns of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from mimo.model.language import NO_LABEL, LanguageBatch, MtpLabels
from mimo.topology import context_spans

ENCODERS = ("vision", "audio")
"""Modules whose rows are put in. Of the second most microbatches have none."""
_FOR_VISION, _FOR_BOTH = 4, 7
_SCATTER = 1e6


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """Some tokens, among them placeholders of encoders' rows.

    Args:
        tokens: [T] ids.
        labels: [T] the next id, `NO_LABEL` at placeholders and before them.
        placeholders: by module, [R] ascending positions.
        rows: by module, [R, W] what is put there.
    """

    tokens: Tensor
    labels: Tensor
    placeholders: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]

    @classmethod
    def of(cls, length: int, *, vocabulary: int, width: int, seed: int) -> Sample:
        """Return the sample of a length, a vocabulary and a seed; only longer ones have rows of encoders."""
        generator = torch.Generator().manual_seed(seed)
        ids = (torch.randn(length + 1, generator=generator) * _SCATTER).long() % vocabulary
        positions = ([1, 2] if length >= _FOR_VISION else [], [length - 2] if length >= _FOR_BOTH else [])
        placeholders = {
            name: torch.tensor(own, dtype=torch.long) for name, own in zip(ENCODERS, positions, strict=True)
        }
        labels = ids[1:].clone()
        for own in placeholders.values():
            labels[own], labels[own - 1] = NO_LABEL, NO_LABEL
        return cls(
            tokens=ids[:-1],
            labels=labels,
            placeholders=placeholders,
            rows={name: torch.randn(len(own), width, generator=generator) for name, own in placeholders.items()},
        )

    @property
    def items(self) -> list[tuple[int, int]]:
        """The rows of each item: an encoder's are of one."""
        return sorted((int(own[0]), int(own[-1]) + 1) for own in self.placeholders.values() if len(own))

    def __len__(self) -> int:
        """Return its number of tokens."""
        return len(self.tokens)


@attrs.frozen(kw_only=True, eq=False)
class Microbatch:
    """What a context rank holds of some samples.

    Args:
        batch: as a module takes it.
        rows: by module, what is put in, for the batch's placeholders.
        held: [T without padding] which of the samples' rows are here, counted through all of them.
        places: by module, which of the samples' encoder rows are here, likewise.
    """

    batch: LanguageBatch
    rows: Mapping[str, Tensor]
    held: Tensor
    places: Mapping[str, Tensor]


def pack(
    samples: Sequence[Sample],
    *,
    width: int,
    next_tokens: int = 0,
    reads_items: bool = False,
    size: int = 1,
    rank: int = 0,
    multiple: int = 1,
    padding: int = 0,
) -> Microbatch:
    """Pack what one of ``size`` context ranks holds of samples.

    Args:
        samples: of one microbatch.
        width: W.
        next_tokens: how many tokens after the next are to be predicted besides.
        reads_items: whether the batch says which rows are one item's.
        size: number of context ranks.
        rank: which of them.
        multiple: of which the number of rows must be one.
        padding: rows of padding at least.
    """
    lengths = tuple(len(sample) for sample in samples)
    starts = [0, *accumulate(lengths)]
    none = torch.zeros(0, dtype=torch.long)
    tokens = torch.cat([none, *(sample.tokens for sample in samples)])
    labels = torch.cat([none, *(sample.labels for sample in samples)])
    positions = torch.cat([none, *(torch.arange(length) for length in lengths)])
    owners = torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    spans = [
        torch.arange(start + low, start + high)
        for start, length in zip(starts, lengths, strict=False)
        for low, high in context_spans(length, size=size, rank=rank)
    ]
    held = torch.cat([none, *spans])
    padded = padding + -(len(held) + padding) % multiple
    here = torch.full((len(tokens),), -1)
    here[held] = torch.arange(len(held))

    def share(values: Tensor, fill: int) -> Tensor:
        return torch.cat((values[held], values.new_full((padded, *values.shape[1:]), fill)))

    placeholders, rows, places = {}, {}, {}
    for name in ENCODERS:
        every = torch.cat(
            [none, *(start + one.placeholders[name] for start, one in zip(starts, samples, strict=False))]
        )
        places[name] = (here[every] >= 0).nonzero().squeeze(1)
        placeholders[name] = here[every[places[name]]]
        rows[name] = torch.cat([torch.zeros(0, width), *(one.rows[name] for one in samples)])[places[name]]
    further = MtpLabels.of(labels, owners, lengths=lengths, depth=next_tokens)
    shares = [share(each.labels, NO_LABEL) for each in further]
    batch = LanguageBatch(
        tokens=share(tokens, 0),
        labels=share(labels, NO_LABEL),
        positions=share(positions, 0),
        grid_positions=share(torch.stack((positions, positions // 2, positions % 3), 1), 0),
        lengths=lengths,
        placeholders=placeholders,
        samples=share(owners, len(samples)),
        label_tokens=tuple(int((sample.labels != NO_LABEL).sum()) for sample in samples),
        mtp_labels=tuple(
            MtpLabels(own, (own != NO_LABEL).nonzero().squeeze(1), each.counts)
            for own, each in zip(shares, further, strict=True)
        ),
        items=tuple(tuple(sample.items) for sample in samples) if reads_items else (),
    )
    return Microbatch(batch=batch, rows=rows, held=held, places=places)

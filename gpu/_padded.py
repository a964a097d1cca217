"""Samples as most train on them: padded to the longest of a microbatch, pictures to the largest; made ahead in threads.

Shapes: B samples, S rows of the longest; N pictures, P patches of the largest, C numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import torch
from _big_models import PATCH, WORKERS
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mimo.model import EncoderSpec
from mimo.trainer import Job

NO_LABEL = -100
"""As PyTorch's loss has it."""


@attrs.frozen(kw_only=True, eq=False)
class Pictures:
    """Pictures of a batch.

    Args:
        patches: [N, P, C].
        seen: [N, P], which of them are no padding.
        grids: [N, 2] how many of each picture lie down and across, on the host.
        index: which of the N * P rows are no padding.
    """

    patches: Tensor
    seen: Tensor
    grids: Tensor
    index: Tensor


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """A microbatch.

    Args:
        tokens: [B, S] ids, 0 where a picture's row or padding is.
        labels: [B, S] the same ids, `NO_LABEL` there.
        seen: [B, S], what is no padding.
        slots: [B, S], where the rows of pictures go.
        pictures: None where there are none.
        rows: that are no padding.
        count: of labels, without those that nothing comes before.
    """

    tokens: Tensor
    labels: Tensor
    seen: Tensor
    slots: Tensor
    pictures: Pictures | None
    rows: int
    count: int

    def to(self, device: torch.device) -> Batch:
        """Return it on a device."""
        return self._changed(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return it in memory from which a GPU copies beside what it computes."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        one = self.pictures
        return attrs.evolve(
            self,
            tokens=change(self.tokens),
            labels=change(self.labels),
            seen=change(self.seen),
            slots=change(self.slots),
            pictures=one
            and attrs.evolve(one, patches=change(one.patches), seen=change(one.seen), index=change(one.index)),
        )


class Batches:
    """The microbatches of each step of a job, the next step's made while one runs.

    Args:
        job: of which samples are read, in its order.
        pins: whether memory is pinned.
    """

    def __init__(self, job: Job, *, pins: bool) -> None:
        self._job, self._pins = job, pins
        self._order = job.sample_order()
        self._ahead, self._decoders = ThreadPoolExecutor(1), ThreadPoolExecutor(WORKERS)
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def take(self, step: int) -> list[Batch]:
        """Return those of a step."""
        if self._next is None or self._next[0] != step:
            self._next = step, self._ahead.submit(self._make, step)
        found = self._next[1].result()
        self._next = step + 1, self._ahead.submit(self._make, step + 1)
        return found

    def close(self) -> None:
        """End the threads."""
        self._ahead.shutdown()
        self._decoders.shutdown()

    def _make(self, step: int) -> list[Batch]:
        samples, size = list(self._order.samples(step)), self._job.settings.run.micro_batch
        found = [self._batch(samples[start : start + size]) for start in range(0, len(samples), size)]
        return [one.pinned() for one in found] if self._pins else found

    def _batch(self, samples: Sequence[int]) -> Batch:
        data = self._job.train
        assert data is not None
        items = [(sample, info.index) for sample in samples for info in data.infos(sample)]
        pixels = list(self._decoders.map(self._pixels, *zip(*items, strict=True))) if items else []
        rest = iter(pixels)
        rows = [_rows(data.tokens(sample), [next(rest) for _ in data.infos(sample)]) for sample in samples]
        tokens, slots = (pad_sequence([row[part] for row in rows], batch_first=True) for part in (0, 1))
        lengths = torch.tensor([len(row[0]) for row in rows])
        seen = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
        labels = tokens.masked_fill(slots | ~seen, NO_LABEL)
        return Batch(
            tokens=tokens,
            labels=labels,
            seen=seen,
            slots=slots,
            pictures=_pictures(pixels) if pixels else None,
            rows=int(lengths.sum()),
            count=int((labels[:, 1:] != NO_LABEL).sum()),
        )

    def _pixels(self, sample: int, index: int) -> Tensor:
        """Return a picture [3, height, width], as ours is prepared."""
        data, vision = self._job.train, self._job.module("vision")
        assert data is not None
        assert isinstance(vision.spec, EncoderSpec)
        prepared: Any = vision.spec.prepare(vision.config, data.raw(sample, index))
        pixels: Tensor = prepared["pixels"][0]
        return pixels


def _rows(tokens: Sequence[int], pixels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids of a sample whose first tokens stand for its pictures, and which rows are those of pictures."""
    text = torch.tensor(tokens[len(pixels) :])
    patches = sum(one[0].numel() // PATCH**2 for one in pixels)
    ids = torch.cat([torch.zeros(patches, dtype=torch.long), text])
    return ids, torch.arange(len(ids)) < patches


def _pictures(pixels: Sequence[Tensor]) -> Pictures:
    cut = [
        one.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1)
        for one in pixels
    ]
    patches = pad_sequence(cut, batch_first=True)
    seen = torch.arange(patches.shape[1]) < torch.tensor([len(one) for one in cut]).unsqueeze(1)
    grids = torch.tensor([[side // PATCH for side in one.shape[1:]] for one in pixels])
    return Pictures(patches=patches, seen=seen, grids=grids, index=seen.flatten().nonzero().squeeze(1))

"""Samples of steps to come, read and prepared by threads beside the step that runs.

First the layouts of a step's samples, by one thread; then the items that this rank decodes, in the order of the
microbatches. What is not ready when it is needed is waited for, or prepared by the one who needs it: that is the time
that the step waits for data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import attrs
import torch

from mimo.data import Prefetcher, SampleLayout, Ticket
from mimo.hooks import UserError
from mimo.launch import Heartbeat
from mimo.topology import Coordinates
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.config.settings import DataSettings
from mimo.trainer.items.prepared import Item, Prepare
from mimo.trainer.items.staging import StagedItem, StagedStep, Staging
from mimo.trainer.job.job import JobModule


class StepLoader:
    """Reads the samples of steps ahead on one rank; for its main thread.

    Args:
        cut: of a step returns its samples, of which nothing is read yet.
        places: encoders whose items this rank decodes, each with where it stands in the encoder's grid.
        settings: number of threads, and how far they are ahead.
        reach: by how many steps the samples that are asked for are ahead of the step that runs, and one more.
        last: step that there is.
        progress: where this rank reports that it waits.
        staging: sends what is decoded to the device; None where it is used where it lies.
    """

    def __init__(
        self,
        *,
        cut: Callable[[int], StepData],
        places: Sequence[tuple[JobModule, Coordinates]],
        settings: DataSettings,
        reach: int,
        last: int,
        progress: Heartbeat,
        staging: Staging | None = None,
    ) -> None:
        self._cut = cut
        self._places = tuple(places)
        # At least one: items of the samples that are asked for may have to be decoded at once, see `BrokenSamples`.
        self._further = max(settings.ahead + 1 - reach, min(settings.ahead, 1)) if settings.workers else 0
        self._last = last
        self._progress = progress
        self._staging = staging if settings.workers else None
        self._begun: dict[int, tuple[StepData, Ticket[int]]] = {}
        self._seconds = 0.0
        # Torch's own threads would be as many again for each of ours. Said for this thread first, as what a thread says
        # holds for all that have not yet said or used anything.
        torch.set_num_threads(torch.get_num_threads())
        self._prefetcher = Prefetcher(
            workers=settings.workers,
            max_bytes=settings.ahead_bytes - (0 if self._staging is None else self._staging.max_bytes),
            on_thread=partial(_begin_thread, self._staging),
            name="mimo-data",
        )

    def load(self, step: int) -> StepData:
        """Return the samples of a step as they have been read, and have those of later steps begun."""
        self._begun = {number: begun for number, begun in self._begun.items() if number >= step}
        for number in range(step, max(step, min(step + self._further, self._last)) + 1):
            if number not in self._begun:
                self._begun[number] = self._begin(number)
        data, layouts = self._begun.pop(step)
        self._take(layouts)
        return data

    def take_seconds(self) -> float:
        """Return for how long this rank has waited for data since this was called last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """End the threads."""
        self._prefetcher.close()

    def _begin(self, step: int) -> tuple[StepData, Ticket[int]]:
        data = self._cut(step)
        return data, self._prefetcher.submit(partial(self._read, step, data), order=(step,), size=lambda size: size)

    def _read(self, step: int, data: StepData) -> int:
        """Lay out the samples of a step, have their items prepared, and return the bytes of the layouts."""
        try:
            found = sum(_layout_bytes(layout) for microbatch in data.microbatches for layout in microbatch.layouts)
        except UserError:  # raised again where the layouts are needed
            return 0
        staged = None if self._staging is None else StagedStep(self._staging)
        for index, microbatch in enumerate(data.microbatches):
            for module, place in self._places:
                microbatch.prepare_ahead(module, place, partial(self._submit, (step, index), staged))
        if staged is not None:
            staged.all_known()
        return found

    def _submit(self, order: tuple[int, ...], staged: StagedStep | None, prepare: Prepare) -> LoadedItem:
        ticket: Ticket[Item | StagedItem]
        if staged is None:
            ticket = self._prefetcher.submit(prepare, order=order, size=_item_bytes)
        else:
            staged.expect()
            ticket = self._prefetcher.submit(partial(staged.prepare, prepare), order=order, size=_item_bytes)
        return LoadedItem(ticket=ticket, waiting=self._waiting, staged=staged)

    def _take(self, ticket: Ticket[int]) -> int:
        if ticket.is_done:
            return ticket.take()
        with self._waiting():
            return ticket.take()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        with self._progress.waiting_for_data():
            yield
        self._seconds += time.perf_counter() - begun


@attrs.frozen(kw_only=True, eq=False)
class LoadedItem:
    """An item that a thread prepares; see `mimo.trainer.items.prepared.ItemAhead`."""

    ticket: Ticket[Item | StagedItem]
    waiting: Callable[[], AbstractContextManager[None]]
    staged: StagedStep | None

    def take(self) -> Item:
        """Return what an encoder is given of it."""
        is_there = self.ticket.is_done and (self.staged is None or not self.staged.is_busy)
        with contextlib.nullcontext() if is_there else self.waiting():
            found = self.ticket.take()
            return found.take() if isinstance(found, StagedItem) else found

    def wait(self) -> BaseException | None:
        """Return why it can't be prepared, None if it is."""
        with contextlib.nullcontext() if self.ticket.is_done else self.waiting():
            return self.ticket.wait()


def _begin_thread(staging: Staging | None) -> None:
    torch.set_num_threads(1)
    if staging is not None:
        staging.begin_thread()


def _item_bytes(item: Item | StagedItem) -> int:
    return item.bytes if isinstance(item, StagedItem) else sum(tensor.nbytes for tensor in item.values())


def _layout_bytes(layout: SampleLayout) -> int:
    return layout.tokens.nbytes + (0 if layout.weights is None else layout.weights.nbytes)

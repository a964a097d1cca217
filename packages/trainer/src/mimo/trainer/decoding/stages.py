"""The language model's stages in generation, as one of them sees the others.

Rows go from stage to stage along the edges of training. What one stage finds out alone, such as the tokens that the
last one chooses, it sends to all others of its lane; so it does with an error, and all end with the same message.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from mimo.hooks import ConfigError, DataError, PluginError, RunError, UserError
from mimo.schedule import pipeline_route
from mimo.schedule.runtime import Boundary, Channel
from mimo.topology.collectives import device_of
from mimo.trainer.job.generation_layout import check_layout
from mimo.trainer.job.precision import compute_dtype
from mimo.trainer.step.trainer import Trainer

_ERRORS = (ConfigError, DataError, PluginError, RunError)
"""What a stage may raise alone; all else ends with the process."""
_ROUTES = 64
"""Numbers of rows whose way to the next stage is remembered."""


class Stages:
    """The stages of the language model, as this rank sees them.

    Args:
        trainer: of this rank, which holds one of them.

    Attributes:
        count: how many there are.
        is_first: whether this rank reads tokens and rows of encoders.
        is_last: whether it has logits.

    Raises:
        ConfigError: see `check_layout`.
    """

    def __init__(self, trainer: Trainer) -> None:
        job = trainer.job
        check_layout(job)
        self._grid, self._rank = job.language.grid, trainer.rank
        self._place = self._grid.coordinates(trainer.rank)
        self.count = self._grid.pp
        self.is_first, self.is_last = self._place.pp == 0, self._place.pp == self.count - 1
        name, place = job.language.name, self._place.pp
        self._route = lru_cache(_ROUTES)(partial(pipeline_route, self._grid, rank=self._rank))
        self._before: Boundary | None = None
        self._after: Boundary | None = None
        for edge in job.graph.edges:
            if edge.source.module == edge.target.module == name:
                if edge.target.stage == place:
                    self._before = trainer.parts.boundaries[edge.name]
                elif edge.source.stage == place:
                    self._after = trainer.parts.boundaries[edge.name]
        self._dtype = compute_dtype(job.settings.run.precision)
        # With gloo a tag keeps what stages say apart from the rows of edges, which have those below it.
        self._words = Channel(group=trainer.objects, tag=2 * len(job.graph.edges))
        self._device = device_of(trainer.objects) if self.count > 1 else torch.device("cpu")
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._received_count, self._sent_count = itertools.count(), itertools.count()

    def receive(self, rows: int) -> Tensor | None:
        """Return the rows [rows, H] of the stage before; None on the first."""
        if self._before is None:
            return None
        place = self._place.pp
        route = self._route(source=place - 1, target=place, rows=rows)
        return self._before.receive(route, next(self._received_count)).wait()

    def send(self, hidden: Tensor) -> None:
        """Start sending rows [T, H] to the stage behind, if there is one."""
        if self._after is None:
            return
        place = self._place.pp
        route = self._route(source=place, target=place + 1, rows=len(hidden))
        self._after.send(route, next(self._sent_count), hidden.to(self._dtype))

    def agree(self, stage: int, count: int, find: Callable[[], Sequence[int]]) -> Callable[[], Sequence[int]]:
        """Have one stage find numbers, and return what waits for them; collective over the stages of a lane.

        Args:
            stage: which finds them, at once.
            count: how many numbers there are.
            find: called there alone.

        Returns:
            The numbers, on each stage; an error of ``find`` is raised there at once and by this on the others.
        """
        if stage != self._place.pp:
            return self._hear(stage, count)
        try:
            found = find()
        except _ERRORS as error:
            self._report([0] * count, json.dumps([type(error).__name__, *_words_of(error)]).encode())
            self.flush()
            raise
        self._report(found, b"")
        return lambda: found

    def flush(self) -> None:
        """Wait until everything sent has left."""
        self._wait_until_sent(0)
        if self._after is not None:
            self._after.flush()

    def _report(self, numbers: Sequence[int], text: bytes) -> None:
        """Send numbers, and the text of an error, if there is one, to the other stages."""
        messages = [[len(text), *numbers], *([[*text]] if text else [])]
        for stage in range(self.count):
            if stage != self._place.pp:
                for message in messages:
                    values = torch.tensor(message, dtype=torch.int64, device=self._device)
                    self._sent.append((self._words.send(values, self._rank_of(stage)), values))
        # Each stage has as many groups of sequences on their way as there are stages; what is older has been read.
        self._wait_until_sent(self.count * self.count)

    def _hear(self, stage: int, count: int) -> Callable[[], Sequence[int]]:
        """Start receiving numbers of another stage."""
        peer = self._rank_of(stage)
        values = torch.empty(1 + count, dtype=torch.int64, device=self._device)
        work = self._words.receive(values, peer)

        def take() -> Sequence[int]:
            work.wait()
            length, *numbers = values.tolist()
            if length:
                text = torch.empty(length, dtype=torch.int64, device=self._device)
                self._words.receive(text, peer).wait()
                raise _error_of(bytes(text.tolist()))
            return numbers

        return take

    def _rank_of(self, stage: int) -> int:
        return self._grid.rank_at(pp=stage, dp=self._place.dp, tp=self._place.tp)

    def _wait_until_sent(self, newest: int) -> None:
        while len(self._sent) > newest:
            work, _ = self._sent.popleft()
            work.wait()


def _words_of(error: UserError) -> tuple[str, str, str, str]:
    return error.where, error.expected, error.got, error.fix


def _error_of(text: bytes) -> UserError:
    """Return an error that another stage has met."""
    kind, where, expected, got, fix = json.loads(text)
    made = next(each for each in _ERRORS if each.__name__ == kind)
    return made(where, expected=expected, got=got, fix=fix)

"""Tensor ranks that are threads of this process, to try a plan of without starting any process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.model.runtime import ExpertAxis, TensorAxis

T = TypeVar("T")
_SECONDS = 60
"""How long one may wait for the others: a wrong plan may have them meet unequally often."""


class Meeting:
    """Where threads exchange tensors.

    Args:
        size: number of threads.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self._slots: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, mine: Tensor) -> Sequence[Tensor]:
        """Return the tensors of all ranks.

        Raises:
            BrokenBarrierError: another thread has failed, or doesn't come.
        """
        self._slots[rank] = mine.detach().contiguous()
        self.barrier.wait()
        found = [one for one in self._slots if one is not None]
        self.barrier.wait()
        return found


@attrs.frozen(kw_only=True)
class ThreadAxis(TensorAxis):
    """A `TensorAxis` over threads.

    Args:
        meeting: of all its ranks.
    """

    meeting: Meeting

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' rows one after the other."""
        return torch.cat(list(self.meeting.exchange(self.rank, x)))

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum."""
        return self.total(x).tensor_split(self.size)[self.rank]

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType, combine: Callable[..., Tensor]) -> Tensor:  # noqa: ARG002 - what combine does
        return functools.reduce(combine, self.meeting.exchange(self.rank, x))


@attrs.frozen(kw_only=True)
class ThreadExpertAxis(ExpertAxis):
    """An `ExpertAxis` of which every thread holds all experts.

    Args:
        tensor: the ranks that share the rows.
    """

    tensor: TensorAxis

    def total(self, counts: Tensor) -> Tensor:
        """Return the sum of ``counts`` over them."""
        return self.tensor.total(counts)


def on_threads(acts: Sequence[Callable[[ThreadAxis], T]]) -> list[T]:
    """Return what each of ``acts`` returns as one tensor rank, all of them together.

    Raises:
        Exception: what the first of them raised.
    """
    size = len(acts)
    meeting = Meeting(size)
    found: dict[int, T] = {}
    raised: list[Exception] = []

    def run(rank: int) -> None:
        try:
            found[rank] = acts[rank](ThreadAxis(rank=rank, size=size, meeting=meeting))
        except threading.BrokenBarrierError:
            pass  # another one has said why
        except Exception as error:  # noqa: BLE001 - is raised again
            raised.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    if len(found) < size:
        msg = "ranks that wait for each other at different places"
        raise RuntimeError(msg)
    return [found[rank] for rank in range(size)]

"""Ranks in threads of one process, on channels and groups that do as little at a time as NCCL may.

A rank comes to one call after the other, and each holds it up until all its peers have come to theirs: so calls are in
order on a communicator and between communicators, nothing happens beside anything else, and two ranks that have not
talked before connect while both wait. Messages and collectives have no names: the n-th of two ranks that a channel has
is the n-th of the other. What a rank may begin and wait for later is what needs NCCL to progress beside messages. When
all ranks wait, each says for whom it waits.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch.distributed as dist
from torch import Tensor

from mimo.schedule.runtime import Channel
from mimo.schedule.runtime.channel import Messages, Works

Call = tuple[Hashable, int]
"""A stream of calls, of one rank, that is counted: where, and who comes to it."""

Needs = Sequence[tuple[Call, int]]
"""Calls of peers, and how often these must have come to each."""


class HangError(Exception):
    """All ranks wait for one another."""


class AbandonedError(Exception):
    """Another rank has ended."""


@attrs.define(eq=False)
class Cluster:
    """What all ranks share: how often each has come to each stream of calls, and rows on their way."""

    ranks: Sequence[int]
    _came: Counter[Call] = attrs.field(factory=Counter)
    _waits: dict[int, Needs] = attrs.field(factory=dict)
    _mail: dict[Hashable, deque[Tensor]] = attrs.field(factory=dict)
    _going: set[int] = attrs.field(init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition)
    _end: BaseException | None = None

    def __attrs_post_init__(self) -> None:
        """Begin with all ranks."""
        self._going = set(self.ranks)

    def come(
        self, rank: int, calls: Sequence[tuple[Call, Call]], sends: Mapping[Hashable, Tensor] | None = None
    ) -> None:
        """Come to calls at once, each with the peer's that it needs, and wait until all peers have come to theirs."""
        self.wait(rank, self.begin(calls, sends))

    def begin(self, calls: Sequence[tuple[Call, Call]], sends: Mapping[Hashable, Tensor] | None = None) -> Needs:
        """Come to calls at once, and return what `wait` waits for."""
        with self._changed:
            for place, rows in (sends or {}).items():
                self._mail.setdefault(place, deque()).append(rows)
            needs = []
            for own, other in calls:
                self._came[own] += 1
                needs.append((other, self._came[own]))
            self._changed.notify_all()
            return needs

    def wait(self, rank: int, needs: Needs) -> None:
        """Wait until all peers have come to the calls that this rank has begun."""
        with self._changed:
            self._waits[rank] = needs
            self._look()
            self._changed.wait_for(lambda: self._end is not None or self._is_over(rank))
            if not self._is_over(rank):
                raise AbandonedError from self._end
            del self._waits[rank]

    def take(self, place: Hashable, rows: Tensor) -> None:
        """Fill ``rows`` with the next ones that came from a peer."""
        with self._changed:
            sent = self._mail[place].popleft()
        assert sent.shape == rows.shape, f"{place}: {len(rows)} rows were expected, {len(sent)} were sent"
        rows.copy_(sent)

    def run(self, work: Callable[[int], None]) -> None:
        """Do the work of each rank in a thread of its own; raise what ended the first that failed, or `HangError`."""

        def be(rank: int) -> None:
            error: BaseException | None = None
            try:
                work(rank)
            except AbandonedError:
                pass
            except BaseException as caught:  # noqa: BLE001 -- raised below
                error = caught
            with self._changed:
                self._going.discard(rank)
                self._end = self._end or error
                self._look()

        threads = [threading.Thread(target=be, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._end is not None:
            raise self._end

    def _is_over(self, rank: int) -> bool:
        return all(self._came[call] >= count for call, count in self._waits[rank])

    def _look(self) -> None:
        stuck = {rank for rank in self._waits if not self._is_over(rank)}
        if self._going and stuck >= self._going and self._end is None:
            self._end = HangError("; ".join(self._text(rank) for rank in sorted(self._going)))
        self._changed.notify_all()

    def _text(self, rank: int) -> str:
        missing = sorted(
            {f"{peer} at {where}" for (where, peer), count in self._waits[rank] if self._came[where, peer] < count}
        )
        return f"rank {rank} waits for rank {', '.join(missing)}"


@attrs.frozen
class Done:
    """A message that is over."""

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        return True

    def wait(self) -> None:
        """Return at once."""


@attrs.frozen(kw_only=True)
class SerialChannel(Channel):
    """A channel of one rank.

    Args:
        name: of its edge and direction.
        rank: which.
        cluster: of all.
        batches: whether a batch begins at once; else its receives come first, one after the other, and then its sends.
        leaves_out: the peer whose first message is forgotten; -1 for none.
    """

    group: dist.ProcessGroup | None = None
    tag: int = 0
    is_serial: bool = True
    name: str
    rank: int
    cluster: Cluster
    batches: bool = True
    leaves_out: int = -1
    _left_out: list[int] = attrs.field(factory=list)

    def start(self, sends: Messages, receives: Messages) -> tuple[Works, Works]:
        """Send and receive."""
        messages = [("receive", *each) for each in receives] + [("send", *each) for each in sends]
        kept = [each for each in messages if not self._is_left_out(each[2])]
        for batch in [kept] if self.batches else [[each] for each in kept]:
            calls = [((self._place(way, peer), self.rank), (self._place(way, peer), peer)) for way, _, peer in batch]
            leaving: dict[Hashable, Tensor] = {
                self._place(way, peer): rows.clone() for way, rows, peer in batch if way == "send"
            }
            self.cluster.come(self.rank, calls, leaving)
        for way, rows, peer in kept:
            if way == "receive":
                self.cluster.take(self._place(way, peer), rows)
        works: Any = [Done()] * len(sends), [Done()] * len(receives)
        found: tuple[Works, Works] = works
        return found

    def _place(self, way: str, peer: int) -> str:
        source, target = (self.rank, peer) if way == "send" else (peer, self.rank)
        return f"{self.name} from {source} to {target}"

    def _is_left_out(self, peer: int) -> bool:
        if peer != self.leaves_out or self._left_out:
            return False
        self._left_out.append(peer)
        return True

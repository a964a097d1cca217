"""Parts of the simulator: the clock of an actor, with its bars and waits, messages and meetings."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import attrs

from mimo.schedule.checker import ActivationMemory
from mimo.schedule.plan import COMPUTATIONS, Action, Bar

WARM_UP, DRAIN, TRANSFER, PEERS = "warm-up", "drain", "transfer", "peers"
"""Causes of idle time beside the names of modules."""


@attrs.define(kw_only=True, eq=False)
class Clock:
    """An actor while its list runs: its position and time, and its history.

    Args:
        ranks, actions: the actor's.
        memory: its activation memory; None where nothing has bytes.
        position: of its current action.
        now: its time.
        waits: seconds by cause since its last bar; ``idle`` before that.
        work: seconds in computations and reductions; ``computed`` in computations alone.
        bars: its computations and reductions.
        changes: times with the module and bytes by which its memory changed, in the order of its list.
        first, last: when its first computation began, and its last one ended.
    """

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]
    memory: ActivationMemory | None
    position: int = 0
    now: float = 0
    waits: dict[str, float] = attrs.field(factory=dict)
    idle: dict[str, float] = attrs.field(factory=dict)
    work: float = 0
    computed: float = 0
    bars: list[Bar] = attrs.field(factory=list)
    changes: list[tuple[float, str, int]] = attrs.field(factory=list)
    first: float | None = None
    last: float = 0

    @classmethod
    def of(cls, ranks: tuple[int, ...], actions: tuple[Action, ...], memory: ActivationMemory | None) -> Clock:
        """Return the clock of an actor before its first action, with the memory that the previous step left."""
        initial = {} if memory is None else memory.initial
        changes: list[tuple[float, str, int]] = [
            (0, module, peak.bytes) for module, peak in initial.items() if peak.bytes
        ]
        return cls(ranks=ranks, actions=actions, memory=memory, changes=changes)

    def wait(self, until: float, cause: str) -> None:
        """Wait until a time, if it is in the future."""
        if until > self.now:
            self.waits[cause] = self.waits.get(cause, 0) + until - self.now
            self.now = until

    def work_on(self, action: Action, seconds: float) -> None:
        """Do a computation or reduction now."""
        start, finish = self.now, self.now + seconds
        causes = self._close_gap(WARM_UP if self.first is None else None)
        self.bars.append(
            Bar(
                ranks=self.ranks,
                action=action,
                start=start,
                finish=finish,
                waited=sum(causes.values()),
                cause=max(causes, key=causes.__getitem__, default=""),
                causes=causes if len(causes) > 1 else {},
            )
        )
        self.now = finish
        self.work += seconds
        if action.kind in COMPUTATIONS:
            self.first = start if self.first is None else self.first
            self.last = finish
            self.computed += seconds
            if self.memory is not None:
                if more := self.memory.added(action).bytes:
                    self.changes.append((start, action.module, more))
                self.free(action, finish)

    def free(self, action: Action, time: float) -> None:
        """Free what nobody needs after ``action``, a computation or send, ends at ``time``."""
        if self.memory is not None and (less := self.memory.freed(action).bytes):
            self.changes.append((time, action.module, -less))

    def end(self, time: float) -> None:
        """Wait for the end of the step."""
        self.wait(time, DRAIN)
        self._close_gap(DRAIN if self.bars else WARM_UP)

    def _close_gap(self, cause: str | None) -> Mapping[str, float]:
        """Account for the gap before now, all of it to ``cause`` if given; return its seconds by cause."""
        if not self.waits:
            return {}
        parts: Mapping[str, float] = self.waits if cause is None else {cause: sum(self.waits.values())}
        for part, seconds in parts.items():
            self.idle[part] = self.idle.get(part, 0) + seconds
        self.waits = {}
        return parts


@attrs.frozen
class Direction:
    """One direction of an edge.

    Args:
        seconds: of a message.
        source, target: modules at its ends.
        targets: ranks that receive.
        receivers, senders: numbers of actors.
    """

    seconds: float
    source: str
    target: str
    targets: tuple[int, ...]
    receivers: int
    senders: int


@attrs.define(eq=False)
class Message:
    """One message on a channel, from all its senders to all its receivers.

    Args:
        direction: in which it goes.
        unposted, unsent: how many actors have not posted it, and how many sends have not arrived.
        posted: when the last one posted.
        sent, start, finish: when the send that arrives last was reached, left and arrived.
        sleepers: actors that wait for it.
        queues: those at whose head it waits to be posted.
    """

    direction: Direction
    unposted: int
    unsent: int
    posted: float = 0
    sent: float = 0
    start: float = 0
    finish: float = 0
    sleepers: tuple[int, ...] = ()
    queues: tuple[SendQueue, ...] = ()


@attrs.define(eq=False)
class SendQueue:
    """Messages of an actor on one edge and direction, in order: those that left have arrived at ``free``, others wait.

    ``waiting`` has each message with its send and when that was reached.
    """

    clock: Clock
    free: float = 0
    waiting: deque[tuple[Message, Action, float]] = attrs.field(factory=deque)


@attrs.define(kw_only=True, eq=False)
class Meeting:
    """A computation or reduction that actors begin together: at ``start``, once none of them is ``absent``."""

    absent: int
    start: float = 0
    present: set[int] = attrs.field(factory=set)

"""The simulator's parts: the clock of an actor, with what it did and waited for, and messages and meetings."""

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
    """An actor while its list runs: where it stands and when, and what came before.

    Args:
        ranks, actions: the actor's.
        keeping: its memory; None where nothing is kept.
        position: of the action that it stands at.
        now: when it came there, or got on with waiting.
        waits: seconds by cause since its last bar; ``idle`` before that.
        work: seconds in computations and reductions; ``computed`` in computations alone.
        bars: what it did.
        kept: moments with the module and bytes by which its memory changed, in the order of its list.
        first, last: when its first computation began, and its last one ended.
    """

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]
    keeping: ActivationMemory | None
    position: int = 0
    now: float = 0
    waits: dict[str, float] = attrs.field(factory=dict)
    idle: dict[str, float] = attrs.field(factory=dict)
    work: float = 0
    computed: float = 0
    bars: list[Bar] = attrs.field(factory=list)
    kept: list[tuple[float, str, int]] = attrs.field(factory=list)
    first: float | None = None
    last: float = 0

    @classmethod
    def of(cls, ranks: tuple[int, ...], actions: tuple[Action, ...], keeping: ActivationMemory | None) -> Clock:
        """Return the clock of an actor before its first action, with what it keeps from the step before."""
        begins = {} if keeping is None else keeping.begins
        kept: list[tuple[float, str, int]] = [(0, module, peak.bytes) for module, peak in begins.items() if peak.bytes]
        return cls(ranks=ranks, actions=actions, keeping=keeping, kept=kept)

    def wait(self, until: float, cause: str) -> None:
        """Do nothing until then, if that is still to come."""
        if until > self.now:
            self.waits[cause] = self.waits.get(cause, 0) + until - self.now
            self.now = until

    def work_on(self, action: Action, seconds: float) -> None:
        """Do a computation or reduction now."""
        start, finish = self.now, self.now + seconds
        waited, cause = self._settle(WARM_UP if self.first is None else None)
        self.bars.append(Bar(ranks=self.ranks, action=action, start=start, finish=finish, waited=waited, cause=cause))
        self.now = finish
        self.work += seconds
        if action.kind in COMPUTATIONS:
            self.first = start if self.first is None else self.first
            self.last = finish
            self.computed += seconds
            if self.keeping is not None:
                if more := self.keeping.grows(action).bytes:
                    self.kept.append((start, action.module, more))
                self.let_go(action, finish)

    def let_go(self, action: Action, time: float) -> None:
        """Free what nobody needs once ``action``, a computation or send, is over at ``time``."""
        if self.keeping is not None and (less := self.keeping.shrinks(action).bytes):
            self.kept.append((time, action.module, -less))

    def end(self, time: float) -> None:
        """Wait for the end of the step."""
        self.wait(time, DRAIN)
        self._settle(DRAIN if self.bars else WARM_UP)

    def _settle(self, cause: str | None) -> tuple[float, str]:
        """Close the gap before now, all of it for one cause where given; return its length and its main cause."""
        if not self.waits:
            return 0, ""
        waited = sum(self.waits.values())
        parts: Mapping[str, float] = self.waits if cause is None else {cause: waited}
        for part, seconds in parts.items():
            self.idle[part] = self.idle.get(part, 0) + seconds
        main = max(parts, key=parts.__getitem__)
        self.waits = {}
        return waited, main


@attrs.frozen
class Direction:
    """One way along an edge.

    Args:
        seconds: that a message takes.
        source, target: modules at its ends.
        targets: ranks that receive.
        receivers, senders: how many actors do.
    """

    seconds: float
    source: str
    target: str
    targets: tuple[int, ...]
    receivers: int
    senders: int


@attrs.define(eq=False)
class Message:
    """One message on a channel, from all who send it to all who receive it.

    Args:
        way: that it goes.
        unposted, unsent: how many actors have yet to post it, and how many sends have yet to arrive.
        posted: when the last one posted.
        sent, start, finish: when the send that arrives last was reached, left and arrived.
        sleepers: actors that wait for it.
        lines: those at whose head it stands unposted.
    """

    way: Direction
    unposted: int
    unsent: int
    posted: float = 0
    sent: float = 0
    start: float = 0
    finish: float = 0
    sleepers: tuple[int, ...] = ()
    lines: tuple[SendQueue, ...] = ()


@attrs.define(eq=False)
class SendQueue:
    """What an actor sends on one edge and way, in order: what has left has arrived at ``free``, the rest waits.

    With each message that waits stand its send and when that was reached.
    """

    clock: Clock
    free: float = 0
    waiting: deque[tuple[Message, Action, float]] = attrs.field(factory=deque)


@attrs.define(kw_only=True, eq=False)
class Meeting:
    """A computation or reduction that actors enter together: at ``start``, once none of them is ``absent``."""

    absent: int
    start: float = 0
    came: set[int] = attrs.field(factory=set)

"""The emulator's network: an in-order queue of posted buffers for each channel and pair of ranks, without tags."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan import Action, action_text, microbatches_text, stage_text
from mimo.topology import Edge, StageId

Peers = Callable[[Edge, int], Collection[tuple[int, int]]]
"""``(edge, microbatch)`` to the pairs (source rank, target rank) that exchange rows, and back their gradients."""


@attrs.frozen
class Token:
    """A result of one rank for one microbatch of a stage: ``rows``, their ``gradient``, or that of the ``weights``."""

    what: str
    stage: StageId
    rank: int
    microbatch: int

    def __str__(self) -> str:
        """Return the text for errors."""
        return f"{self.what} of {stage_text(self.stage)}, microbatch {self.microbatch}, from rank {self.rank}"


@attrs.define(kw_only=True, eq=False)
class Buffer:
    """A posted receive: the ranks that it still waits for, and what arrived for each microbatch."""

    microbatches: tuple[int, ...]
    awaited: set[int]
    tokens: dict[int, set[Token]]


@attrs.define(kw_only=True, eq=False)
class Network:
    """All queues between ranks.

    Args:
        edges: edges by name.
        peers: which ranks exchange rows.
    """

    edges: Mapping[str, Edge]
    peers: Peers
    _pairs: dict[tuple[str, int], frozenset[tuple[int, int]]] = attrs.field(factory=dict, init=False)
    _queues: dict[tuple[str, bool, int, int], deque[Buffer]] = attrs.field(factory=dict, init=False)

    def is_gradient(self, message: Action) -> bool:
        """Return whether a send or receive goes against its edge."""
        edge = self.edges[message.edge or ""]
        return message.stage_id == (edge.target if message.kind == "send" else edge.source)

    def partners(self, edge: str, stage: StageId, rank: int, microbatch: int) -> frozenset[int]:
        """Return the ranks at the other end of ``edge`` that exchange rows with ``rank``, which holds ``stage``."""
        pairs = self._pairs.get((edge, microbatch))
        if pairs is None:
            pairs = self._pairs[edge, microbatch] = frozenset(self.peers(self.edges[edge], microbatch))
        at_source = self.edges[edge].source == stage
        return frozenset(pair[at_source] for pair in pairs if pair[not at_source] == rank)

    def post(self, message: Action, receiver: int) -> Buffer:
        """Append a buffer to the queue of each rank that sends something to ``receiver``."""
        senders = self._all_partners(message, receiver)
        buffer = Buffer(
            microbatches=message.microbatches,
            awaited=set(senders),
            tokens={microbatch: set() for microbatch in message.microbatches},
        )
        for sender in senders:
            self._queue(message, sender, receiver).append(buffer)
        return buffer

    def unposted(self, message: Action, sender: int) -> list[int]:
        """Return the ranks that ``sender`` has rows for and that have no buffer in the queue between them."""
        receivers = sorted(self._all_partners(message, sender))
        return [receiver for receiver in receivers if not self._queue(message, sender, receiver)]

    def send(self, message: Action, sender: int, tokens: Sequence[Token]) -> list[int]:
        """Fill the first buffer of each queue, by position as bytes would, and return the receivers.

        Raises:
            PlanError: a buffer is of another size.
        """
        receivers = sorted(self._all_partners(message, sender))
        for receiver in receivers:
            buffer = self._queue(message, sender, receiver).popleft()
            if len(buffer.microbatches) != len(tokens):
                raise PlanError(
                    f"plan, rank {sender} ({action_text(message)})",
                    expected=f"what rank {receiver} has posted, {microbatches_text(buffer.microbatches)}",
                    got="a message of another size",
                )
            buffer.awaited.discard(sender)
            for microbatch, token in zip(buffer.microbatches, tokens, strict=True):
                if receiver in self.partners(message.edge or "", message.stage_id, sender, token.microbatch):
                    buffer.tokens[microbatch].add(token)
        return receivers

    def _all_partners(self, message: Action, rank: int) -> frozenset[int]:
        edge, stage = message.edge or "", message.stage_id
        return frozenset().union(*(self.partners(edge, stage, rank, m) for m in message.microbatches))

    def _queue(self, message: Action, sender: int, receiver: int) -> deque[Buffer]:
        return self._queues.setdefault((message.edge or "", self.is_gradient(message), sender, receiver), deque())

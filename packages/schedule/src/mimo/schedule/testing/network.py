"""The emulator's network: one in-order line of posted buffers for each channel and pair of ranks, and no tags."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan import Action, action_text, microbatches_text, stage_text
from mimo.topology import Edge, StageId

Peers = Callable[[Edge, int], Collection[tuple[int, int]]]
"""``(edge, microbatch)`` to the pairs (source rank, target rank) that have rows to move; gradients go back by them."""


@attrs.frozen
class Token:
    """What one rank made of one microbatch of a stage: its ``rows``, their ``gradient``, or that of the ``weights``."""

    what: str
    stage: StageId
    rank: int
    microbatch: int

    def __str__(self) -> str:
        """Return it as messages show it."""
        return f"{self.what} of {stage_text(self.stage)}, microbatch {self.microbatch}, from rank {self.rank}"


@attrs.define(kw_only=True, eq=False)
class Buffer:
    """A posted receive: whom it still waits for, and what arrived in the place of each microbatch."""

    microbatches: tuple[int, ...]
    awaited: set[int]
    tokens: dict[int, set[Token]]


@attrs.define(kw_only=True, eq=False)
class Network:
    """All lines between ranks.

    Args:
        edges: edges by name.
        peers: which ranks exchange rows.
    """

    edges: Mapping[str, Edge]
    peers: Peers
    _pairs: dict[tuple[str, int], frozenset[tuple[int, int]]] = attrs.field(factory=dict, init=False)
    _lines: dict[tuple[str, bool, int, int], deque[Buffer]] = attrs.field(factory=dict, init=False)

    def is_gradient(self, message: Action) -> bool:
        """Tell whether a send or receive goes against its edge."""
        edge = self.edges[message.edge or ""]
        return message.stage_id == (edge.target if message.kind == "send" else edge.source)

    def partners(self, edge: str, stage: StageId, rank: int, microbatch: int) -> frozenset[int]:
        """Return who at the other end of ``edge`` has rows in common with ``rank``, which stands at ``stage``."""
        found = self._pairs.get((edge, microbatch))
        if found is None:
            found = self._pairs[edge, microbatch] = frozenset(self.peers(self.edges[edge], microbatch))
        at_source = self.edges[edge].source == stage
        return frozenset(pair[at_source] for pair in found if pair[not at_source] == rank)

    def post(self, message: Action, receiver: int) -> Buffer:
        """Put a buffer at the end of the line of each rank that has something to send to ``receiver``."""
        senders = self._all_partners(message, receiver)
        buffer = Buffer(
            microbatches=message.microbatches,
            awaited=set(senders),
            tokens={microbatch: set() for microbatch in message.microbatches},
        )
        for sender in senders:
            self._line(message, sender, receiver).append(buffer)
        return buffer

    def unposted(self, message: Action, sender: int) -> list[int]:
        """Return the ranks that ``sender`` has rows for and that have no free buffer on the line between them."""
        receivers = sorted(self._all_partners(message, sender))
        return [receiver for receiver in receivers if not self._line(message, sender, receiver)]

    def send(self, message: Action, sender: int, tokens: Sequence[Token]) -> list[int]:
        """Fill the first buffer of each line, by place as bytes would, and return whose they are.

        Raises:
            PlanError: a buffer is of another size.
        """
        receivers = sorted(self._all_partners(message, sender))
        for receiver in receivers:
            buffer = self._line(message, sender, receiver).popleft()
            if len(buffer.microbatches) != len(tokens):
                raise PlanError(
                    f"plan, rank {sender} ({action_text(message)})",
                    expected=f"what rank {receiver} has posted, {microbatches_text(buffer.microbatches)}",
                    got="a message of another size",
                )
            buffer.awaited.discard(sender)
            for place, token in zip(buffer.microbatches, tokens, strict=True):
                if receiver in self.partners(message.edge or "", message.stage_id, sender, token.microbatch):
                    buffer.tokens[place].add(token)
        return receivers

    def _all_partners(self, message: Action, rank: int) -> frozenset[int]:
        edge, stage = message.edge or "", message.stage_id
        return frozenset().union(*(self.partners(edge, stage, rank, m) for m in message.microbatches))

    def _line(self, message: Action, sender: int, receiver: int) -> deque[Buffer]:
        return self._lines.setdefault((message.edge or "", self.is_gradient(message), sender, receiver), deque())

"""Channels: an ordered stream of messages for each edge and direction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mimo.topology import Edge, ModuleGraph
from mimo.topology.collectives import backend_for, connect, connects_late
from mimo.topology.member_groups import GroupMaker

Messages: TypeAlias = Sequence[tuple[Tensor, int]]
"""Contiguous rows, each with the rank at the other end."""
Works: TypeAlias = Sequence[dist.Work]
"""What is waited for, one for each message; messages of a batch may share it."""
_PAIR = 2


@attrs.frozen(kw_only=True)
class Channel:
    """Where the messages of one edge and direction travel, in order.

    NCCL matches messages by their order on a communicator, so each channel is a group of its own there, and what a rank
    sends and receives of a microbatch is one batch, which is over when all its peers have come to theirs. Gloo matches
    by tag and lets nothing wait for anything else, so there all channels share the default group, and groups (threads
    and files) are saved.

    Args:
        group: None for the default group.
        tag: of all its messages.
        is_serial: whether the group does one batch after the other, so that sends and receives of one microbatch must
            not be apart.
    """

    group: dist.ProcessGroup | None
    tag: int
    is_serial: bool = False
    _known: dict[int, tuple[dist.ProcessGroup, int]] = attrs.field(factory=dict, init=False, eq=False, repr=False)
    """By peer, how it is reached."""

    def send(self, rows: Tensor, peer: int) -> dist.Work:
        """Start sending contiguous ``rows``, which must stay untouched until the work is done."""
        group, place = self._way_to(peer)
        return group.send([rows], place, self.tag)

    def receive(self, rows: Tensor, peer: int) -> dist.Work:
        """Start receiving into contiguous ``rows``."""
        group, place = self._way_to(peer)
        return group.recv([rows], place, self.tag)

    def _way_to(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """Return the group, and the peer's rank in it."""
        if peer not in self._known:
            group = self.group or distributed_c10d._get_default_group()  # noqa: SLF001 - as `dist.isend` finds it
            self._known[peer] = group, dist.get_group_rank(group, peer)
        return self._known[peer]

    def start(self, sends: Messages, receives: Messages) -> tuple[Works, Works]:
        """Start all that this rank sends and receives of a microbatch; rows must stay untouched until it is done.

        Returns:
            What is to be waited for, by send and by receive.
        """
        if not self.is_serial:
            return [self.send(*message) for message in sends], [self.receive(*message) for message in receives]
        messages = [(dist.isend, *message) for message in sends] + [(dist.irecv, *message) for message in receives]
        if not messages:
            return [], []
        works = dist.batch_isend_irecv(
            [dist.P2POp(op, rows, peer, group=self.group, tag=self.tag) for op, rows, peer in messages]
        )
        if len(works) == 1:  # of the whole batch
            works *= len(messages)
        return works[: len(sends)], works[len(sends) :]


def open_channels(
    graph: ModuleGraph, *, device: torch.device | None = None, timeout: timedelta | None = None
) -> Mapping[str, tuple[Channel, Channel]]:
    """Open the forward and the backward channel of every edge. Call it on every rank of the world.

    Where a channel has its own communicator, it is that of the ranks that talk: on an edge within a module this rank
    and its like at the other end, on an edge between modules the ranks of both ends. This rank makes those that it is
    in, and no backward one for an edge without gradients. Communicators of more than two ranks are used once here, in
    one order on all ranks, as their first use needs all members. Peers connect at their first message, for which both
    may have to wait: so plans are proved.

    Args:
        graph: has the edges.
        device: where the messages lie; None: in host memory.
        timeout: of every communicator; None: as the backend has it.
    """
    device = device or torch.device("cpu")
    backend = backend_for(device.type)
    if not connects_late(backend):
        tags = enumerate(graph.edges)
        return {
            edge.name: (Channel(group=None, tag=2 * index), Channel(group=None, tag=2 * index + 1))
            for index, edge in tags
        }
    rank, groups = dist.get_rank(), GroupMaker(backend=backend, timeout=timeout)
    shared: list[dist.ProcessGroup] = []

    def open_one(edge: Edge, way: str) -> Channel:
        ranks = next((ranks for ranks in talking_ranks(graph, edge) if rank in ranks), ())
        if len(ranks) < _PAIR or (way == "backward" and not edge.gradient):
            return Channel(group=None, tag=0)  # which carries nothing
        group = groups.make(ranks, purpose=f"{edge.name} {way}")
        if len(ranks) > _PAIR:
            shared.append(group)
        return Channel(group=group, tag=0, is_serial=True)

    channels = {edge.name: (open_one(edge, "forward"), open_one(edge, "backward")) for edge in graph.edges}
    connect(shared, device=device)
    return channels


def talking_ranks(graph: ModuleGraph, edge: Edge) -> Iterator[tuple[int, ...]]:
    """Yield the sets of ranks that exchange messages on an edge, each ascending; one of a single rank sends nothing.

    Within a module each rank talks to its like at the other end, and so it does where a tower hands rows to its own
    projector; between modules any rank may talk to any.
    """
    sources, targets = graph.stage_ranks(edge.source), graph.stage_ranks(edge.target)
    if edge.is_boundary and graph.by_name[edge.target.module].projector_of != edge.source.module:
        yield tuple(sorted({*sources, *targets}))
    else:
        yield from (tuple(sorted({*pair})) for pair in zip(sources, targets, strict=True))

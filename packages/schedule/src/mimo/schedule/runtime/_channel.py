"""Channels: one ordered line of messages for each edge and direction."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import timedelta

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.topology import Edge, ModuleGraph


@attrs.frozen(kw_only=True)
class Channel:
    """Where the messages of one edge and direction travel, in order.

    NCCL matches messages by their order on a communicator, so each channel is a group of its own there. Gloo matches
    by tag, so there all channels share the default group, and groups (threads and files) are saved.
    """

    group: dist.ProcessGroup | None
    tag: int

    def send(self, rows: Tensor, peer: int) -> dist.Work:
        """Start sending contiguous ``rows``, which must stay untouched until the work is done."""
        work = dist.isend(rows, peer, group=self.group, tag=self.tag)
        assert work is not None
        return work

    def receive(self, rows: Tensor, peer: int) -> dist.Work:
        """Start receiving into contiguous ``rows``."""
        work = dist.irecv(rows, peer, group=self.group, tag=self.tag)
        assert work is not None
        return work


def open_channels(graph: ModuleGraph, *, timeout: timedelta | None = None) -> Mapping[str, tuple[Channel, Channel]]:
    """Open the forward and the backward channel of every edge. Call it on every rank of the world.

    Where a channel has its own communicator, every pair that may ever talk exchanges a first message here, in one
    order on all ranks: NCCL connects a pair at its first message and holds up the caller until the peer is there too,
    which in the middle of a step could be never.

    Args:
        graph: has the edges.
        timeout: of every communicator; None: as the backend has it.
    """
    own_groups = dist.get_backend() != "gloo"
    return {
        edge.name: (
            _open(graph, edge, tag=2 * index, own_group=own_groups, timeout=timeout),
            _open(graph, edge, tag=2 * index + 1, own_group=own_groups, timeout=timeout),
        )
        for index, edge in enumerate(graph.edges)
    }


def _open(graph: ModuleGraph, edge: Edge, *, tag: int, own_group: bool, timeout: timedelta | None) -> Channel:
    if not own_group:
        return Channel(group=None, tag=tag)
    sources, targets = graph.stage_ranks(edge.source), graph.stage_ranks(edge.target)
    channel = Channel(group=dist.new_group(sorted({*sources, *targets}), timeout=timeout), tag=0)
    rank, first = dist.get_rank(), torch.zeros(1, device=torch.accelerator.current_accelerator())
    for source, target in itertools.product(sources, targets):
        if source != target and rank == source:
            channel.send(first, target).wait()
        elif source != target and rank == target:
            channel.receive(first, source).wait()
    return channel

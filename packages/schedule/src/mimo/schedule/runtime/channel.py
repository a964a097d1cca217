"""Channels: an ordered stream of messages for each edge and direction."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import timedelta

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.topology import Edge, ModuleGraph
from mimo.topology.collectives import backend_for, connects_late


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


def open_channels(
    graph: ModuleGraph, *, device: torch.device | None = None, timeout: timedelta | None = None
) -> Mapping[str, tuple[Channel, Channel]]:
    """Open the forward and the backward channel of every edge. Call it on every rank of the world.

    Where a channel has its own communicator, every pair that may ever talk exchanges a first message here, in one
    order on all ranks. Where the default group has a ``device_id``, as ours does, NCCL sends over the group's own
    communicator, otherwise over one that it makes for the pair. A pair's first message may hold up the caller until the
    peer is there too, which in the middle of a step could be never.

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

    def open_one(edge: Edge) -> Channel:
        if graph.by_name[edge.target.module].projector_of == edge.source.module:
            return Channel(group=None, tag=0)  # each rank hands rows to its own projector, and sends none
        return _open(graph, edge, backend=backend, device=device, timeout=timeout)

    return {edge.name: (open_one(edge), open_one(edge)) for edge in graph.edges}


def _open(graph: ModuleGraph, edge: Edge, *, backend: str, device: torch.device, timeout: timedelta | None) -> Channel:
    sources, targets = graph.stage_ranks(edge.source), graph.stage_ranks(edge.target)
    group = dist.new_group(sorted({*sources, *targets}), timeout=timeout, backend=backend)
    channel = Channel(group=group, tag=0)
    rank, first = dist.get_rank(), torch.zeros(1, device=device)
    for source, target in itertools.product(sources, targets):
        if source != target and rank == source:
            channel.send(first, target).wait()
        elif source != target and rank == target:
            channel.receive(first, source).wait()
    return channel

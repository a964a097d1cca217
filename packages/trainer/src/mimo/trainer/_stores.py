"""The key-value stores through which the processes of a run meet: one server, and clients of it."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch's own types don't say so
from torch.distributed.distributed_c10d import PrefixStore, Store


def host_store(host: str, port: int, listener: socket.socket | None = None) -> Store:
    """Serve a store from this process, for as long as the result is kept.

    Args:
        host: its address.
        port: its port.
        listener: a socket that listens there already, which the store takes over.
    """
    taken = None if listener is None else listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=taken)


def connect(host: str, port: int, prefix: str = "") -> Store:
    """Return a new client of the store; operations of one client wait for each other, those of two don't."""
    store: Store = TCPStore(host, port)
    return PrefixStore(prefix, store) if prefix else store

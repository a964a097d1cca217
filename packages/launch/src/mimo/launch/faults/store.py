"""The key-value stores through which the processes of a run meet: one server, and clients of it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch's own types don't say so
from torch.distributed.distributed_c10d import PrefixStore, Store

_SECONDS = 300.0
"""How long torch waits for a store, and for a key in it."""
_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
_ERROR = 2
"""The level at which torch logs no warnings."""


def host_store(host: str, port: int, listener: socket.socket | None = None, *, seconds: float = _SECONDS) -> Store:
    """Serve a store from this process for as long as the returned object lives.

    Args:
        host: its address.
        port: its port.
        listener: a socket that already listens on that port; the store takes it over.
        seconds: how long this process may take to connect to it.
    """
    taken = None if listener is None else listener.detach()
    time = timedelta(seconds=min(seconds, _SECONDS))
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=taken, timeout=time)
    store.set_timeout(timedelta(seconds=_SECONDS))
    return store


def connect(host: str, port: int, prefix: str = "", *, seconds: float = _SECONDS) -> Store:
    """Return a new client of the store; operations of one client wait for each other, those of two don't.

    Args:
        host: its address.
        port: its port.
        prefix: precedes all keys that the client uses.
        seconds: how long it tries to connect, again and again, before it fails.
    """
    store: Store = TCPStore(host, port, timeout=timedelta(seconds=min(seconds, _SECONDS)))
    store.set_timeout(timedelta(seconds=_SECONDS))
    return PrefixStore(prefix, store) if prefix else store


@functools.cache
def _log_level() -> ctypes.c_int | None:
    """Return torch's own variable of its log level; None for a build with another logger."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(_LIBRARY)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep torch from logging C++ frames while a store is used; who loses the store reports it in one line.

    Torch reads its log level from the environment when it is loaded, and has no function that sets it.
    """
    level = _log_level()
    if level is None:
        yield
        return
    before = level.value
    level.value = max(before, _ERROR)
    try:
        yield
    finally:
        level.value = before

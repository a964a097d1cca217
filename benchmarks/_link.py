"""A slower link between the processes of this machine: a network of this process's own, as fast as the kernel lets it.

Everything sent over loopback, both ways together, passes a token bucket (``tc``). Nothing that is measured changes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

CLONE_NEWNET = 0x40000000


def limit_loopback(gbit: float) -> None:
    """Leave the network for one of this process and its children, in which loopback has so many gigabits a second.

    Raises:
        OSError: this user may not, or the tools are not there.
        subprocess.CalledProcessError: the kernel lacks the token bucket.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    bucket = ["rate", f"{gbit}gbit", "burst", "1mb", "latency", "400ms"]
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *bucket],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603  # fixed words and a number

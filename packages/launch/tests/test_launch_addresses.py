"""On which addresses the ranks of one machine listen: on none that another machine can reach."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import launched, start


def listening(pids: Sequence[int]) -> set[str]:
    """Return the addresses on which processes listen, or from which they have connected, as text."""
    sockets = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(path.readlink()))
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in sockets:
                raw = bytes.fromhex(words[1].partition(":")[0])
                # Each four bytes are a number in the machine's order.
                turned = b"".join(
                    raw[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(raw), 4)
                )
                found.add(socket.inet_ntop(family, turned))
    return found


def own_address() -> str:
    """Return an address of this machine other than where local runs meet; that of its network, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.2"


def test_gloo_is_handed_the_loopback_of_local_runs(tmp_path: Path) -> None:
    """Whatever the environment of the command says, which is meant for runs on several machines."""
    body = """
    name = os.environ["GLOO_SOCKET_IFNAME"]
    is_loopback = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16) & 8  # IFF_LOOPBACK
    assert os.environ["NCCL_SOCKET_IFNAME"] == name
    say(together(), bool(is_loopback))
"""
    elsewhere = {"GLOO_SOCKET_IFNAME": "none0", "NCCL_SOCKET_IFNAME": "none0"}
    assert launched(tmp_path, body, environ=elsewhere, world=2) == (0, "2 True\n" * 2, "")


def test_local_runs_are_reached_from_this_machine_alone(tmp_path: Path) -> None:
    """Whatever the host's name resolves to: the first group, later ones, those of gloo alone, and meshes."""
    body = f"""
    from torch.distributed.device_mesh import DeviceMesh

    together()
    later, own = dist.new_group([0, 1]), dist.new_group(backend="gloo")
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))
    for group in (later, own, mesh.get_group("a")):
        dist.all_reduce(torch.ones(()), group=group)
    together()
    say("ready", socket.gethostname())
    signal.pause()

import ctypes, socket
if __name__ == "__main__":
    if ctypes.CDLL(None).unshare(0x04000000 | (0 if os.getuid() == 0 else 0x10000000)):  # CLONE_NEWUTS, CLONE_NEWUSER
        print("ready to be skipped", flush=True)
        sys.exit(0)
    socket.sethostname({own_address()!r})
"""
    with start(tmp_path, body, world=2) as started:
        started.wait_for("ready")
        if "to be skipped" in started.printed[started.out].decode():
            pytest.skip("no namespace for another name of the host can be made here")
        while started.printed[started.out].count(b"ready") < 2:
            started._listen(time.monotonic() + 60)  # until the other rank is there too
        assert started.printed[started.out].decode() == f"ready {own_address()}\n" * 2
        found = listening([started.pid, *started.workers()])
    assert found <= {"127.0.0.1", "::ffff:127.0.0.1"}, found
    assert "127.0.0.1" in found

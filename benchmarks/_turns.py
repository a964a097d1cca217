"""What the benchmark `checkpoint` saves and loads, plain files, and turns that all ranks take together."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

WIDTH = 2048
MIB = 1 << 20
PLAIN_BYTES = 8 * MIB  # of a read or write of the plain way
Seconds = Mapping[str, list[float]]


class Turns:
    """Measures ways of doing something in turns, each on all ranks at once.

    Args:
        rounds: turns of each.
        folder: what they write is here; on all ranks.
    """

    def __init__(self, rounds: int, folder: Path) -> None:
        self.rounds = rounds
        self.folder = folder

    def take(self, ways: Mapping[str, Callable[[Path], object]]) -> Seconds:
        """Return the seconds of each turn; each way gets a folder of its own, new each turn."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.rounds + 1):
            for number, (name, way) in enumerate(ways.items()):
                place = self.folder / f"{turn}_{number}"
                place.mkdir(exist_ok=True)
                seconds = self.time(functools.partial(way, place))
                if turn:  # the first one makes buffers and imports
                    found[name].append(seconds)
                self.meet()
                shutil.rmtree(place, ignore_errors=True)
        return found

    def time(self, work: Callable[[], object]) -> float:
        """Return the slowest rank's seconds."""
        self.meet()
        begun = time.perf_counter()
        work()
        seconds = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    @staticmethod
    def meet() -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()


def make_tensors(mib: int) -> dict[str, torch.Tensor]:
    """Return matrices of 16 MiB and a vector for each, some MiB in all."""
    found = {}
    for layer in range(max(1, mib * MIB // (4 * WIDTH * WIDTH))):
        found[f"layers.{layer}.weight"] = torch.rand(WIDTH, WIDTH)
        found[f"layers.{layer}.norm"] = torch.rand(WIDTH)
    return found


def cut(tensors: Mapping[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    """Return this rank's part of each matrix, cut along a dim; rank 0 holds the vectors too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() > dim:
            part = tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()
            found[name] = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    return found


def cut_by_layers(tensors: Mapping[str, torch.Tensor], parts: int) -> dict[str, torch.Tensor]:
    """Return this rank's part of each matrix, cut into so many by rows and by columns in turn, as tensor ranks do."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // parts, parts))
    found: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate((name, one) for name, one in tensors.items() if one.dim() > 1):
        part = tensor.chunk(parts, number % 2)[dist.get_rank() % parts].clone()
        found[name] = DTensor.from_local(part, mesh, [Replicate(), Shard(number % 2)], run_check=False)
    return found


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of them."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def view(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def write_plain(tensors: Mapping[str, torch.Tensor], place: Path) -> None:
    """Write what this rank holds to one file, and sync it."""
    with (place / str(os.getpid())).open("xb", buffering=0) as file:
        for part in map(view, local_parts(tensors.values())):
            for at in range(0, len(part), PLAIN_BYTES):
                file.write(part[at : at + PLAIN_BYTES])
        os.fsync(file.fileno())


def read_plain(tensors: Mapping[str, torch.Tensor], path: Path, _place: Path) -> None:
    """Read as many bytes as this rank holds from a file into these tensors."""
    with path.open("rb", buffering=0) as file:
        for part in map(view, local_parts(tensors.values())):
            for at in range(0, len(part), PLAIN_BYTES):
                file.readinto(part[at : at + PLAIN_BYTES])


def ratios(seconds: Seconds, one: str, other: str) -> list[float]:
    """Return of each turn how long ``one`` took over ``other``."""
    return [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]


def show(what: str, seconds: Seconds) -> None:
    """Print medians on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shown = ", ".join(f"{name} {statistics.median(values):.3f} s" for name, values in seconds.items())
        print(f"{what}: {shown}", flush=True)

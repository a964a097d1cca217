"""How many bytes a second the memory of this machine gives: the best of STREAM's loops, and of its scaling in place.

The loops are McCalpin's (1995, "Memory bandwidth and machine balance in current high performance computers"), by
torch's kernels; bytes are counted as there: what a loop reads and what it writes. Before a processor overwrites memory
it fetches what is there, unless stores go past the cache, as none of torch's do. So copy, add and triad move half or a
third more than is counted, and where memory is the limit scaling in place comes first: it fetches only what it reads.
Arrays are much larger than caches, and lie on huge pages where the system gives them.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

SIZES = (2**25, 2**27)
"""Numbers of an array."""
TURNS = 3
"""Of each loop, of which the fastest counts."""


class Bandwidth:
    """Arrays, and loops over them."""

    def __init__(self) -> None:
        self._arrays = [_array(max(SIZES)) for _ in range(3)]

    def measure(self) -> Mapping[str, float]:
        """Return bytes a second of each loop, the better of the sizes, by as many threads as torch now uses."""
        found: dict[str, float] = {}
        for size in SIZES:
            a, b, c = (array[:size] for array in self._arrays)
            loops: Mapping[str, tuple[int, Callable[[Tensor, Tensor, Tensor], object]]] = {
                "scale in place": (8, lambda a, _b, _c: a.mul_(0.999)),
                "copy": (8, lambda a, b, _c: b.copy_(a)),
                "add": (12, lambda a, b, c: torch.add(a, b, out=c)),
                "triad": (12, lambda a, b, c: torch.add(a, b, alpha=3, out=c)),
                "add in place": (12, lambda a, b, _c: b.add_(a)),
            }
            for name, (bytes_, loop) in loops.items():
                for _ in range(TURNS):
                    began = time.perf_counter()
                    loop(a, b, c)
                    speed = bytes_ * size / (time.perf_counter() - began)
                    found[name] = max(speed, found.get(name, 0.0))
        return found


def _array(numbers: int) -> Tensor:
    """Return fp32 zeros on huge pages, if the system has them."""
    memory = mmap.mmap(-1, 4 * numbers)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).zero_()

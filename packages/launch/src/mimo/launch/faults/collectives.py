"""What torch's flight recorder knows of the last collectives and messages of this process."""

from __future__ import annotations

from torch._C import _distributed_c10d

RECORDED = ("TORCH_FR_BUFFER_SIZE", "2000")
"""How many collectives a process notes down, the last ones: some microseconds each."""
_NAMES = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions that return them, of a torch built with NCCL, and of any."""


def recorded_collectives() -> bytes:
    """Return as JSON what has been noted down: of each its group, kind, sizes, and whether it began and ended."""
    names = [name for name in _NAMES if hasattr(_distributed_c10d, name)]
    return bytes(getattr(_distributed_c10d, names[0])(includeCollectives=True, onlyActive=False)) if names else b""

"""The most bytes of a GPU that something has held, beside what others held before it."""

from __future__ import annotations

import gc

import torch
from _case import Case


class DeviceMemory:
    """Begins to count what is held; what nothing needs any more is given back first."""

    def __init__(self, case: Case) -> None:
        gc.collect()
        torch.compiler.reset()  # compiled code holds on to its modules
        self._case, self._before = case, 0
        if case.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(case.device)
            self._before = torch.cuda.memory_allocated(case.device)

    def peak(self) -> int | None:
        """Return the most bytes that were held since; None where nobody counts."""
        return torch.cuda.max_memory_allocated(self._case.device) - self._before if self._case.is_cuda else None

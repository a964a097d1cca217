"""The most operations a second that a rank's device can do: as settings say, or of GPUs that are well known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch

from mimo.optimizer import Precision
from mimo.trainer.config.settings import RunSettings

_TERA = 1e12


def _of(half: float, fp32: float | None = None, *, bf16: bool = True) -> Mapping[Precision, float]:
    found: dict[Precision, float] = {"fp16": half}
    if bf16:
        found["bf16"] = half
    if fp32 is not None:
        found["fp32"] = fp32
    return MappingProxyType(found)


KNOWN: tuple[tuple[frozenset[str], Mapping[Precision, float]], ...] = (
    (frozenset({"B200"}), _of(2250)),
    (frozenset({"GH200"}), _of(989, 67)),
    (frozenset({"H200", "NVL"}), _of(835, 60)),
    (frozenset({"H200"}), _of(989, 67)),
    (frozenset({"H100", "PCIe"}), _of(756, 51)),
    (frozenset({"H100", "HBM2e"}), _of(756, 51)),  # the same, as some drivers call it
    (frozenset({"H100", "NVL"}), _of(835, 60)),
    (frozenset({"H100"}), _of(989, 67)),
    (frozenset({"A100"}), _of(312, 19.5)),
    (frozenset({"L40S"}), _of(362, 91.6)),
    (frozenset({"L4"}), _of(121, 30.3)),
    (frozenset({"A10"}), _of(125, 31.2)),
    (frozenset({"V100", "SXM2"}), _of(125, 15.7, bf16=False)),
    (frozenset({"V100", "PCIE"}), _of(112, 14, bf16=False)),
    (frozenset({"T4"}), _of(65, 8.1, bf16=False)),
)
"""Words of a GPU's name, and 10^12 operations a second of dense products by precision, from NVIDIA's data sheets
(twice as many with sparsity); fp32 without TF32, as torch multiplies by default. The first entry counts whose words
are all in the name. A part of a GPU (MIG) is none of these."""


def peak_of(run: RunSettings, device: torch.device) -> float:
    """Return the most operations a second of this rank's device in the precision of the run; 0 if nobody knows."""
    if run.peak_tflops:
        return run.peak_tflops * _TERA
    return known_peak(torch.cuda.get_device_name(device), run.precision) if device.type == "cuda" else 0.0


def known_peak(name: str, precision: Precision) -> float:
    """Return the most operations a second of a GPU of this name; 0 if it is not well known."""
    words = frozenset(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return 0.0
    return _TERA * next((peaks.get(precision, 0.0) for fits, peaks in KNOWN if fits <= words), 0.0)

"""The most operations a second that a rank's device can do: as settings say, or of GPUs that are well known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch

from mimo.optimizer import Precision
from mimo.trainer.config.settings import RunSettings

_TERA = 1e12


def _of(half: float, fp32: float = 0.0, tf32: float = 0.0, *, bf16: bool = True) -> Mapping[str, float]:
    return MappingProxyType({"fp16": half, "bf16": half if bf16 else 0.0, "fp32": fp32, "tf32": tf32 or fp32})


KNOWN: tuple[tuple[frozenset[str], Mapping[str, float]], ...] = (
    (frozenset({"B200"}), _of(2250, tf32=1125)),
    (frozenset({"GH200"}), _of(989, 67, 494.5)),
    (frozenset({"H200", "NVL"}), _of(835, 60, 417.5)),
    (frozenset({"H200"}), _of(989, 67, 494.5)),
    (frozenset({"H100", "PCIe"}), _of(756, 51, 378)),
    (frozenset({"H100", "HBM2e"}), _of(756, 51, 378)),  # the same, as some drivers call it
    (frozenset({"H100", "NVL"}), _of(835, 60, 417.5)),
    (frozenset({"H100"}), _of(989, 67, 494.5)),
    (frozenset({"A100"}), _of(312, 19.5, 156)),
    (frozenset({"L40S"}), _of(362, 91.6, 183)),
    (frozenset({"L4"}), _of(121, 30.3, 60)),
    (frozenset({"A10"}), _of(125, 31.2, 62.5)),
    (frozenset({"V100", "SXM2"}), _of(125, 15.7, bf16=False)),
    (frozenset({"V100", "PCIE"}), _of(112, 14, bf16=False)),
    (frozenset({"T4"}), _of(65, 8.1, bf16=False)),
)
"""Words of a GPU's name, and 10^12 operations a second of dense products by what they read, from NVIDIA's data sheets
(twice as many with sparsity): fp16 and bf16, fp32 as torch multiplies by default, and fp32 as TF32, which GPUs before
the A100 don't have. 0 is what nobody knows. The first entry counts whose words are all in the name. A part of a GPU
(MIG) is none of these."""


def peak_of(run: RunSettings, device: torch.device) -> float:
    """Return the most operations a second of this rank's device in what the run's products read; 0 if nobody knows."""
    if run.peak_tflops:
        return run.peak_tflops * _TERA
    if device.type != "cuda":
        return 0.0
    return known_peak(torch.cuda.get_device_name(device), run.precision, tf32=run.tf32)


def known_peak(name: str, precision: Precision, *, tf32: bool = False) -> float:
    """Return the most operations a second of a GPU of this name; 0 if it is not well known.

    Args:
        name: as its driver calls it.
        precision: in which layers compute.
        tf32: whether products in fp32 may read TF32.
    """
    words = frozenset(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return 0.0
    kind = "tf32" if tf32 and precision == "fp32" else precision
    return _TERA * next((peaks[kind] for fits, peaks in KNOWN if fits <= words), 0.0)

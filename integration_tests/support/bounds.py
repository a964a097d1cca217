"""How far gradients may differ from a library's: further through scans and linear attention, whose sums cancel."""

from __future__ import annotations

from typing import Any

from mimo_transformers import HfDecoderConfig
from mimo_transformers.model.mixing import mixing
from mimo_transformers.model.small import described

GRADIENTS = 1e-5
"""By law 1, relative."""
SCANS = 1e-4
"""Through scans and linear attention."""


def gradient_bound(config: Any) -> float:
    """Return the bound for a language model: further where parts of its layers mix rows by other means than attention.

    Args:
        config: of any plugin.
    """
    return SCANS if isinstance(config, HfDecoderConfig) and mixing(described(config)).parts else GRADIENTS

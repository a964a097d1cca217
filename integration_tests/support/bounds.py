"""How far numbers may differ: gradients from a library's, and runs in bf16 from those in fp32.

Through scans and linear attention, whose sums cancel, gradients differ further.
"""

from __future__ import annotations

from typing import Any

from mimo_transformers import HfDecoderConfig
from mimo_transformers.model.mixing import mixing
from mimo_transformers.model.small import described

GRADIENTS = 1e-5
"""By law 1, relative."""
SCANS = 1e-4
"""Through scans and linear attention."""
BF16_TERMS = 1e-2
"""What is learned from teachers in bf16, each part of the loss by itself, relative to fp32."""
BF16_GRADIENTS = 2**-5
"""All gradients of a step in bf16 as one vector, relative to fp32, or to those of labels alone where these are larger:
what ids teach is a difference of probabilities, each of which is rounded as those of labels are."""


def gradient_bound(config: Any) -> float:
    """Return the bound for a language model: further where parts of its layers mix rows by other means than attention.

    Args:
        config: of any plugin.
    """
    return SCANS if isinstance(config, HfDecoderConfig) and mixing(described(config)).parts else GRADIENTS

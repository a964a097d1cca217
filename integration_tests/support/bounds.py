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
BF16_TAUGHT_TERMS = 1e-2
"""What a student learns from teachers in the first step in bf16: each divergence and each loss by hidden rows by
itself, relative to fp32. Of six seeds the farthest was 6.2e-3 off, a divergence."""
BF16_TAUGHT_GRADIENTS = 2.5e-2
"""All gradients of that step as one vector, relative to fp32, or to those of labels alone where these are larger: what
ids teach is a difference of probabilities, each of which is rounded as those of labels are. The farthest was 1.22e-2
off."""
BF16_MADE_TERMS = 1.2e-3
"""The loss of a generator beside labels in three steps in bf16, relative to fp32. Of six seeds the farthest was 5.6e-4
off."""
BF16_MADE_GRADIENTS = 2**-5
"""All gradients of the first of these steps as one vector, relative to fp32. The farthest was 1.6e-2 off."""
FP16_MADE_TERMS = 1e-3
"""As `BF16_MADE_TERMS`, in fp16, of two generators beside a teacher too, where a step has few items to make: the
farthest was 4.5e-4 off, and 2.1e-5 of a generator alone."""
FP16_MADE_GRADIENTS = 5e-3
"""As `BF16_MADE_GRADIENTS`, in fp16, which rounds eight times less: the farthest was 2.4e-3 off."""


def gradient_bound(config: Any) -> float:
    """Return the bound for a language model: further where parts of its layers mix rows by other means than attention.

    Args:
        config: of any plugin.
    """
    return SCANS if isinstance(config, HfDecoderConfig) and mixing(described(config)).parts else GRADIENTS

"""Encoders made of shared layers.

What is named here is free of torch; `layers`, `packed_rows`, `projectors` and `patches` need it.
"""

from mimo.model.encoder.support import packed_context, packed_recompute, packed_seam, packed_stages, packed_tensor

__all__ = [
    "packed_context",
    "packed_recompute",
    "packed_seam",
    "packed_stages",
    "packed_tensor",
]

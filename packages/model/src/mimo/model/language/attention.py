"""Causal attention with rotary positions and grouped queries.

Shapes: T rows, H hidden, N query heads, K key-value heads, D head width; with several tensor ranks N and K are this
rank's.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from mimo.model.attention import Segments, attend
from mimo.model.language.cache import LayerCache
from mimo.model.language.rotary import Rotation
from mimo.model.layers import Linear, RMSNorm
from mimo.model.parallel import TensorAxis
from mimo.model.spec import AttentionConfig


class Attention(nn.Module):
    """Causal attention within each sample.

    Attributes:
        axis: over which heads are split.
        shared: for each query head of this rank its key-value head among those computed here; None where each
            serves equally many in a row, so that attention itself can tell.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.key_value_heads, config.head_width
        queries, keys = config.heads * config.head_width, config.key_value_heads * config.head_width
        self.query = Linear(config.hidden, queries, bias=config.biased_inputs)
        self.key = Linear(config.hidden, keys, bias=config.biased_inputs)
        self.value = Linear(config.hidden, keys, bias=config.biased_inputs)
        norms = config.query_key_norm
        self.query_norm = RMSNorm(config.head_width, eps=config.norm_eps) if norms else None
        self.key_norm = RMSNorm(config.head_width, eps=config.norm_eps) if norms else None
        self.output = Linear(queries, config.hidden, bias=config.attention_bias)
        self.axis = TensorAxis.single()
        self.shared: tuple[int, ...] | None = None

    def forward(
        self, x: Tensor, segments: Segments, rotation: Rotation | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Return [T, H] of ``x`` [T, H]; with ``cache`` its rows go on from those that it has seen."""
        x = self.axis.enter(x)
        query, key, value = (
            project(x).unflatten(1, (-1, self.head_width)) for project in (self.query, self.key, self.value)
        )
        return self.finish(query, key, value, segments, rotation, cache)

    def finish(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        rotation: Rotation | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return [T, H] of the three products: cheap to compute again, beside what it keeps."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotation.turn(query, key)
        if cache is not None:
            key, value = cache.extend("key", key), cache.extend("value", value)
        attended = attend(query, key, value, segments, heads=self.shared)  # [T, N, D]
        return cast("Tensor", self.output(attended.flatten(1), leave=self.axis))

"""A decoder-only language model over packed rows: pre-norm, rotary positions, grouped-query attention, SwiGLU.

As in Llama (Touvron et al. 2023, arXiv:2302.13971); `DecoderConfig` has what sets other families apart. With
``experts``, `Moe` takes the place of the feed-forward part.
It reads as if it ran on one rank: `language/tensor_plan.py` splits it, by handing a `TensorAxis` to the parts
that enter and leave shared work. With several context ranks, T is this rank's share of the rows, and only `attend`
looks beyond it.
Shapes: T rows, H hidden; with sequence parallelism T outside of enter .. leave is this rank's slice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mimo.model.attention import Segments
from mimo.model.decoder.config import DecoderConfig
from mimo.model.draws import Dropout
from mimo.model.language import (
    Attention,
    DecodeCache,
    LanguageBatch,
    LanguageStage,
    LayerCache,
    Mlp,
    Moe,
    Rotation,
    Routing,
    add_router_losses,
)
from mimo.model.layers import Choices, RMSNorm
from mimo.model.spec import Stage


class Layer(nn.Module):
    """Attention, then feed-forward or a mixture of experts, each on normed rows and added to them."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, eps=config.norm_eps)
        mixed = index in config.expert_layers
        self.mlp = Moe(config) if mixed else Mlp(config, config.intermediate)
        self.attention_drop = Dropout(config.hidden_dropout)
        self.mlp_drop = Dropout(config.hidden_dropout)

    def forward(
        self,
        x: Tensor,
        segments: Segments,
        rotation: Rotation,
        routing: Routing | None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Choices | None]:
        """Return [T, H] of ``x`` [T, H], and which experts were chosen; ``routing`` is needed where there are some.

        Nothing but what it returns, and ``cache``, changes: recomputation repeats it, where there is none.
        """
        x = x + self.attention_drop(self.attention(self.attention_norm(x), segments, rotation, cache))
        y = self.mlp_norm(x)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp_drop(self.mlp(y)), None
        y, choices = self.mlp(y, routing)
        return x + self.mlp_drop(y), choices


class Decoder(LanguageStage):
    """One pipeline stage of the decoder, a `mimo.model.runtime.LanguageModule`."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(
            config,
            stage,
            lambda index: Layer(config, index),
            lambda: [Layer(config, config.layers - 1)],
            deepstack=config.deepstack,
        )
        self.config = config
        if stage.is_first:
            self.embedding_drop = Dropout(config.embedding_dropout)

    def forward(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return this stage's rows [T, H]; see `LanguageModule`."""
        hidden, deep = self.begin_deep(self.begin(batch, rows, hidden))
        if self.stage.is_first:
            hidden = self.embedding_drop(hidden)
        cache = DecodeCache.of(batch)
        segments = self._segments(batch, cache)
        rotation = Rotation.of(batch, self.config)
        mixed = any(int(index) in self.config.expert_layers for index in self.layers)
        mixed = mixed or (self.config.experts > 0 and self.predicts_mtp(batch))
        routing = Routing.of(batch, self.axis) if mixed else None
        chosen: dict[str, Choices] = {}
        for index, layer in self.layers.items():
            hidden, choices = layer(hidden, segments, rotation, routing, cache and cache.layer(index))
            hidden = deep.add(int(index), hidden)
            if choices is not None:
                chosen[f"layers.{index}"] = choices
        if cache is not None:
            cache.end()
        hidden = self.end(hidden)
        chosen |= self.add_mtp_losses(batch, hidden, lambda layer, x: layer(x, segments, rotation, routing))
        if routing is not None:
            add_router_losses(routing, chosen, batch=batch, config=self.config, experts=self.expert_axis)
        return deep.join(hidden, stop=self.span.stop)

    def new_decode_cache(self) -> DecodeCache:
        """Return an empty KV cache of as many rows as the sliding window lets a row see."""
        window = self.config.sliding_window
        return DecodeCache(max_rows=window - 1 if window else None)

    def _segments(self, batch: LanguageBatch, cache: DecodeCache | None) -> Segments:
        window, rows, device = self.config.sliding_window, batch.tokens.shape[0], batch.tokens.device
        if cache is not None:
            return cache.segments(window)
        return Segments.of(batch.lengths, causal=True, window=window, rows=rows, device=device, context=self.context)

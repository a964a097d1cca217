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
from mimo.model.language import (
    Attention,
    LanguageBatch,
    LanguageStage,
    LayerMemory,
    Memory,
    Mlp,
    Moe,
    Rotation,
    Routing,
    tell,
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

    def forward(
        self,
        x: Tensor,
        segments: Segments,
        rotation: Rotation,
        routing: Routing | None,
        memory: LayerMemory | None = None,
    ) -> tuple[Tensor, Choices | None]:
        """Return [T, H] of ``x`` [T, H], and which experts were chosen; ``routing`` is needed where there are some.

        Nothing but what it returns, and ``memory``, changes: recomputation repeats it, where there is none.
        """
        x = x + self.attention(self.attention_norm(x), segments, rotation, memory)
        y = self.mlp_norm(x)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp(y), None
        y, choices = self.mlp(y, routing)
        return x + y, choices


class Decoder(LanguageStage):
    """One pipeline stage of the decoder, a `mimo.model.runtime.LanguageModule`."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage, lambda index: Layer(config, index), lambda: [Layer(config, config.layers - 1)])
        self.config = config

    def forward(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return this stage's rows [T, H]; see `LanguageModule`."""
        hidden = self.begin(batch, rows, hidden)
        memory = Memory.of(batch)
        segments = self._segments(batch, memory)
        rotation = Rotation.of(batch, self.config)
        mixed = any(int(index) in self.config.expert_layers for index in self.layers)
        mixed = mixed or (self.config.experts > 0 and self.looks_further(batch))
        routing = Routing.of(batch, self.axis) if mixed else None
        chosen: dict[str, Choices] = {}
        for index, layer in self.layers.items():
            hidden, choices = layer(hidden, segments, rotation, routing, memory and memory.layer(index))
            if choices is not None:
                chosen[f"layers.{index}"] = choices
        if memory is not None:
            memory.seen += len(batch.tokens)
        hidden = self.end(hidden)
        chosen |= self.look_further(batch, hidden, lambda layer, x: layer(x, segments, rotation, routing))
        if routing is not None:
            tell(routing, chosen, batch=batch, config=self.config, experts=self.expert_axis)
        return hidden

    def remember(self) -> Memory:
        """Return a new memory, see `Remembering`: of keys and values of as many rows as are looked at."""
        window = self.config.sliding_window
        return Memory(most=window - 1 if window else None)

    def _segments(self, batch: LanguageBatch, memory: Memory | None) -> Segments:
        window, rows, device = self.config.sliding_window, batch.tokens.shape[0], batch.tokens.device
        if memory is not None:
            return Segments.continued(rows, before=memory.held, window=window, device=device)
        return Segments.of(batch.lengths, causal=True, window=window, rows=rows, device=device, context=self.context)

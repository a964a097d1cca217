"""A language model of unlike layers: Mamba-2, mixtures of experts, attention and dense feed-forward parts by a pattern.

As in Nemotron-H (NVIDIA 2025, arXiv:2504.03624): one mixer a layer, on normed rows and added to them; attention knows
no positions, since the Mamba-2 layers tell what came before what.
Shapes: T rows, H hidden; with sequence parallelism T outside of the mixers is this rank's slice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mimo.model.attention import Segments
from mimo.model.hybrid.config import ATTENTION, EXPERTS, MAMBA, HybridConfig
from mimo.model.hybrid.mamba import Mamba
from mimo.model.hybrid.sequences import Sequences
from mimo.model.language import (
    Attention,
    DecodeCache,
    LanguageBatch,
    LanguageStage,
    LayerCache,
    Mlp,
    Moe,
    Routing,
    add_router_losses,
)
from mimo.model.layers import Choices, RMSNorm
from mimo.model.spec import Stage


class HybridLayer(nn.Module):
    """One mixer, of the kind that a letter of the pattern says."""

    def __init__(self, config: HybridConfig, letter: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps)
        match letter:
            case "M":
                self.mixer: nn.Module = Mamba(config)
            case "E":
                self.mixer = Moe(config.decoder)
            case "*":
                self.mixer = Attention(config.decoder)
            case _:
                self.mixer = Mlp(config.decoder, config.intermediate)

    def forward(
        self,
        x: Tensor,
        segments: Segments | None,
        sequences: Sequences | None,
        routing: Routing | None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Choices | None]:
        """Return [T, H] of ``x`` [T, H], and which experts were chosen; each kind needs one of the others, or none.

        Nothing but what it returns, and ``cache``, changes: recomputation repeats it, where there is none.
        """
        y, choices = self.norm(x), None
        if isinstance(self.mixer, Mamba):
            y = self.mixer(y, sequences, cache)
        elif isinstance(self.mixer, Attention):
            y = self.mixer(y, segments, cache=cache)
        elif isinstance(self.mixer, Moe):
            y, choices = self.mixer(y, routing)
        else:
            y = self.mixer(y)
        return x + y, choices


class MambaLayer(HybridLayer):
    """One whose mixer is `Mamba`: a graph would hold nothing but the norm before it and the sum behind it."""

    stays_eager = Mamba.stays_eager


class MoeLayer(HybridLayer):
    """One whose mixer is `Moe`, likewise."""

    stays_eager = Moe.stays_eager


_LAYERS: Mapping[str, type[HybridLayer]] = {MAMBA: MambaLayer, EXPERTS: MoeLayer}
"""By letter of the pattern, as far as they are no plain `HybridLayer`."""


def _layer(config: HybridConfig, letter: str) -> HybridLayer:
    return _LAYERS.get(letter, HybridLayer)(config, letter)


class Hybrid(LanguageStage):
    """One pipeline stage of the hybrid, a `mimo.model.runtime.LanguageModule`."""

    def __init__(self, config: HybridConfig, stage: Stage) -> None:
        super().__init__(
            config,
            stage,
            lambda index: _layer(config, config.pattern[index]),
            lambda: [_layer(config, letter) for letter in config.next_pattern],
        )
        self.config = config
        self.kinds = {config.pattern[int(index)] for index in self.layers}

    def forward(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return this stage's rows [T, H]; see `LanguageModule`."""
        hidden = self.begin(batch, rows, hidden)
        cache = DecodeCache.of(batch)
        kinds = self.kinds | set(self.config.next_pattern if self.predicts_mtp(batch) else "")
        segments = self._segments(batch, cache) if ATTENTION in kinds else None
        sequences = self._sequences(batch, cache) if MAMBA in kinds else None
        routing = Routing.of(batch, self.axis) if EXPERTS in kinds else None
        chosen: dict[str, Choices] = {}
        for index, layer in self.layers.items():
            hidden, choices = layer(hidden, segments, sequences, routing, cache and cache.layer(index))
            if choices is not None:
                chosen[f"layers.{index}"] = choices
        if cache is not None:
            cache.end()
        hidden = self.end(hidden)
        chosen |= self.add_mtp_losses(batch, hidden, lambda layer, x: layer(x, segments, sequences, routing))
        if routing is not None:
            add_router_losses(routing, chosen, batch=batch, config=self.config.decoder, experts=self.expert_axis)
        return hidden

    def new_decode_cache(self) -> DecodeCache:
        """Return an empty cache of keys and values, the last rows of convolutions, and states."""
        return DecodeCache()

    def _segments(self, batch: LanguageBatch, cache: DecodeCache | None) -> Segments:
        if cache is not None:
            return cache.segments()
        rows, device = batch.tokens.shape[0], batch.tokens.device
        return Segments.of(batch.lengths, causal=True, rows=rows, device=device, context=self.context)

    def _sequences(self, batch: LanguageBatch, cache: DecodeCache | None) -> Sequences:
        return Sequences.of(
            batch.lengths,
            rows=batch.tokens.shape[0],
            chunk=self.config.mamba_chunk,
            step=None if cache is None else cache.step,
            device=batch.tokens.device,
            context=self.context,
        )

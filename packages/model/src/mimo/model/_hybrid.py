"""A language model of unlike layers: Mamba-2, mixtures of experts, attention and dense feed-forward parts by a pattern.

As in Nemotron-H (NVIDIA 2025, arXiv:2504.03624): one mixer a layer, on normed rows and added to them; attention knows
no positions, since the Mamba-2 layers tell what came before what.
Shapes: T rows, H hidden; with sequence parallelism T outside of the mixers is this rank's slice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mimo.model._decoder import Attention
from mimo.model._experts import Moe
from mimo.model._hybrid_config import ATTENTION, EXPERTS, MAMBA, HybridConfig
from mimo.model._language_stage import LanguageStage
from mimo.model._mamba import Mamba
from mimo.model._mlp import Mlp
from mimo.model._routing import Routing, tell
from mimo.model._specs import Stage
from mimo.model.runtime import Choices, LanguageBatch, RMSNorm, Segments, Sequences


class HybridLayer(nn.Module):
    """One mixer, of the kind that the pattern says."""

    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden, eps=config.norm_eps)
        match config.pattern[index]:
            case "M":
                self.mixer: nn.Module = Mamba(config)
            case "E":
                self.mixer = Moe(config.decoder)
            case "*":
                self.mixer = Attention(config.decoder)
            case _:
                self.mixer = Mlp(config.decoder, config.intermediate)

    def forward(
        self, x: Tensor, segments: Segments | None, sequences: Sequences | None, routing: Routing | None
    ) -> tuple[Tensor, Choices | None]:
        """Return [T, H] of ``x`` [T, H], and which experts were chosen; each kind needs one of the others, or none.

        Nothing but what it returns changes: recomputation repeats it.
        """
        y, choices = self.norm(x), None
        if isinstance(self.mixer, Mamba):
            y = self.mixer(y, sequences)
        elif isinstance(self.mixer, Attention):
            y = self.mixer(y, segments)
        elif isinstance(self.mixer, Moe):
            y, choices = self.mixer(y, routing)
        else:
            y = self.mixer(y)
        return x + y, choices


class Hybrid(LanguageStage):
    """One pipeline stage of the hybrid, a `mimo.model.runtime.LanguageModule`."""

    def __init__(self, config: HybridConfig, stage: Stage) -> None:
        super().__init__(config, stage, lambda index: HybridLayer(config, index))
        self.config = config
        self.kinds = {config.pattern[int(index)] for index in self.layers}

    def forward(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return this stage's rows [T, H]; see `LanguageModule`."""
        hidden = self.begin(batch, rows, hidden)
        total, device, context = batch.tokens.shape[0], batch.tokens.device, self.context
        segments = sequences = None
        if ATTENTION in self.kinds:
            segments = Segments.of(batch.lengths, causal=True, rows=total, device=device, context=context)
        if MAMBA in self.kinds:
            chunk = self.config.mamba_chunk
            sequences = Sequences.of(batch.lengths, rows=total, chunk=chunk, device=device, context=context)
        routing = Routing.of(batch, self.axis) if EXPERTS in self.kinds else None
        chosen: dict[int, Choices] = {}
        for index, layer in self.layers.items():
            hidden, choices = layer(hidden, segments, sequences, routing)
            if choices is not None:
                chosen[int(index)] = choices
        if routing is not None:
            tell(routing, chosen, batch=batch, config=self.config.decoder, experts=self.expert_axis)
        return self.end(hidden)

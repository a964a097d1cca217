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
from mimo.model.language import Attention, LanguageBatch, LanguageStage, LayerMemory, Memory, Mlp, Moe, Routing, tell
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
        memory: LayerMemory | None = None,
    ) -> tuple[Tensor, Choices | None]:
        """Return [T, H] of ``x`` [T, H], and which experts were chosen; each kind needs one of the others, or none.

        Nothing but what it returns, and ``memory``, changes: recomputation repeats it, where there is none.
        """
        y, choices = self.norm(x), None
        if isinstance(self.mixer, Mamba):
            y = self.mixer(y, sequences, memory)
        elif isinstance(self.mixer, Attention):
            y = self.mixer(y, segments, memory=memory)
        elif isinstance(self.mixer, Moe):
            y, choices = self.mixer(y, routing)
        else:
            y = self.mixer(y)
        return x + y, choices


class Hybrid(LanguageStage):
    """One pipeline stage of the hybrid, a `mimo.model.runtime.LanguageModule`."""

    def __init__(self, config: HybridConfig, stage: Stage) -> None:
        super().__init__(
            config,
            stage,
            lambda index: HybridLayer(config, config.pattern[index]),
            lambda: [HybridLayer(config, letter) for letter in config.next_pattern],
        )
        self.config = config
        self.kinds = {config.pattern[int(index)] for index in self.layers}

    def forward(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return this stage's rows [T, H]; see `LanguageModule`."""
        hidden = self.begin(batch, rows, hidden)
        memory = Memory.of(batch)
        kinds = self.kinds | set(self.config.next_pattern if self.looks_further(batch) else "")
        segments = self._segments(batch, memory) if ATTENTION in kinds else None
        sequences = self._sequences(batch, memory) if MAMBA in kinds else None
        routing = Routing.of(batch, self.axis) if EXPERTS in kinds else None
        chosen: dict[str, Choices] = {}
        for index, layer in self.layers.items():
            hidden, choices = layer(hidden, segments, sequences, routing, memory and memory.layer(index))
            if choices is not None:
                chosen[f"layers.{index}"] = choices
        if memory is not None:
            memory.seen += len(batch.tokens)
        hidden = self.end(hidden)
        chosen |= self.look_further(batch, hidden, lambda layer, x: layer(x, segments, sequences, routing))
        if routing is not None:
            tell(routing, chosen, batch=batch, config=self.config.decoder, experts=self.expert_axis)
        return hidden

    def remember(self) -> Memory:
        """Return a new memory, see `Remembering`: of keys and values, of the convolutions' last rows, and of states."""
        return Memory()

    def _segments(self, batch: LanguageBatch, memory: Memory | None) -> Segments:
        rows, device = batch.tokens.shape[0], batch.tokens.device
        if memory is not None:
            return Segments.continued(rows, before=memory.held, device=device)
        return Segments.of(batch.lengths, causal=True, rows=rows, device=device, context=self.context)

    def _sequences(self, batch: LanguageBatch, memory: Memory | None) -> Sequences:
        return Sequences.of(
            batch.lengths,
            rows=batch.tokens.shape[0],
            chunk=self.config.mamba_chunk,
            before=None if memory is None else memory.seen,
            device=batch.tokens.device,
            context=self.context,
        )

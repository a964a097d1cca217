"""A decoder-only language model over packed rows: pre-norm, rotary positions, grouped-query attention, SwiGLU.

As in Llama (Touvron et al. 2023, arXiv:2302.13971); with ``experts``, `Moe` takes the place of the feed-forward part.
It reads as if it ran on one rank: `_tensor_plan.py` says how it is split, by handing a `TensorAxis` to the parts that
enter and leave shared work. With several context ranks, T is this rank's share of the rows, and only `attend` looks
beyond it.
Shapes: T rows, H hidden, N query heads, K key-value heads, D head width, V vocabulary; with several tensor ranks, N, K
and V are this rank's, and with sequence parallelism T outside of enter .. leave is this rank's slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import attrs
import torch
from torch import Tensor, nn

from mimo.model._decoder_spec import DecoderConfig
from mimo.model._experts import Moe
from mimo.model._mlp import Mlp
from mimo.model._routing import Routing, tell
from mimo.model._specs import Stage
from mimo.model.runtime import (
    NO_LABEL,
    Choices,
    ContextAxis,
    Deferral,
    Embedding,
    ExpertAxis,
    LanguageBatch,
    Linear,
    RMSNorm,
    Segments,
    TensorAxis,
    attend,
    multiply,
    turn,
    vocabulary_argmax,
    vocabulary_cross_entropy,
)


@attrs.frozen(eq=False)
class Rotation:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): cosines and sines [T, 1, D / 2], once a microbatch."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, positions: Tensor, *, width: int, theta: float) -> Rotation:
        """Return the rotation of each row of ``positions`` [T]."""
        powers = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
        angles = positions.unsqueeze(1).float() * theta**-powers
        return cls(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))

    def turn(self, x: Tensor) -> Tensor:
        """Return ``x`` [T, N, D] turned: column i pairs with column i + D / 2, as in published weights."""
        return turn(x, self.cosines, self.sines)


class Attention(nn.Module):
    """Causal attention within each sample.

    Attributes:
        axis: over which heads are split.
        shared: for each query head of this rank its key-value head among those computed here; None where each
            serves equally many in a row, so that attention itself can tell.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        queries, keys = config.heads * config.head_width, config.key_value_heads * config.head_width
        self.query = Linear(config.hidden, queries, bias=config.attention_bias)
        self.key = Linear(config.hidden, keys, bias=config.attention_bias)
        self.value = Linear(config.hidden, keys, bias=config.attention_bias)
        self.output = Linear(queries, config.hidden, bias=config.attention_bias)
        self.axis = TensorAxis.single()
        self.shared: tuple[int, ...] | None = None

    def forward(self, x: Tensor, segments: Segments, rotation: Rotation) -> Tensor:
        """Return [T, H] of ``x`` [T, H]."""
        x = self.axis.enter(x)
        query, key, value = (
            project(x).unflatten(1, (-1, self.head_width)) for project in (self.query, self.key, self.value)
        )
        return self.finish(query, key, value, segments, rotation)

    def finish(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rotation: Rotation) -> Tensor:
        """Return [T, H] of the three products: cheap to compute again, beside what it keeps."""
        query, key = rotation.turn(query), rotation.turn(key)
        attended = attend(query, key, value, segments, heads=self.shared)  # [T, N, D]
        return cast("Tensor", self.output(attended.flatten(1), leave=self.axis))


class Layer(nn.Module):
    """Attention, then feed-forward or a mixture of experts, each on normed rows and added to them."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, eps=config.norm_eps)
        mixed = index in config.expert_layers
        self.mlp = Moe(config) if mixed else Mlp(config.hidden, config.intermediate, bias=config.mlp_bias)

    def forward(
        self, x: Tensor, segments: Segments, rotation: Rotation, routing: Routing | None
    ) -> tuple[Tensor, Choices | None]:
        """Return [T, H] of ``x`` [T, H], and which experts were chosen; ``routing`` is needed where there are some.

        Nothing but what it returns changes: recomputation repeats it.
        """
        x = x + self.attention(self.attention_norm(x), segments, rotation)
        y = self.mlp_norm(x)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp(y), None
        y, choices = self.mlp(y, routing)
        return x + y, choices


class Decoder(nn.Module):
    """One pipeline stage of the decoder, a `mimo.model.runtime.LanguageModule`.

    Attributes:
        axis: over which the vocabulary, and with sequence parallelism the rows, are split.
        context: over which each sample is split.
        expert_axis: over which the experts are spread.
        deferral: where the head's weight gradient may be put off.
    """

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.axis = TensorAxis.single()
        self.context = ContextAxis.single()
        self.expert_axis = ExpertAxis.single()
        self.deferral: Deferral | None = None
        if stage.is_first or (stage.is_last and config.tied):
            self.embedding = Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleDict({str(index): Layer(config, index) for index in stage.layers(config.layers)})
        if stage.is_last:
            self.norm = RMSNorm(config.hidden, eps=config.norm_eps)
            if not config.tied:
                self.head = Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return this stage's rows [T, H]; see `LanguageModule`."""
        if self.stage.is_first:
            hidden = self._embed(batch, rows)
        assert hidden is not None, "a later stage continues the rows of the one before"
        total, device = batch.tokens.shape[0], batch.tokens.device
        segments = Segments.of(batch.lengths, causal=True, rows=total, device=device, context=self.context)
        rotation = Rotation.of(batch.positions, width=self.config.head_width, theta=self.config.rope_theta)
        mixed = any(int(index) in self.config.expert_layers for index in self.layers)
        routing = Routing.of(batch, self.axis) if mixed else None
        chosen: dict[int, Choices] = {}
        for index, layer in self.layers.items():
            hidden, choices = layer(hidden, segments, rotation, routing)
            if choices is not None:
                chosen[int(index)] = choices
        if routing is not None:
            tell(routing, chosen, batch=batch, config=self.config, experts=self.expert_axis)
        return cast("Tensor", self.norm(hidden) if self.stage.is_last else hidden)

    def _embed(self, batch: LanguageBatch, rows: Mapping[str, Tensor]) -> Tensor:
        """Return text embeddings with the encoders' rows at their placeholders, [T, H].

        Encoders without rows here take part too: whether there is a backward, in which ranks may wait for each other,
        then never depends on the data.
        """
        hidden = cast("Tensor", self.embedding(batch.tokens))
        for name, given in rows.items():
            positions = batch.placeholders.get(name, batch.tokens[:0])
            here = positions
            if self.axis.splits_rows:
                span = self.axis.span(batch.tokens.shape[0])
                # Those of `given` follow one another, and so no device is asked how many they are.
                first = torch.searchsorted(positions, span.start)
                here = positions[first + torch.arange(len(given), device=positions.device)] - span.start
            hidden = hidden.index_copy(0, here, given.to(hidden.dtype))
        return hidden

    def losses(self, hidden: Tensor, labels: Tensor, labelled: Tensor | None = None) -> Tensor:
        """Return the loss of each row [T] in fp32, 0 without label; ``labels`` is [T], of all tensor ranks' rows."""
        if labelled is None:
            labelled = (labels != NO_LABEL).nonzero().squeeze(1)
        if self.axis.splits_rows:
            hidden = self.axis.enter(hidden).index_select(0, labelled)
        else:  # few rows have labels, and no others' gradients need to be summed
            hidden = self.axis.enter(hidden.index_select(0, labelled))
        logits = self._logits(hidden)
        found = vocabulary_cross_entropy(logits, labels[labelled], vocabulary=self.config.vocabulary, axis=self.axis)
        return found.new_zeros(labels.shape).index_copy(0, labelled, found)

    def greedy(self, hidden: Tensor) -> Tensor:
        """Return the likeliest next id of each row [T]."""
        return vocabulary_argmax(self.logits(hidden), vocabulary=self.config.vocabulary, axis=self.axis)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] of this rank's span of the vocabulary."""
        return self._logits(self.axis.enter(hidden))

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self.embedding.weight if self.config.tied else self.head.weight
        return multiply(hidden, weight, deferral=self.deferral)

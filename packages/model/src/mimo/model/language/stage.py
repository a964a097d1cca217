"""What the stages of all our language models have in common: embeddings before the layers, norm, head and loss after.

Shapes: T rows, H hidden, V vocabulary; with several tensor ranks V is this rank's, and with sequence parallelism T
outside of enter .. leave is this rank's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model.draws import DrawKeys, Drawn
from mimo.model.language.batch import NO_LABEL, LanguageBatch, MtpLabels
from mimo.model.language.deepstack import DeepRows
from mimo.model.language.mtp import MtpModule, Run
from mimo.model.layers import (
    Choices,
    DefersWeightGrads,
    Embedding,
    Linear,
    RMSNorm,
    WeightGradQueue,
    multiply,
)
from mimo.model.losses import (
    CrossEntropy,
    Divergence,
    Head,
    RowLoss,
    TopIds,
    chunked_losses,
    chunks_of,
    vocabulary_argmax,
)
from mimo.model.parallel import ContextAxis, ExpertAxis, TensorAxis
from mimo.model.spec import Stage, StageConfig, has_embedding
from mimo.topology.device_copies import to_device


class LanguageStage(nn.Module):
    """One pipeline stage of a language model, a `mimo.model.runtime.LanguageModule` but for its forward.

    Args:
        config: of the model.
        stage: which of its stages.
        layer: makes the layer of a global index.
        mtp_layers: makes the layers of one `MtpModule`.
        norm: makes what follows the last layer, an `RMSNorm` if None.
        head: makes the output embedding where it is none of the input's, a `Linear` without bias if None.
        deepstack: how many first layers add rows of encoders, see `DeepRows`.

    Attributes:
        axis: over which the vocabulary, and with sequence parallelism the rows, are split.
        context: over which each sample is split.
        expert_axis: over which the experts are spread.
        weight_grad_queue: where the head defers its weight gradient.
        draw_keys: by which it draws at random.
        loss_rows: how many rows of logits the loss holds at a time, 0 for all; `build_part` sets it.
    """

    def __init__(
        self,
        config: StageConfig,
        stage: Stage,
        layer: Callable[[int], nn.Module],
        mtp_layers: Callable[[], Iterable[nn.Module]] = lambda: (),
        *,
        norm: Callable[[], nn.Module] | None = None,
        head: Callable[[], Linear] | None = None,
        deepstack: int = 0,
    ) -> None:
        super().__init__()
        self.hidden, self.deepstack = config.hidden, deepstack
        self.span = stage.layers(config.layers)
        self.vocabulary = config.vocabulary
        self.tied = config.tied
        self.stage = stage
        self.axis = TensorAxis.single()
        self.context = ContextAxis.single()
        self.expert_axis = ExpertAxis.single()
        self.weight_grad_queue: WeightGradQueue | None = None
        self.draw_keys = DrawKeys()
        self.loss_rows = 0
        if has_embedding(config, stage):
            self.embedding = Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleDict({str(index): layer(index) for index in stage.layers(config.layers)})
        if stage.is_last:
            self.norm = norm() if norm else RMSNorm(config.hidden, eps=config.norm_eps)
            if not config.tied:
                self.head = head() if head else Linear(config.hidden, config.vocabulary, bias=False)
        heads = range(config.next_tokens if stage.is_last else 0)
        self.next_tokens = nn.ModuleDict({str(place): MtpModule(config, mtp_layers()) for place in heads})
        self.next_weight = config.next_tokens_loss / max(config.next_tokens, 1)

    def begin(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return what the layers take, [T, H]: embeddings on stage 0, else ``hidden``; see `LanguageModule`.

        With ``deepstack`` it is to be split by `begin_deep`.
        """
        if self.stage.is_first:
            return self._embed(batch, rows)
        assert hidden is not None, "a later stage continues the rows of the one before"
        return hidden

    def begin_deep(self, x: Tensor) -> tuple[Tensor, DeepRows]:
        """Return of what `begin` has returned the rows [T, H] that the first layer takes, and those that layers add."""
        return DeepRows.split(x, hidden=self.hidden, first=self.span.start)

    def end(self, hidden: Tensor) -> Tensor:
        """Return the output [T, H] of the stage from that of its layers: normed on the last stage."""
        return cast("Tensor", self.norm(hidden)) if self.stage.is_last else hidden

    def _embed(self, batch: LanguageBatch, rows: Mapping[str, Tensor]) -> Tensor:
        """Return text embeddings with the encoders' rows at their placeholders, [T, H · (1 + K)] with ``deepstack`` K.

        Encoders without rows here take part too: whether there is a backward, in which ranks may wait for each other,
        then never depends on the data.
        """
        hidden = cast("Tensor", self.embedding(batch.tokens))
        if self.deepstack:
            hidden = functional.pad(hidden, (0, self.deepstack * self.hidden))
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

    def predicts_mtp(self, batch: LanguageBatch) -> bool:
        """Tell whether this stage predicts further than the next token, and the batch has labels for it."""
        return bool(self.next_tokens and batch.mtp_labels)

    def add_mtp_losses(self, batch: LanguageBatch, hidden: Tensor, run: Run) -> dict[str, Choices]:
        """Add the loss of multi-token prediction to ``batch.aux_losses``, on the last stage, if the batch has labels.

        Each sample counts by the weighted mean over its rows that take part, times the weight of its labels.

        Args:
            batch: the microbatch.
            hidden: what `end` has returned.
            run: runs a layer over rows.

        Returns:
            Which experts were chosen, by the layer's path.
        """
        chosen: dict[str, Choices] = {}
        losses: list[Tensor] = []
        tokens = batch.labels
        for (place, head), following in zip(self.next_tokens.items(), batch.mtp_labels, strict=False):
            hidden, own = head(hidden, self._embed_known(tokens), run)
            chosen |= {f"next_tokens.{place}.{path}": choices for path, choices in own.items()}
            losses.append(self._loss_of(following, hidden, batch))
            tokens = following.labels
        if losses:
            batch.aux_losses.add_loss("next_tokens", self.next_weight * torch.stack(losses).sum())
        return chosen

    def _embed_known(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ``ids``, [T, H], 0 for those that are `NO_LABEL`."""
        embedded, unknown = self.embedding(ids.clamp_min(0)), ids == NO_LABEL
        if self.axis.splits_rows:
            span = self.axis.span(len(ids))
            unknown = unknown[span.start : span.stop]
        return cast("Tensor", embedded.masked_fill(unknown.unsqueeze(1), 0.0))

    def _loss_of(self, following: MtpLabels, hidden: Tensor, batch: LanguageBatch) -> Tensor:
        """Return this rank's part of the loss of one MTP depth; tensor rank 0 counts it, all get its gradient."""
        found = self.losses(hidden, following.labels, following.rows)[following.rows]
        if following.weights is not None:
            found = found * following.weights[following.rows]
        shares = zip(batch.label_weights, following.label_weights, strict=True)
        factors = torch.tensor([weight / (own or 1) for weight, own in shares], dtype=found.dtype)  # [S]
        factors = to_device(factors, found.device)
        loss = (found * factors[batch.samples[following.rows]]).sum()
        return loss if self.axis.rank == 0 else loss - loss.detach()

    def losses(self, hidden: Tensor, labels: Tensor, labelled: Tensor | None = None) -> Tensor:
        """Return the loss of each row [T] in fp32, 0 without label; ``labels`` is [T], of all tensor ranks' rows."""
        if labelled is None:
            labelled = (labels != NO_LABEL).nonzero().squeeze(1)
        (found,) = self._row_losses(hidden, labelled, [self._cross_entropy(labels[labelled])])
        return _spread(found, labelled, len(labels))

    def distilled_losses(
        self, hidden: Tensor, labels: Tensor, taught: Tensor, untaught: Tensor, teachers: Sequence[TopIds]
    ) -> tuple[Tensor, ...]:
        """Return the losses as `losses` does, and those from teachers: see `SupportsDistillation`."""
        losses: list[RowLoss] = [self._cross_entropy(labels[taught])]
        losses += [Divergence(teacher=one, vocabulary=self.vocabulary, axis=self.axis) for one in teachers]
        found, *divergences = (_spread(each, taught, len(labels)) for each in self._row_losses(hidden, taught, losses))
        if len(untaught):
            (rest,) = self._row_losses(hidden, untaught, [self._cross_entropy(labels[untaught])])
            found = found.index_copy(0, untaught, rest)
        return found, *divergences

    def top_ids(self, hidden: Tensor, rows: Tensor, count: int, *, temperature: float) -> TopIds:
        """Return the likeliest ids of some rows: see `SupportsDistillation`."""
        some = self._entered(hidden, rows)
        found = [
            TopIds.of(
                self._logits(some[chunk]), count, temperature=temperature, vocabulary=self.vocabulary, axis=self.axis
            )
            for chunk in chunks_of(len(rows), self.loss_rows)
        ]
        return TopIds.join(found)

    def _cross_entropy(self, labels: Tensor) -> CrossEntropy:
        return CrossEntropy(labels=labels, vocabulary=self.vocabulary, axis=self.axis)

    def _row_losses(self, hidden: Tensor, rows: Tensor, losses: Sequence[RowLoss]) -> tuple[Tensor, ...]:
        """Return losses [R] of some rows."""
        head = self._head(self.draw_keys.chosen(rows))
        return chunked_losses(self._entered(hidden, rows), head, losses, rows=self.loss_rows)

    def _entered(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return some rows on all tensor ranks, by their numbers among all rows."""
        if self.axis.splits_rows:
            return self.axis.enter(hidden).index_select(0, rows)
        return self.axis.enter(hidden.index_select(0, rows))  # the gradients of no others need to be summed

    def greedy(self, hidden: Tensor) -> Tensor:
        """Return the likeliest next id of each row [T]."""
        hidden = self.axis.enter(hidden)
        chunks = hidden.split(self.loss_rows or max(len(hidden), 1))
        return torch.cat(
            [vocabulary_argmax(self._logits(some), vocabulary=self.vocabulary, axis=self.axis) for some in chunks]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] of this rank's span of the vocabulary."""
        return self._logits(self.axis.enter(hidden))

    def _logits(self, hidden: Tensor) -> Tensor:
        if not self.tied:
            return cast("Tensor", self.head(hidden))
        return multiply(hidden, self.embedding.weight, weight_grad_queue=self.weight_grad_queue)

    def _head(self, drawn: Drawn) -> Head:
        """Return what makes logits: the head, or the embedding that it is tied to, with which this stage multiplies.

        Args:
            drawn: keys of the rows whose logits it makes.
        """

        def logits(hidden: Tensor, first: int) -> Tensor:
            keys = self.draw_keys
            with keys.at(drawn), keys.at(keys.some(slice(first, first + len(hidden)))):
                return self._logits(hidden)

        source = self.embedding if self.tied else self.head
        parts = [part for part in source.modules() if isinstance(part, DefersWeightGrads)]
        return Head(
            logits=logits,
            parameters=[parameter for parameter in source.parameters() if parameter.requires_grad],
            layers=[self, *parts],
        )


def _spread(losses: Tensor, rows: Tensor, total: int) -> Tensor:
    """Return the losses of some rows at their places, [total], 0 elsewhere."""
    return losses.new_zeros(total).index_copy(0, rows, losses)

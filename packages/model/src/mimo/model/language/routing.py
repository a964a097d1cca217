"""Which rows of a microbatch a rank routes, and what follows for all its layers: loads and router losses.

Each row is routed by exactly one rank: under sequence parallelism a tensor rank has rows of its own, otherwise the
tensor ranks share out those that all of them hold. So sums over rows are sums over ranks, whatever the layout.
Shapes: T rows of this context rank, n of them routed here, H hidden, E experts, k chosen by a row, S samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.draws import DrawKeys, Drawn
from mimo.model.language.batch import LanguageBatch
from mimo.model.layers import Choices
from mimo.model.parallel import ExpertAxis, TensorAxis, counts_of
from mimo.model.spec import RouterLosses, load_name
from mimo.topology.device_copies import to_device


@attrs.frozen(kw_only=True, eq=False)
class Routing:
    """The rows of one microbatch that this rank routes, the same in all layers; make it with `Routing.of`.

    Args:
        axis: the tensor ranks.
        rows: T, the padding at the end included.
        here: rows of this rank's share, padding included.
        samples: [n] of each row its sample's number.
    """

    axis: TensorAxis
    rows: int
    here: int
    samples: Tensor

    @classmethod
    def of(cls, batch: LanguageBatch, axis: TensorAxis) -> Routing:
        """Return the rows of ``batch`` that fall to this rank."""
        rows = batch.tokens.shape[0]
        span = axis.span(rows)
        samples = batch.samples[span.start : min(span.stop, batch.used_rows)]
        return cls(axis=axis, rows=rows, here=len(span), samples=samples)

    def take(self, x: Tensor) -> Tensor:
        """Return the rows [n, H] that are routed here, of ``x`` as it lies between layers."""
        mine = x if self.axis.splits_rows else self.axis.share_out(x)
        return mine[: len(self.samples)]

    def keys(self, drawn: DrawKeys) -> Drawn:
        """Return the keys by which layers draw with those of the rows that are routed here."""
        first = self.axis.span(self.rows).start
        return drawn.some(slice(first, first + len(self.samples)))

    def put(self, y: Tensor) -> Tensor:
        """Return rows as they lie between layers, zero in the padding, of ``y`` [n, H]."""
        padded = functional.pad(y, (0, 0, 0, self.here - len(self.samples)))
        return padded if self.axis.splits_rows else self.axis.collect(padded, self.rows)


def add_router_losses(
    routing: Routing, chosen: Mapping[str, Choices], *, batch: LanguageBatch, config: RouterLosses, experts: ExpertAxis
) -> None:
    """Add the load of each layer's experts and this rank's part of the router losses to ``batch.aux_losses``.

    Args:
        routing: of the microbatch.
        chosen: what each layer with experts chose, by its path; at least one.
        batch: the microbatch.
        config: their coefficients.
        experts: sums over the ranks that share the rows of this lane.
    """
    counts = torch.stack([_counts(routing, one, batch) for one in chosen.values()])  # [layers, S, E]
    for layer, load in zip(chosen, counts.sum(1), strict=True):
        batch.aux_losses.add_count(load_name(layer), load)
    like = next(iter(chosen.values())).scores
    lengths, weights = (
        to_device(torch.tensor(numbers, dtype=like.dtype), like.device)
        for numbers in (batch.lengths, batch.label_weights)
    )
    lengths = lengths.clamp_min(1)  # [S]; one without rows has none to weigh
    weights = weights / lengths  # mean over the sample's rows times the weight of its labels, as a weight of each row
    if config.balance_loss:
        rows, per_row = experts.total(counts).to(like), next(iter(chosen.values())).experts.shape[1]
        frequencies = rows * (counts.shape[2] / per_row) / lengths.unsqueeze(1)
        scale = frequencies * weights.unsqueeze(1)  # [layers, S, E]
        parts = [(one.shares * each[routing.samples]).sum() for one, each in zip(chosen.values(), scale, strict=True)]
        batch.aux_losses.add_loss("balance", config.balance_loss * torch.stack(parts).sum())
    if config.z_loss:
        row_weights = weights[routing.samples]
        parts = [(one.logits.logsumexp(1).square() * row_weights).sum() for one in chosen.values()]
        batch.aux_losses.add_loss("z", config.z_loss * torch.stack(parts).sum())


def _counts(routing: Routing, choices: Choices, batch: LanguageBatch) -> Tensor:
    """Return how many of the rows routed here chose each expert, by sample, [S, E]."""
    samples, experts = len(batch.lengths), choices.logits.shape[1]
    places = routing.samples.unsqueeze(1) * experts + choices.experts
    return counts_of(places.flatten(), samples * experts).view(samples, experts)

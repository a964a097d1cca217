"""What one microbatch is to the language model, and what a language-model stage must be able to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from mimo.model.losses import TopIds
from mimo.topology.device_copies import all_to_device, to_device

NO_LABEL = -100
"""Label of a row that takes no part in the loss."""


@attrs.frozen
class AuxLosses:
    """Auxiliary losses and counts of a forward; every rank adds its own part, and the parts of all ranks add up.

    Args:
        losses: auxiliary losses by name, each a differentiable scalar: the sum over samples of the sample's mean times
            weight (`LanguageBatch.label_weights`), so that dividing by the weight of all label tokens makes it
            comparable to the loss. They are trained on.
        counts: sums for the metrics by name, such as the tokens that each expert took.
    """

    losses: dict[str, Tensor] = attrs.field(factory=dict)
    counts: dict[str, Tensor] = attrs.field(factory=dict)

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add a layer's part of an auxiliary loss."""
        self.losses[name] = self.losses[name] + value if name in self.losses else value

    def add_count(self, name: str, value: Tensor) -> None:
        """Add to a sum for the metrics."""
        self.counts[name] = self.counts[name] + value if name in self.counts else value


@attrs.frozen(eq=False)
class MtpLabels:
    """Labels of multi-token prediction (MTP): the k-th of a batch holds for each row the label of the row k later.

    A row takes part if it has a label and the k rows after it in its sample have labels too: then its target and all
    tokens between are text.

    Args:
        labels: [T], `NO_LABEL` where the row takes no part.
        rows: [n] those of T that take part, ascending; those whose label weighs nothing may be left out.
        counts: how many of each sample take part, those on other context ranks included.
        weights: [T] fp32, of each label that of the token to be predicted, 0 where there is none; None: each is 1.
        weight_sums: the sum of these over each sample, rows on other context ranks included; None as ``weights``.
    """

    labels: Tensor
    rows: Tensor
    counts: tuple[int, ...]
    weights: Tensor | None = None
    weight_sums: tuple[float, ...] | None = None

    @property
    def label_weights(self) -> tuple[float, ...]:
        """The weight of each sample's labels, those on other context ranks included: without weights their number."""
        return self.counts if self.weight_sums is None else self.weight_sums

    @classmethod
    def of(
        cls, labels: Tensor, samples: Tensor, *, lengths: Sequence[int], depth: int, weights: Tensor | None = None
    ) -> tuple[MtpLabels, ...]:
        """Return those of depths 1 to ``depth`` of whole samples, packed as in a `LanguageBatch`."""
        found = []
        last = labels
        for k in range(1, depth + 1):
            later, same = torch.full_like(labels, NO_LABEL), torch.zeros_like(labels, dtype=torch.bool)
            later[:-k], same[:-k] = labels[k:], samples[k:] == samples[:-k]
            last = later.masked_fill(~same | (last == NO_LABEL), NO_LABEL)
            rows = (last != NO_LABEL).nonzero().squeeze(1)
            counts = torch.bincount(samples[rows], minlength=len(lengths))
            own = None
            if weights is not None:
                own = torch.zeros_like(weights)
                own[:-k] = weights[k:]
                own.masked_fill_(last == NO_LABEL, 0.0)
            found.append(cls(last, rows, tuple(counts.tolist()), own, _sums(own, samples, len(lengths))))
        return tuple(found)


def _sums(weights: Tensor | None, samples: Tensor, count: int) -> tuple[float, ...] | None:
    """Return the sum of weights [T] over each sample, the padding left out."""
    if weights is None:
        return None
    sums = torch.zeros(count + 1, dtype=torch.float64, device=weights.device)
    return tuple(sums.index_add_(0, samples, weights.double())[:count].tolist())


@attrs.frozen(kw_only=True, eq=False)
class LanguageBatch:
    """A packed microbatch; only its end is padded (positions 0, no label), and T may be 0.

    With several context ranks T counts this rank's rows alone: of each sample in order, those that
    `mimo.topology.context_spans` says.

    Args:
        tokens: [T] ids; at placeholders, the placeholder's.
        labels: [T] the next id, or `NO_LABEL`.
        positions: [T] of each token in its sample.
        grid_positions: [T, 3] place of each row in time, down and across, for models that turn by these; None where
            each is its position. A row of text has one number on all three. The rows of an item whose encoder tells
            its grid count frames, rows of patches and columns from the number that text would have there, and what
            follows goes on from the largest number of them + 1 (Wang et al. 2024, arXiv:2409.12191, section 2.1).
        lengths: tokens of each sample, those on other context ranks included; without these, their sum is T without
            the padding.
        placeholders: for each encoder by module name, [R] ascending positions in T that its rows take.
        samples: [T] number of each row's sample in ``lengths``; ``len(lengths)`` in the padding.
        label_tokens: labels of each sample that weigh something, those on other context ranks included.
        labelled: the rows of T that have labels, ascending, if the host that packed them knows; those whose label
            weighs nothing are left out.
        weights: [T] fp32, how much each label counts in the loss, 0 where there is none; None: each counts 1.
        weight_sums: the sum of these over each sample, rows on other context ranks included; None as ``weights``.
        mtp_labels: labels of multi-token prediction, the next token but one first; none where it is not trained.
        used: rows without the padding, if the host that packed them knows; else it waits until a device has counted.
        items: of each sample, the rows ``start`` .. ``stop`` in it that each of its items takes, ascending, those on
            other context ranks included; nothing where the language model's spec doesn't ask for them.
        draw_keys: [T, 2] of each row what layers draw by at random, `mimo.model.runtime.sample_rows`; None where they
            are to draw nothing.
        aux_losses: collects the auxiliary losses and counts of a forward.
        decode_cache: made by `SupportsDecodeCache.new_decode_cache`. With it each sample continues the cached sequence
            of the same number, positions too, and samples beyond those cached begin new ones; one of no rows waits.
            Such a forward has no backward, no padding and no context ranks.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    placeholders: Mapping[str, Tensor]
    samples: Tensor
    label_tokens: tuple[int, ...]
    labelled: Tensor | None = None
    weights: Tensor | None = None
    weight_sums: tuple[float, ...] | None = None
    grid_positions: Tensor | None = None
    mtp_labels: tuple[MtpLabels, ...] = ()
    used: int | None = None
    items: tuple[tuple[tuple[int, int], ...], ...] = ()
    draw_keys: Tensor | None = None
    aux_losses: AuxLosses = attrs.field(factory=AuxLosses)
    decode_cache: object = None

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor,
        *,
        lengths: Sequence[int],
        placeholders: Mapping[str, Tensor] | None = None,
        grid_positions: Tensor | None = None,
        next_tokens: int = 0,
        weights: Tensor | None = None,
        items: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> LanguageBatch:
        """Return the batch of whole samples, as one context rank holds them; ``next_tokens`` of its `MtpLabels`."""
        samples = torch.full_like(tokens, len(lengths))
        indices = torch.arange(len(lengths), device=tokens.device)
        owned = indices.repeat_interleave(to_device(torch.tensor(lengths, dtype=torch.long), tokens.device))
        samples[: len(owned)] = owned
        targets = labels != NO_LABEL if weights is None else weights > 0
        counts = torch.bincount(samples[targets], minlength=len(lengths))
        return cls(
            tokens=tokens,
            labels=labels,
            positions=positions,
            lengths=tuple(lengths),
            placeholders=placeholders or {},
            samples=samples,
            label_tokens=tuple(counts.tolist()),
            weights=weights,
            weight_sums=_sums(weights, samples, len(lengths)),
            grid_positions=grid_positions,
            mtp_labels=MtpLabels.of(labels, samples, lengths=lengths, depth=next_tokens, weights=weights),
            used=len(owned),
            items=tuple(tuple(spans) for spans in items),
        )

    def to(self, device: torch.device | str) -> LanguageBatch:
        """Return the batch with its tensors on a device, to which they go in a few copies; those of losses stay."""
        own = [self.tokens, self.labels, self.positions, self.samples, *self.placeholders.values()]
        own += [one for one in (self.labelled, self.weights, self.grid_positions, self.draw_keys) if one is not None]
        for labels in self.mtp_labels:
            own += [labels.labels, labels.rows, *([] if labels.weights is None else [labels.weights])]
        moved = dict(zip(map(id, own), all_to_device(own, device), strict=True))

        def there(x: Tensor | None) -> Any:
            return None if x is None else moved[id(x)]

        return attrs.evolve(
            self,
            tokens=there(self.tokens),
            labels=there(self.labels),
            positions=there(self.positions),
            samples=there(self.samples),
            placeholders={name: there(rows) for name, rows in self.placeholders.items()},
            labelled=there(self.labelled),
            weights=there(self.weights),
            grid_positions=there(self.grid_positions),
            draw_keys=there(self.draw_keys),
            mtp_labels=tuple(
                attrs.evolve(one, labels=there(one.labels), rows=there(one.rows), weights=there(one.weights))
                for one in self.mtp_labels
            ),
        )

    @property
    def used_rows(self) -> int:
        """Rows of T without the padding at their end."""
        return int((self.samples < len(self.lengths)).sum()) if self.used is None else self.used

    @property
    def label_weights(self) -> tuple[float, ...]:
        """The weight of each sample's labels, those on other context ranks included: without weights their number.

        An auxiliary loss counts by it.
        """
        return self.label_tokens if self.weight_sums is None else self.weight_sums


class LanguageModule(Protocol):
    """One pipeline stage of a language model, as `LanguageModelSpec.build` makes it (an `nn.Module`).

    Between stages and to `losses` go rows [T, H]; with sequence parallelism each tensor rank's slice [T/t, H].
    `losses`, `greedy` and `logits` exist to be called on the last stage only.
    """

    def __call__(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return the hidden rows of this stage, on the last stage after the final norm.

        Args:
            batch: the whole microbatch, on every stage.
            rows: on stage 0, each encoder's rows in the order of its placeholders; with sequence parallelism only
                those whose placeholders lie in this rank's slice of T. Empty on later stages.
            hidden: what the stage before returned; None on stage 0.
        """

    def losses(self, hidden: Tensor, labels: Tensor, labelled: Tensor | None = None) -> Tensor:
        """Return the loss of each row [T] in fp32, 0 where it has no label, the same on all tensor ranks.

        Whoever calls it multiplies by weights.

        Args:
            hidden: what the last stage returned.
            labels: [T], of all tensor ranks' rows.
            labelled: ascending, the rows whose losses are used, if the caller knows: a device need not be asked then.
                Each has a label.
        """

    def greedy(self, hidden: Tensor) -> Tensor:
        """Return the likeliest next id of each row [T], of equal ones the lowest, the same on all tensor ranks."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this tensor rank's span of the logits [T, V_local]."""


class SupportsDistillation(Protocol):
    """What the last stage of a language model can do beside `LanguageModule` where its spec says ``distils``.

    The rows are those of all tensor ranks, and what is returned is the same on these.
    """

    def distilled_losses(
        self, hidden: Tensor, labels: Tensor, taught: Tensor, untaught: Tensor, teachers: Sequence[TopIds]
    ) -> tuple[Tensor, ...]:
        """Return the loss [T] of each row as `LanguageModule.losses` does, then its divergence from each teacher.

        All come from one computation of the logits. A divergence is 0 where the row isn't taught.

        Args:
            hidden: what the last stage returned.
            labels: [T].
            taught: rows, ascending, that have a label and of which the teachers say something.
            untaught: rows that have a label alone.
            teachers: what they say of the rows that are taught.
        """

    def top_ids(self, hidden: Tensor, rows: Tensor, count: int, *, temperature: float) -> TopIds:
        """Return the likeliest ids of rows, of equally likely ones the lowest first.

        Args:
            hidden: what the last stage returned.
            rows: [R] ascending.
            count: ids of each row, at most the vocabulary.
            temperature: by which logits are divided.
        """

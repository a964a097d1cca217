"""What the kit looks at of a language model: the plugin, with samples to learn from, in a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor

from mimo.model.language import AuxLosses
from mimo.model.spec import LanguageModelSpec, Stage
from mimo.model.testing.built import BuiltParts, Layout, build_stages
from mimo.model.testing.checks import BrokenError
from mimo.model.testing.language.samples import Microbatch, Sample, pack

NAME = "language"
"""What the module is called in the parts that the kit builds."""
LANES = ((7, 3, 5), (4, 6), (), (1,))
"""Tokens of each sample, by lane: ragged, one without any."""
_LANE_SEEDS = 100


@attrs.frozen(kw_only=True)
class LanguageLayout(Layout):
    """How a language model is laid out, and what its lanes hold; see `Layout` for what every module has.

    Args:
        lanes: tokens of each sample, by data lane; a lane of none is fine.
        ep: ranks over which its experts are spread, of the same lanes, context and tensor ranks.
        etp: ranks that share each expert's width, likewise.
    """

    lanes: tuple[tuple[int, ...], ...] = LANES[:1]
    ep: int = 1
    etp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of a grid of it, but for its stages."""
        return {"dp": len(self.lanes), "ep": self.ep, "etp": self.etp} | super().sizes


@attrs.frozen(kw_only=True, eq=False)
class Passed:
    """What a language model made of a microbatch on this rank.

    Args:
        microbatch: which.
        rows: by encoder, what was put in here; of them gradients are taken.
        hidden: rows of the last stage, those of this rank.
        losses: [T] of each row.
        greedy: [T] likeliest id that follows each row.
        aux_losses: of all stages.
    """

    microbatch: Microbatch
    rows: Mapping[str, Tensor]
    hidden: Tensor
    losses: Tensor
    greedy: Tensor
    aux_losses: AuxLosses

    @property
    def loss(self) -> Tensor:
        """What gradients are taken of."""
        return torch.stack([self.losses.sum(), *(loss.float() for loss in self.aux_losses.losses.values())]).sum()


@attrs.frozen(kw_only=True, eq=False)
class BuiltLanguage(BuiltParts):
    """All stages of a language model, as this rank holds them.

    Args:
        widths: of the rows that each hands on.
    """

    widths: tuple[int, ...]

    def run(self, microbatch: Microbatch, *, cache: object = None, put: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return this rank's rows of a microbatch, through all stages.

        Args:
            microbatch: its rows are those that are put in, if no others are given.
            cache: a decode cache that it continues.
            put: by encoder, the rows that are put in on this rank.
        """
        batch = attrs.evolve(microbatch.batch, decode_cache=cache)
        axis, total = self.axes.axis, len(batch.tokens)
        count = len(axis.span(total)) if axis.splits_rows else total
        rows = self.rows_here(microbatch) if put is None else put
        hidden: Any = None
        for part in self.parts:
            hidden = part.language(batch, rows if part.stage.is_first else {}, hidden)
            if not isinstance(hidden, Tensor):
                raise BrokenError(f"stage {part.stage.index} returned {type(hidden).__name__}, not a tensor")
            promised = (count, self.widths[part.stage.index])
            if tuple(hidden.shape) != promised:
                raise BrokenError(
                    f"stage {part.stage.index} returned a tensor of shape {tuple(hidden.shape)} of {total} tokens, "
                    f"expected {promised}; its width is what hidden() says"
                )
        assert isinstance(hidden, Tensor)
        return hidden

    def rows_here(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return what encoders put in on this rank: where rows are split, into its slice of them."""
        return {
            name: rows[self.mask(microbatch.batch.placeholders[name], len(microbatch.batch.tokens))].to(
                self.layout.dtype
            )
            for name, rows in microbatch.rows.items()
        }

    def mask(self, positions: Tensor, total: int) -> Tensor:
        """Return which positions, of ``total`` rows of the lane's context rank, lie between layers on this rank."""
        if not self.axes.axis.splits_rows:
            return positions >= 0
        span = self.axes.axis.span(total)
        return (positions >= span.start) & (positions < span.stop)

    def losses(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the loss of each row [T] of what `run` returned."""
        labels = microbatch.batch.labels
        losses: object = self.parts[-1].language.losses(hidden, labels)
        if not isinstance(losses, Tensor) or tuple(losses.shape) != tuple(labels.shape):
            found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise BrokenError(f"losses() of {len(labels)} rows are {found}, not one for each")
        return losses

    def forward(self, microbatch: Microbatch) -> Passed:
        """Return what the module makes of a microbatch, without a backward."""
        given = attrs.evolve(microbatch, batch=attrs.evolve(microbatch.batch, aux_losses=AuxLosses()))
        put = {name: rows.clone().requires_grad_() for name, rows in self.rows_here(given).items()}
        hidden = self.run(given, put=put)
        losses = self.losses(hidden, given)
        with torch.no_grad():
            greedy = self.parts[-1].language.greedy(hidden)
        return Passed(
            microbatch=given,
            rows=put,
            hidden=hidden,
            losses=losses,
            greedy=greedy,
            aux_losses=given.batch.aux_losses,
        )

    def learn(self, microbatch: Microbatch) -> Passed:
        """Take the gradients of a microbatch: they add up."""
        passed = self.forward(microbatch)
        if not passed.loss.requires_grad:
            return passed
        with ExitStack() as stack:
            deferred = [stack.enter_context(part.defer_weight_grads()) for part in self.parts]
            passed.loss.backward()
        for compute in deferred:
            compute()
        return passed


@attrs.frozen(kw_only=True, eq=False)
class LanguageSubject:
    """A language model, and samples to learn from.

    Args:
        spec: the plugin.
        config: an instance of ``spec.config`` that says its vocabulary.
    """

    spec: LanguageModelSpec
    config: Any

    @property
    def row_width(self) -> int:
        """Width of an encoder's row."""
        return self.spec.row_width(self.config)

    @property
    def hidden(self) -> None:
        """Nothing, as it is built for rows of a width of its own."""

    @property
    def reads_items(self) -> bool:
        """Whether it reads which rows are one item's."""
        return self.spec.reads_items(self.config)

    def samples(self, lane: int = 0, lengths: Sequence[int] | None = None) -> list[Sample]:
        """Return the samples of a lane, of `LANES` if no lengths are given."""
        vocabulary = self.spec.vocabulary(self.config)
        return [
            Sample.of(length, vocabulary=vocabulary, width=self.row_width, seed=lane * _LANE_SEEDS + place)
            for place, length in enumerate(LANES[lane] if lengths is None else lengths)
        ]

    def pack(self, samples: Sequence[Sample], **cut: int) -> Microbatch:
        """Return samples packed, with all labels that the model is trained on, and all that it reads; see `pack`."""
        next_tokens, reads_items = self.spec.next_tokens(self.config), self.reads_items
        return pack(samples, width=self.row_width, next_tokens=next_tokens, reads_items=reads_items, **cut)

    def layout(self, **changes: Any) -> LanguageLayout:
        """Return the layout of the whole module, with fields changed."""
        return LanguageLayout(**changes)

    def build(self, layout: LanguageLayout | None = None, *, stirred: bool = True) -> BuiltLanguage:
        """Build the module in a layout on the default group's ranks; collective over them.

        Args:
            layout: of the module; on this rank alone if None.
            stirred: whether its parameters are moved off their initial values, among them zeros and ones that hide
                mistakes; the same in any layout.
        """
        layout = layout or LanguageLayout()
        stages = [Stage(index, layout.pp) for index in range(layout.pp)]
        parts, axes = build_stages(self.spec, self.config, name=NAME, layout=layout, stages=stages)
        widths = tuple(self.spec.message_width(self.config, stage) for stage in stages)
        built = BuiltLanguage(parts=parts, layout=layout, axes=axes, widths=widths)
        if stirred:
            built.stir()
        return built

    def rows(self, built: BuiltLanguage) -> Tensor:
        """Return the rows of the first lane's samples."""
        return built.run(self.pack(self.samples()))

    def learn(self, built: BuiltLanguage) -> None:
        """Take the gradients of the first two lanes' samples."""
        for lane in range(2):
            built.learn(self.pack(self.samples(lane)))

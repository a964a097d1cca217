"""Whether a language model computes on one layout what it computes on another: losses, rows, counts, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.model.spec import LanguageModelSpec
from mimo.model.testing.checks import BrokenError
from mimo.model.testing.compare import compare_gradients, compare_rows, compare_totals, norm_of
from mimo.model.testing.language.subject import LANES, BuiltLanguage, LanguageLayout, LanguageSubject, Passed
from mimo.model.testing.layouts import assert_on_ranks, check_copies, check_initial_values, check_same_bits
from mimo.topology import DATA_AXES

VOCABULARY = 29
"""Ids of a language model whose config leaves them to a tokenizer."""


@attrs.frozen(kw_only=True, eq=False)
class Whole:
    """What a language model makes of all lanes, whole, on this rank alone.

    Args:
        lanes: by number.
        gradients: of its parameters, from all lanes.
    """

    lanes: Sequence[Passed]
    gradients: Mapping[str, Tensor]


def subject_of(spec: LanguageModelSpec, config: Any) -> LanguageSubject:
    """Return a language model to look at; with a vocabulary if its config, the defaults if None, has none."""
    config = spec.config() if config is None else config
    if spec.vocabulary(config) == 0:
        config = attrs.evolve(config, vocabulary=VOCABULARY)
    return LanguageSubject(spec=spec, config=config)


def assert_language_layouts(
    spec: LanguageModelSpec,
    layouts: Sequence[LanguageLayout],
    *,
    like: LanguageLayout | None = None,
    config: Any = None,
    seconds: float = 300,
) -> None:
    """Fail where a language model computes something else on one of these layouts than whole.

    Its initial values, rows, losses, counts, and the gradients of its parameters and of encoders' rows are compared.
    Its ranks are forked processes; this process computes nothing with torch.

    Args:
        spec: the language model.
        layouts: to compare. Gradients of those that differ in the tokens of their lanes alone add up in this order, as
            in microbatches of a step: of a single row some are zero, and what is found is all rounding.
        like: one of as many ranks and the same lanes that cuts rows and weights as they do, to be equal to bit for bit;
            if None, they are compared with the whole module in one process, within rounding.
        config: settings, small ones; the defaults if None.
        seconds: how long it may take for all layouts of as many ranks.

    Raises:
        AssertionError: its text says the first difference.
    """
    comparison = Comparison(subject=subject_of(spec, config))
    if like is None:
        steps: dict[LanguageLayout, list[LanguageLayout]] = {}
        for layout in layouts:
            steps.setdefault(_cut(layout), []).append(layout)
        assert_on_ranks(f"language model {spec.name!r}", steps.values(), comparison.check, seconds=seconds)
    else:
        check = partial(comparison.check_bits, like)
        assert_on_ranks(f"language model {spec.name!r}", [[layout] for layout in layouts], check, seconds=seconds)


def _cut(layout: LanguageLayout) -> LanguageLayout:
    """Return how a layout cuts the module, whatever its lanes hold."""
    return attrs.evolve(layout, lanes=((),) * len(layout.lanes))


@attrs.frozen(kw_only=True, eq=False)
class Comparison:
    """Compares layouts with the whole module. What several of them need is built and computed once.

    Args:
        subject: the language model.
    """

    subject: LanguageSubject
    _initial: dict[str, Tensor] = attrs.field(factory=dict, init=False)
    _built: dict[LanguageLayout, BuiltLanguage] = attrs.field(factory=dict, init=False)
    _whole: dict[LanguageLayout, Whole] = attrs.field(factory=dict, init=False)

    def check(self, *layouts: LanguageLayout) -> None:
        """Refuse initial values, rows, losses, counts and gradients that are not the whole module's; collective.

        Args:
            layouts: that differ in the tokens of their lanes alone; gradients add up as in microbatches of a step.
        """
        every = [self._learn_whole(layout) for layout in layouts]
        built, gradients = self._build(layouts[0]), dict[str, Tensor]()
        for layout, whole in zip(layouts, every, strict=True):
            passed = self._learn(built, layout)
            _check_lane(built, passed, whole.lanes[built.axes.lane])
            _check_sums(self.subject, built, passed, whole)
            check_copies(built)
            for name, gradient in whole.gradients.items():
                gradients[name] = gradients.get(name, 0) + gradient
            compare_gradients(built.gradients(), gradients)

    def check_bits(self, like: LanguageLayout, layout: LanguageLayout) -> None:
        """Refuse rows, losses and gradients that are not bit for bit those of another layout; collective."""
        wanted, found = (self._build(one) for one in (like, layout))
        other, passed = self._learn(wanted, like), self._learn(found, layout)
        for what, one, same in (("rows", passed.hidden, other.hidden), ("losses", passed.losses, other.losses)):
            if not torch.equal(one, same):
                raise BrokenError(f"{what} are not to the bit those on {like}")
        check_same_bits(found, wanted)

    def _learn_whole(self, layout: LanguageLayout) -> Whole:
        """Have the whole module learn from all lanes, one after the other."""
        alone = LanguageLayout(lanes=layout.lanes, frozen=layout.frozen, dtype=layout.dtype)
        if alone not in self._whole:
            built, subject = self._build(attrs.evolve(alone, lanes=LANES[:1])), self.subject
            every = [subject.pack(subject.samples(lane, lengths)) for lane, lengths in enumerate(alone.lanes)]
            lanes = [built.learn(microbatch) for microbatch in every]
            self._whole[alone] = Whole(lanes=lanes, gradients=built.gradients())
        return self._whole[alone]

    def _learn(self, built: BuiltLanguage, layout: LanguageLayout) -> Passed:
        """Have a layout learn from this rank's lane; collective."""
        axes, subject = built.axes, self.subject
        multiple = layout.tp if axes.axis.splits_rows else 1
        samples = subject.samples(axes.lane, layout.lanes[axes.lane])
        return built.learn(subject.pack(samples, size=layout.cp, rank=axes.context.rank, multiple=multiple))

    def _build(self, layout: LanguageLayout) -> BuiltLanguage:
        """Return the module without gradients, built if no layout before was cut in the same way; collective."""
        cut = _cut(layout)
        if cut not in self._built:
            built = self.subject.build(cut, stirred=False)
            values = built.values()
            if not self._initial:
                alone = cut == LanguageLayout(lanes=cut.lanes[:1])
                self._initial.update(values if alone else self.subject.build(stirred=False).values())
            if cut.dtype == torch.float32:
                check_initial_values(values, self._initial)
            built.stir()
            self._built[cut] = built
        self._built[cut].clear_gradients()
        return self._built[cut]


def _check_lane(built: BuiltLanguage, found: Passed, wanted: Passed) -> None:
    """Refuse rows, losses and gradients of encoders' rows that are not those of the whole module."""
    held, total = found.microbatch.held, len(found.losses)
    count = len(held)
    than = "those of the whole module"
    if bool(found.losses[count:].any()):
        raise BrokenError("rows of padding have a loss")
    here = built.mask(torch.arange(count), total)
    compare_rows(found.hidden[: int(here.sum())], wanted.hidden.detach()[held[here]], "a rank's rows", than)
    compare_rows(found.losses[:count, None], wanted.losses.detach()[held, None], "losses of a rank's rows", than)
    if not torch.equal(found.greedy[:count], wanted.greedy[held]):
        raise BrokenError("greedy() of a rank's rows is not that of the whole module")
    for name, rows in found.rows.items():
        own = found.microbatch.places[name][built.mask(found.microbatch.batch.placeholders[name], total)]
        gradient, other = _gradient(rows), _gradient(wanted.rows[name])[own]
        compare_gradients({name: gradient}, {name: other}, of="rows of", whole=_size(wanted))


def _check_sums(subject: LanguageSubject, built: BuiltLanguage, passed: Passed, whole: Whole) -> None:
    """Refuse sums over all lanes, of losses and counts, that are not those of the whole module; collective."""
    losses = built.axes.total(passed.losses.detach().double().sum(), DATA_AXES)
    every = torch.stack([each.losses.detach().double().sum() for each in whole.lanes])
    compare_totals(losses, every.sum(), "the sum of losses")
    announced, of_wanted = subject.spec.aux_losses(subject.config), [each.aux_losses for each in whole.lanes]
    for name in announced.losses:
        total, other = (_added(name, 1, [one.losses for one in each]) for each in ([passed.aux_losses], of_wanted))
        compare_totals(_over_all(total, built), other, f"the auxiliary loss {name!r}")
    for name, count in announced.counts.items():
        total, other = (_added(name, count, [one.counts for one in each]) for each in ([passed.aux_losses], of_wanted))
        if not torch.equal(total := _over_all(total, built), other):
            raise BrokenError(f"the count {name!r} is {total.tolist()}, of the whole module {other.tolist()}")


def _gradient(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows) if rows.grad is None else rows.grad


def _size(wanted: Passed) -> float:
    """Return the norm of the gradients of all encoders' rows."""
    return norm_of(_gradient(rows) for rows in wanted.rows.values())


def _added(name: str, count: int, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the sum [count] of what some forwards added under a name; nothing counts as zero."""
    given = [part[name].detach().double().reshape(count) for part in parts if name in part]
    return torch.stack([torch.zeros(count, dtype=torch.float64), *given]).sum(0)


def _over_all(value: Tensor, built: BuiltLanguage) -> Tensor:
    """Return the sum of what all ranks added."""
    if built.layout.ranks > 1:
        dist.all_reduce(value)
    return value

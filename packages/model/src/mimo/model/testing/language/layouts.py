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
from mimo.model.testing.compare import compare_gradients, compare_rows, compare_totals
from mimo.model.testing.language.subject import BuiltLanguage, LanguageLayout, LanguageSubject, Passed
from mimo.model.testing.layouts import assert_on_ranks, check_copies, check_initial_values, check_same_bits
from mimo.topology import DATA_AXES

VOCABULARY = 29
"""Ids of a language model whose config leaves them to a tokenizer."""


@attrs.frozen(kw_only=True, eq=False)
class Trained:
    """A module after the backward of its lanes, and what this rank made of each that it has."""

    built: BuiltLanguage
    lanes: Mapping[int, Passed]


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
        layouts: to compare.
        like: one of as many ranks and the same lanes that cuts rows and weights as they do, to be equal to bit for bit;
            if None, they are compared with the whole module in one process, within rounding.
        config: settings, small ones; the defaults if None.
        seconds: how long it may take for all layouts of as many ranks.

    Raises:
        AssertionError: its text says the first difference.
    """
    check = partial(_check_layout, subject_of(spec, config), like)
    assert_on_ranks(f"language model {spec.name!r}", layouts, check, seconds=seconds)


def check_layouts(subject: LanguageSubject, *layouts: LanguageLayout) -> None:
    """Refuse what is not that of the whole module; the layouts differ in their lanes alone; collective."""
    check_initial_values(subject, layouts[0])
    for layout in layouts:
        check_training(subject, layout)


def _check_layout(subject: LanguageSubject, like: LanguageLayout | None, layout: LanguageLayout) -> None:
    if like is None:
        check_layouts(subject, layout)
    else:
        _check_bits(train(subject, layout), train(subject, like))


def check_training(subject: LanguageSubject, layout: LanguageLayout) -> None:
    """Refuse rows, losses, counts and gradients that are not those of the whole module; collective."""
    found, wanted = train(subject, layout), _train_whole(subject, layout)
    lane = found.built.axes.lane
    _check_lane(found.built, found.lanes[lane], wanted.lanes[lane])
    _check_sums(subject, found, wanted)
    check_copies(found.built)
    compare_gradients(found.built.gradients(), wanted.built.gradients())


def train(subject: LanguageSubject, layout: LanguageLayout) -> Trained:
    """Build a module and have it learn from its lanes; collective."""
    built = subject.build(layout)
    axes = built.axes
    microbatch = subject.pack(
        subject.samples(axes.lane, layout.lanes[axes.lane]),
        size=layout.cp,
        rank=axes.context.rank,
        multiple=layout.tp if axes.axis.splits_rows else 1,
    )
    return Trained(built=built, lanes={axes.lane: built.learn(microbatch)})


def _train_whole(subject: LanguageSubject, layout: LanguageLayout) -> Trained:
    """Have the whole module learn from all lanes, one after the other, on this rank alone."""
    built = subject.build(subject.layout(frozen=layout.frozen, dtype=layout.dtype))
    lanes = {
        lane: built.learn(subject.pack(subject.samples(lane, lengths))) for lane, lengths in enumerate(layout.lanes)
    }
    return Trained(built=built, lanes=lanes)


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
    for name, rows in found.rows.items():
        own = found.microbatch.places[name][built.mask(found.microbatch.batch.placeholders[name], total)]
        gradient, other = _gradient(rows), _gradient(wanted.rows[name])[own]
        compare_gradients({name: gradient}, {name: other}, of="rows of", whole=_size(wanted))


def _check_sums(subject: LanguageSubject, found: Trained, wanted: Trained) -> None:
    """Refuse sums over all lanes, of losses and counts, that are not those of the whole module; collective."""
    axes = found.built.axes
    (passed,) = found.lanes.values()
    losses = axes.total(passed.losses.detach().double().sum(), DATA_AXES)
    every = torch.stack([each.losses.detach().double().sum() for each in wanted.lanes.values()])
    compare_totals(losses, every.sum(), "the sum of losses")
    announced, of_wanted = subject.spec.aux_losses(subject.config), [each.aux_losses for each in wanted.lanes.values()]
    for name in announced.losses:
        total, other = (_added(name, 1, [one.losses for one in each]) for each in ([passed.aux_losses], of_wanted))
        compare_totals(_over_all(total, found.built), other, f"the auxiliary loss {name!r}")
    for name, count in announced.counts.items():
        total, other = (_added(name, count, [one.counts for one in each]) for each in ([passed.aux_losses], of_wanted))
        if not torch.equal(total := _over_all(total, found.built), other):
            raise BrokenError(f"the count {name!r} is {total.tolist()}, of the whole module {other.tolist()}")


def _check_bits(found: Trained, other: Trained) -> None:
    (mine,), (wanted,) = found.lanes.values(), other.lanes.values()
    for what, one, same in (("rows", mine.hidden, wanted.hidden), ("losses", mine.losses, wanted.losses)):
        if not torch.equal(one, same):
            raise BrokenError(f"{what} are not to the bit those on {other.built.layout}")
    check_same_bits(found.built, other.built)


def _gradient(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows) if rows.grad is None else rows.grad


def _size(wanted: Passed) -> float:
    """Return the norm of the gradients of all encoders' rows."""
    return float(torch.stack([_gradient(rows).norm() for rows in wanted.rows.values()]).norm())


def _added(name: str, count: int, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the sum [count] of what some forwards added under a name; nothing counts as zero."""
    given = [part[name].detach().double().reshape(count) for part in parts if name in part]
    return torch.stack([torch.zeros(count, dtype=torch.float64), *given]).sum(0)


def _over_all(value: Tensor, built: BuiltLanguage) -> Tensor:
    """Return the sum of what all ranks added."""
    if built.layout.ranks > 1:
        dist.all_reduce(value)
    return value

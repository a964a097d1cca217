"""Checks of an encoder split over tensor ranks, stages and context ranks, against itself whole."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from mimo.hooks import ConfigError
from mimo.model._checks import check_module
from mimo.model._specs import Stage
from mimo.model.testing._compare import compare_gradients, compare_rows
from mimo.model.testing._subject import NAME, BrokenError, Place, SkippedError, Subject
from mimo.topology import Grid

RANKS = 2
"""Of each axis that is split."""


def check_tensor(subject: Subject) -> None:
    """Tensor ranks compute together what one rank does: initial values, rows, gradients."""
    if subject.spec.tensor is None:
        raise SkippedError("the spec has no tensor support")
    _check_place(subject, Place(tp=RANKS))


def check_sequence(subject: Subject) -> None:
    """Tensor ranks that also split the rows between layers compute what one rank does."""
    if subject.spec.tensor is None or not subject.spec.tensor.splits_rows:
        raise SkippedError("its tensor support does not split rows")
    _check_place(subject, Place(tp=RANKS, sequence_parallel=True))


def check_context(subject: Subject) -> None:
    """Context ranks compute what one rank does, wherever their slices of the rows are cut."""
    if subject.spec.context is None:
        raise SkippedError("the spec has no context support")
    _check_place(subject, Place(cp=RANKS))


def check_stages(subject: Subject) -> None:
    """Stages one after the other compute what the whole does, and send the rows that they promise."""
    stages = subject.spec.stages
    if stages is None:
        raise SkippedError("the spec has no stages")
    built, items, sizes = subject.build(Place(pp=RANKS)), subject.items(), subject.sizes()
    promised = (sum(stages.message_rows(subject.config, size) for size in sizes), stages.width(subject.config))
    sent = tuple(built.parts[0].encode(items, sizes).shape)
    if sent != promised:
        raise BrokenError(f"stage 0 sends a tensor of shape {sent}, message_rows() and width() promise {promised}")
    for index, part in enumerate(built.parts):
        told = stages.parts(subject.config, Stage(index, RANKS))
        held = {
            name
            for name, prefixes in subject.spec.parts.items()
            if any(_begins(path, prefix) for path, _ in part.module.named_parameters() for prefix in prefixes)
        }
        if told != held:
            raise BrokenError(f"stage {index} holds the parts {sorted(held)}, parts() says {sorted(told)}")
    _check_place(subject, Place(pp=RANKS))


def check_recompute(subject: Subject) -> None:
    """Recomputation changes neither rows nor gradients."""
    if not subject.spec.recompute:
        raise SkippedError("the spec has no recomputation")
    for kind in subject.spec.recompute:
        _check_place(subject, Place(recompute=kind))  # type: ignore[arg-type]  # keys are what users may ask for


def _begins(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")


def _check_place(subject: Subject, place: Place) -> None:
    """Compare a layout with the whole module, with all items, with one, and without any."""
    grid = Grid(name=NAME, ranks=range(place.pp * place.cp * place.tp), pp=place.pp, cp=place.cp, tp=place.tp)
    try:
        check_module(subject.spec, subject.config, grid=grid)
    except ConfigError as error:
        raise SkippedError(f"these settings can't: {error}") from error
    items, sizes, counts = subject.items(), subject.sizes(), subject.counts()
    fresh = (subject.build(stirred=False).values(), subject.build(place, stirred=False).values())
    for name, value in fresh[0].items():
        if name not in fresh[1] or not torch.equal(fresh[1][name], value):
            raise BrokenError(f"the initial value of parameter {name!r} is not that of the whole module")
    for number in (len(items), 1, 0):
        whole, built = subject.build(), subject.build(place)
        weights = torch.randn(sum(counts[:number]), subject.hidden, generator=torch.Generator().manual_seed(7))
        wanted, found = (each.encode(items[:number], sizes[:number]) for each in (whole, built))
        each = -(-len(wanted) // built.slices)
        missing = (0, 0, 0, each * built.slices - len(wanted))
        mine = slice(built.slice * each, (built.slice + 1) * each)
        if tuple(found.shape) != (each, subject.hidden):
            raise BrokenError(
                f"a rank returned a tensor of shape {tuple(found.shape)}, expected {(each, subject.hidden)}"
            )
        here = wanted.detach()[mine]
        compare_rows(found[: len(here)], here, f"rows of {number} items", "those of the whole module")
        for rows, weight in ((wanted, weights), (found, pad(weights, missing)[mine])):
            if rows.requires_grad:
                rows.backward(weight)
        if number:
            compare_gradients(built.gradients(), whole.gradients())

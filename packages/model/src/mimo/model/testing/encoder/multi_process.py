"""Checks of an encoder split over tensor ranks, stages and context ranks, against itself whole."""

from __future__ import annotations

import attrs

from mimo.model.spec import Stage
from mimo.model.testing.checks import BrokenError, SkippedError
from mimo.model.testing.encoder.layouts import check_batch, check_initial, train
from mimo.model.testing.encoder.subject import NAME, ModuleLayout, Subject
from mimo.model.testing.modules import held_parts, refuse_layout

RANKS = 2
"""Of each axis that is split."""


def check_tensor(subject: Subject) -> None:
    """Tensor ranks compute together what one rank does: initial values, rows, gradients."""
    if subject.spec.tensor is None:
        raise SkippedError("the spec has no tensor support")
    _check_layout(subject, ModuleLayout(tp=RANKS))


def check_sequence(subject: Subject) -> None:
    """Tensor ranks that also split the rows between layers compute what one rank does."""
    if subject.spec.tensor is None or not subject.spec.tensor.splits_rows:
        raise SkippedError("its tensor support does not split rows")
    _check_layout(subject, ModuleLayout(tp=RANKS, sequence_parallel=True))


def check_context(subject: Subject) -> None:
    """Context ranks compute what one rank does, wherever their slices of the rows are cut."""
    if subject.spec.context is None:
        raise SkippedError("the spec has no context support")
    _check_layout(subject, ModuleLayout(cp=RANKS))


def check_stages(subject: Subject) -> None:
    """Stages one after the other compute what the whole does, and send the rows that they promise."""
    stages = subject.spec.stages
    if stages is None:
        raise SkippedError("the spec has no stages")
    built, items, sizes = subject.build(ModuleLayout(pp=RANKS)), subject.items(), subject.sizes()
    promised = (sum(stages.message_rows(subject.config, size) for size in sizes), stages.width(subject.config))
    sent = tuple(built.parts[0].encode(items, sizes).shape)
    if sent != promised:
        raise BrokenError(f"stage 0 sends a tensor of shape {sent}, message_rows() and width() promise {promised}")
    for index, part in enumerate(built.parts):
        named = stages.parts(subject.config, Stage(index, RANKS))
        if named != (held := held_parts(subject.spec, part)):
            raise BrokenError(f"stage {index} holds the parts {sorted(held)}, parts() says {sorted(named)}")
    _check_layout(subject, ModuleLayout(pp=RANKS))


def check_seam(subject: Subject) -> None:
    """Tower and projector one after the other compute what the whole does, and send the rows that they promise."""
    seam = subject.spec.seam
    if seam is None:
        raise SkippedError("the spec has no seam")
    built, items, sizes = subject.build(ModuleLayout(seam=True)), subject.items(), subject.sizes()
    promised = (sum(seam.rows(subject.config, size) for size in sizes), seam.width(subject.config))
    sent = tuple(built.parts[0].encode(items, sizes).shape)
    if sent != promised:
        raise BrokenError(
            f"the tower sends a tensor of shape {sent}, rows() and width() of the seam promise {promised}"
        )
    for what, part in zip(("tower", "projector"), built.parts, strict=True):
        held = held_parts(subject.spec, part)
        wrong = held - seam.parts if part.stage.is_projector else held & seam.parts
        if wrong:
            raise BrokenError(
                f"the {what} holds {sorted(wrong)}, and the seam has {sorted(seam.parts)} behind it; cut() is to keep "
                "the parameters of one side only"
            )
    _check_layout(subject, ModuleLayout(seam=True))
    if subject.spec.stages is not None:
        _check_layout(subject, ModuleLayout(pp=RANKS, seam=True))


def check_recompute(subject: Subject) -> None:
    """Recomputation changes neither rows nor gradients."""
    if not subject.spec.recompute:
        raise SkippedError("the spec has no recomputation")
    for kind in subject.spec.recompute:
        _check_layout(subject, ModuleLayout(recompute=kind))  # type: ignore[arg-type]  # keys are what users may ask for


def _check_layout(subject: Subject, layout: ModuleLayout) -> None:
    """Compare a layout with the whole module, with all items, with one, and without any."""
    refuse_layout(subject, NAME, layout)
    check_initial(subject, layout)
    for number in (len(subject.raw), 1, 0):
        part = attrs.evolve(subject, raw=subject.raw[:number])
        check_batch(part, layout, train(part, ModuleLayout()), gradients=number > 0)

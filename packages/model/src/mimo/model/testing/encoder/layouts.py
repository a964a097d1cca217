"""Whether an encoder computes on one layout what it computes on another: rows, gradients, initial values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from mimo.model.spec import EncoderSpec
from mimo.model.testing.checks import BrokenError
from mimo.model.testing.compare import compare_gradients, compare_rows
from mimo.model.testing.encoder.subject import Built, ModuleLayout, Subject
from mimo.model.testing.layouts import assert_on_ranks, check_copies, check_initial_values, check_same_bits


@attrs.frozen(kw_only=True, eq=False)
class Trained:
    """A module after one backward, and this rank's rows of it."""

    built: Built
    rows: Tensor


def assert_layouts(
    spec: EncoderSpec,
    batches: Sequence[Sequence[Any]],
    layouts: Sequence[ModuleLayout],
    *,
    like: ModuleLayout | None = None,
    config: Any = None,
    hidden: int = 24,
    seconds: float = 300,
) -> None:
    """Fail where an encoder computes something else on one of these layouts: initial values, rows, gradients.

    Its ranks are forked processes; this process computes nothing with torch.

    Args:
        spec: the encoder.
        batches: items as a dataset hands them in, each list encoded at once; an empty one is fine.
        layouts: to compare.
        like: one of as many ranks that cuts rows and weights as they do, to be equal to bit for bit; if None, they are
            compared with the whole module, within rounding.
        config: settings, small ones; the defaults if None.
        hidden: width of the rows that it must deliver.
        seconds: how long it may take for all layouts of as many ranks.

    Raises:
        AssertionError: its text names the first difference.
    """
    config = spec.config() if config is None else config
    subjects = [Subject(spec=spec, config=config, hidden=hidden, raw=tuple(batch)) for batch in batches]
    check = partial(_check_layout, subjects, like)
    assert_on_ranks(f"encoder {spec.name!r}", [[layout] for layout in layouts], check, seconds=seconds)


def check_initial(subject: Subject, layout: ModuleLayout) -> None:
    """Refuse initial values that are not, bit for bit, those of the whole module."""
    check_initial_values(*(subject.build(one, stirred=False).values() for one in (layout, ModuleLayout())))


def check_batch(subject: Subject, layout: ModuleLayout, whole: Trained, *, gradients: bool = True) -> None:
    """Refuse rows, and gradients, that are not those of the whole module, with all items at once."""
    found = train(subject, layout)
    here = whole.rows[found.built.slice * len(found.rows) :][: len(found.rows)]
    what = f"rows of {len(subject.raw)} items"
    compare_rows(found.rows[: len(here)], here, what, "those of the whole module")
    if gradients:
        check_copies(found.built)
        compare_gradients(found.built.gradients(), whole.built.gradients())


def _check_layout(subjects: Sequence[Subject], like: ModuleLayout | None, layout: ModuleLayout) -> None:
    if like is None:
        check_initial(subjects[0], layout)
    for subject in subjects:
        other = train(subject, like or ModuleLayout())
        if like is None:
            check_batch(subject, layout, other)
        else:
            _check_bits(subject, layout, other)


def _check_bits(subject: Subject, layout: ModuleLayout, other: Trained) -> None:
    """Refuse rows and gradients that are not bit for bit those of a layout that cuts them in the same way."""
    trained = train(subject, layout)
    if not torch.equal(trained.rows, other.rows):
        raise BrokenError(f"rows of {len(subject.raw)} items are not to the bit those on {other.built.layout}")
    check_same_bits(trained.built, other.built)


def train(subject: Subject, layout: ModuleLayout) -> Trained:
    """Build a module and have it learn from all items, with the same gradient in whatever slices; collective."""
    built = subject.build(layout)
    items, sizes = subject.items(), subject.sizes()
    total, stages, seam = sum(subject.counts()), subject.spec.stages, subject.spec.seam
    each, rows = -(-total // built.slices), torch.empty(0)
    for part in built.parts:
        rows = part.encode(items if part.stage.is_first else [], sizes, None if part.stage.is_first else rows)
        promised = (each, subject.hidden)
        if layout.seam and part.stage.ends_tower and seam is not None:
            sent = sum(seam.rows(subject.config, size) for size in sizes)
            promised = (-(-sent // built.slices), seam.width(subject.config))
        elif not part.stage.is_last and stages is not None:
            sent = sum(stages.message_rows(subject.config, size) for size in sizes)
            promised = (-(-sent // built.slices), stages.width(subject.config))
        if tuple(rows.shape) != promised:
            found = tuple(rows.shape)
            raise BrokenError(f"a rank's stage {part.stage.index} returned a tensor of shape {found}, not {promised}")
    if rows.requires_grad:
        weights = torch.randn(total, subject.hidden, generator=torch.Generator().manual_seed(7))
        weights = pad(weights, (0, 0, 0, built.slices * each - total))
        with ExitStack() as stack:
            later = [stack.enter_context(part.defer_weight_grads()) for part in built.parts]
            rows.backward(weights[built.slice * each : (built.slice + 1) * each])
        for compute in later:
            compute()
    return Trained(built=built, rows=rows.detach())

"""Whether an encoder computes on one layout what it computes on another: rows, gradients, initial values."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from mimo.model.parallel import local
from mimo.model.spec import EncoderSpec
from mimo.model.testing.compare import compare_gradients, compare_rows
from mimo.model.testing.ranks import run_ranks
from mimo.model.testing.subject import NAME, BrokenError, Built, ModuleLayout, Subject
from mimo.topology.collectives import all_gather_json


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
        AssertionError: its text tells the first difference.
    """
    config = spec.config() if config is None else config
    subjects = [Subject(spec=spec, config=config, hidden=hidden, raw=tuple(batch)) for batch in batches]
    for ranks in dict.fromkeys(layout.cp * layout.tp for layout in layouts):
        of_ranks = [layout for layout in layouts if layout.cp * layout.tp == ranks]
        said = run_ranks(ranks, partial(_look, subjects, of_ranks, like), seconds=seconds)
        if wrong := next(filter(None, said), None):
            msg = f"encoder {spec.name!r} {wrong}"
            raise AssertionError(msg)


def check_initial_values(subject: Subject, layout: ModuleLayout) -> None:
    """Refuse initial values that are not, bit for bit, those of the whole module."""
    whole, built = (subject.build(one, stirred=False).values() for one in (ModuleLayout(), layout))
    for name, value in whole.items():
        if name not in built or not torch.equal(built[name], value):
            raise BrokenError(f"the initial value of parameter {name!r} is not that of the whole module")


def check_batch(subject: Subject, layout: ModuleLayout, whole: Trained, *, gradients: bool = True) -> None:
    """Refuse rows, and gradients, that are not those of the whole module, with all items at once."""
    found = train(subject, layout)
    here = whole.rows[found.built.slice * len(found.rows) :][: len(found.rows)]
    what = f"rows of {len(subject.raw)} items"
    compare_rows(found.rows[: len(here)], here, what, "those of the whole module")
    if gradients:
        _check_copies(found.built)
        compare_gradients(found.built.gradients(), whole.built.gradients())


def _look(subjects: Sequence[Subject], layouts: Sequence[ModuleLayout], like: ModuleLayout | None) -> str | None:
    at = layouts[0]
    try:
        if like is None:
            for at in layouts:
                check_initial_values(subjects[0], at)
        for subject in subjects:
            other = train(subject, like or ModuleLayout())
            for at in layouts:
                if like is None:
                    check_batch(subject, at, other)
                else:
                    _check_bits(subject, at, other)
    except BrokenError as how:
        return f"on {at}: {how}"
    return None


def _check_bits(subject: Subject, layout: ModuleLayout, other: Trained) -> None:
    """Refuse rows and gradients that are not bit for bit those of a layout that cuts them in the same way."""
    trained = train(subject, layout)
    if not torch.equal(trained.rows, other.rows):
        raise BrokenError(f"rows of {len(subject.raw)} items are not to the bit those on {other.built.layout}")
    found, wanted = _pieces(trained.built), _pieces(other.built)
    if found.keys() != wanted.keys():
        raise BrokenError(f"other parameters have gradients: {sorted(found.keys() ^ wanted.keys())}")
    for name, gradient in wanted.items():
        if not torch.equal(found[name], gradient):
            raise BrokenError(f"the gradient of parameter {name!r} is not to the bit that on {other.built.layout}")


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


def _pieces(built: Built) -> dict[str, Tensor]:
    """Return what this rank holds of each gradient."""
    return {name: local(one.grad) for name, one in built.parameters.items() if one.grad is not None}


def _digest(gradient: Tensor) -> str:
    """Return what two tensors have in common if their elements are equal: minus zero is zero."""
    data = (gradient.detach().cpu().contiguous() + 0).flatten().view(torch.uint8)
    found = hashlib.blake2b(f"{gradient.dtype} {[*gradient.shape]}".encode(), digest_size=16)
    found.update(ctypes.string_at(data.data_ptr(), len(data)))
    return found.hexdigest()


def _check_copies(built: Built) -> None:
    """Refuse gradients that some ranks lack, and copies on tensor ranks that differ, which would drift apart."""
    layout, mine = built.layout, {name: _digest(one) for name, one in _pieces(built).items()}
    everyones = all_gather_json(mine) if layout.cp * layout.tp > 1 else [mine]
    for one in everyones:
        if one.keys() != mine.keys():
            raise BrokenError(f"some ranks alone have gradients of parameters {sorted(one.keys() ^ mine.keys())}")
    lane = everyones[built.context.rank * layout.tp :][: layout.tp]
    for part in built.parts:
        for path, split in part.splits.items():
            name = path.removeprefix(f"{NAME}.")
            if name not in mine or split.dim is not None or split.summed:
                continue
            if any(one[name] != mine[name] for one in lane):
                raise BrokenError(f"the gradient of parameter {name!r} is not the same on all tensor ranks")

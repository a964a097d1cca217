"""Checks of what a language model computes from samples, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from mimo.model.language import NO_LABEL
from mimo.model.testing.checks import BrokenError
from mimo.model.testing.compare import compare_gradients, compare_rows
from mimo.model.testing.language.samples import ENCODERS, Sample
from mimo.model.testing.language.subject import BuiltLanguage, LanguageSubject, Passed

_PADDING = 3
"""Rows of padding that are tried."""
_AUX_LOSSES = 1e-5
"""By how much auxiliary losses may differ, as a share."""
_IDS = 64
"""About so many ids of a large vocabulary are read and written."""


def check_rows(subject: LanguageSubject) -> None:
    """Each stage returns a row of hidden() columns for each token, and losses() one number in fp32 for each row."""
    built = subject.build()
    passed = built.learn(subject.pack(subject.samples()))
    if passed.losses.dtype != torch.float32:
        raise BrokenError(f"losses are {passed.losses.dtype}, expected torch.float32")
    if not bool(torch.isfinite(passed.losses).all()):
        raise BrokenError("a loss is not finite")


def check_vocabulary(subject: LanguageSubject) -> None:
    """It reads and writes vocabulary() ids; losses() and greedy() are those of logits()."""
    count = subject.spec.vocabulary(subject.config)
    built = subject.build()
    ids = torch.tensor([count - 1, *range(0, count - 1, max(count // _IDS, 1))])
    (empty,) = subject.samples(lengths=[0])
    microbatch = subject.pack([attrs.evolve(empty, tokens=ids, labels=ids.roll(-1))])
    with torch.no_grad():
        hidden = built.run(microbatch)
        last = built.parts[-1].language
        logits, greedy, losses = last.logits(hidden), last.greedy(hidden), built.losses(hidden, microbatch)
    if tuple(logits.shape) != (len(ids), count):
        raise BrokenError(f"logits of {len(ids)} rows have shape {tuple(logits.shape)}, vocabulary() is {count}")
    wide, labels = logits.float(), microbatch.batch.labels[:, None]
    expected = wide.logsumexp(1, keepdim=True) - wide.gather(1, labels)
    compare_rows(losses[:, None], expected, "losses", "the cross-entropy of logits()")
    if not torch.equal(greedy, logits.argmax(1)):
        raise BrokenError(f"greedy() is {greedy.tolist()}, the largest of logits() {logits.argmax(1).tolist()}")


def check_empty(subject: LanguageSubject) -> None:
    """A microbatch without tokens is fine: its loss is zero, and it changes no gradient."""
    built = subject.build()
    _check_zero(built, built.learn(subject.pack([])), "a microbatch without tokens")


def check_labels(subject: LanguageSubject) -> None:
    """Rows without label have no loss, and without any label nothing learns; padding at the end changes nothing."""
    built, padded, samples = subject.build(), subject.build(), subject.samples()
    passed = built.learn(subject.pack(samples))
    if bool(passed.losses[passed.microbatch.batch.labels == NO_LABEL].any()):
        raise BrokenError("a row without label has a loss")
    longer = padded.learn(subject.pack(samples, padding=_PADDING))
    if bool(longer.losses[-_PADDING:].any()):
        raise BrokenError("rows of padding have a loss")
    before, than = passed.losses.detach()[:, None], "those without padding"
    compare_rows(longer.losses[:-_PADDING, None], before, "losses before padding", than)
    _compare_aux(longer, [passed], "with padding", "without")
    try:
        compare_gradients(padded.gradients(), built.gradients())
    except BrokenError as how:
        msg = f"with padding at the end {how}"
        raise BrokenError(msg) from None
    silent = [attrs.evolve(sample, labels=torch.full_like(sample.labels, NO_LABEL)) for sample in samples]
    quiet = subject.build()
    _check_zero(quiet, quiet.learn(subject.pack(silent)), "a microbatch without labels")


def check_alone(subject: LanguageSubject) -> None:
    """A sample's losses don't depend on the samples beside it, nor on their order."""
    built, samples = subject.build(), subject.samples()
    single = [built.forward(subject.pack([sample])) for sample in samples]
    for what, order in (("packed samples", 1), ("samples packed in another order", -1)):
        packed = built.forward(subject.pack(samples[::order]))
        losses = torch.cat([one.losses.detach() for one in single[::order]])
        compare_rows(packed.losses[:, None], losses[:, None], f"losses of {what}", "those of one at a time")
        rows = torch.cat([one.hidden.detach() for one in single[::order]])
        compare_rows(packed.hidden, rows, f"rows of {what}", "those of one at a time")
        _compare_aux(packed, single, f"of {what}", "of one at a time")


def check_lanes(subject: LanguageSubject) -> None:
    """Samples over several microbatches, one of them empty, learn together what they learn in one."""
    whole, cut, samples = subject.build(), subject.build(), subject.samples()
    whole.learn(subject.pack(samples))
    for some in (samples[:1], [], samples[1:]):
        cut.learn(subject.pack(some))
    compare_gradients(cut.gradients(), whole.gradients())


@torch.no_grad()
def check_causal(subject: LanguageSubject) -> None:
    """A token changes nothing that comes before it, or before its item where rows of one see each other."""
    built, samples = subject.build(), subject.samples()
    vocabulary = subject.spec.vocabulary(subject.config)
    before = built.run(subject.pack(samples))
    for place in range(1, len(samples[0])):
        tokens = samples[0].tokens.clone()
        tokens[place:] = (tokens[place:] + 1) % vocabulary
        rows = {
            name: rows + (samples[0].placeholders[name] >= place)[:, None] for name, rows in samples[0].rows.items()
        }
        changed = attrs.evolve(samples[0], tokens=tokens, rows=rows)
        after = built.run(subject.pack([changed, *samples[1:]]))
        items = samples[0].items if subject.reads_items else []
        first = min([place, *(low for low, high in items if low < place < high)])
        what = f"rows before token {first}, after a change of {'it' if first == place else place} and all later ones,"
        compare_rows(after[:first], before[:first], what, "before")


def check_placeholders(subject: LanguageSubject) -> None:
    """Encoders' rows stand in the places of their placeholders, in order, and gradients reach each of them."""
    built, samples = subject.build(), subject.samples()
    vocabulary = subject.spec.vocabulary(subject.config)
    passed = built.learn(subject.pack(samples))
    with torch.no_grad():
        other = [_with_other_placeholders(sample, vocabulary) for sample in samples]
        again = built.run(subject.pack(other))
        compare_rows(again, passed.hidden.detach(), "rows with other ids at the placeholders", "those before")
        swapped = [_with_swapped_encoders(sample) for sample in samples]
        again = built.run(subject.pack(swapped))
        compare_rows(again, passed.hidden.detach(), "rows where encoders change names", "those before")
    for name, rows in passed.rows.items():
        if rows.grad is None:
            raise BrokenError(f"rows of {name!r} got no gradient")
        if not bool(rows.grad.any(1).all()):
            raise BrokenError(f"the gradient of a row of {name!r} is all zeros")


def check_state(subject: LanguageSubject) -> None:
    """A call leaves nothing behind that another one sees."""
    built = subject.build()
    before, microbatch = built.buffers, subject.pack(subject.samples())
    first = built.run(microbatch).detach()
    built.learn(subject.pack(subject.samples(1)))
    compare_rows(built.run(microbatch), first, "rows after other samples", "those before")
    for name, value in built.buffers.items():
        if not torch.equal(value, before[name]):
            raise BrokenError(f"buffer {name!r} changed in forward")


def check_types(subject: LanguageSubject) -> None:
    """With bf16 weights its rows are bf16, those of no tokens too, and losses are fp32."""
    built = subject.build(subject.layout(dtype=torch.bfloat16))
    for samples, what in ((subject.samples(), "rows"), ([], "rows of no tokens")):
        microbatch = subject.pack(samples)
        rows = built.run(microbatch)
        if rows.dtype != torch.bfloat16:
            raise BrokenError(f"{what} are {rows.dtype}; keep buffers and made tensors in the type of what they meet")
        losses = built.losses(rows, microbatch)
        if losses.dtype != torch.float32:
            raise BrokenError(f"losses are {losses.dtype}, expected torch.float32")


def check_aux_losses(subject: LanguageSubject) -> None:
    """aux_losses() names all that forward() adds beside the loss, and nothing else."""
    announced = subject.spec.aux_losses(subject.config)
    added = subject.build().forward(subject.pack(subject.samples())).aux_losses
    sizes = {name: value.numel() for name, value in (*added.losses.items(), *added.counts.items())}
    wanted = {**dict.fromkeys(announced.losses, 1), **announced.counts}
    if sizes != wanted or added.losses.keys() != set(announced.losses):
        raise BrokenError(
            f"forward() adds the losses {sorted(added.losses)} and counts {sorted(added.counts)}, aux_losses() says "
            f"{sorted(announced.losses)} and {dict(announced.counts)}"
        )


def _check_zero(built: BuiltLanguage, passed: Passed, what: str) -> None:
    if float(passed.loss.detach()):
        raise BrokenError(f"{what} has the loss {float(passed.loss.detach()):.3g}, expected 0")
    for name, gradient in built.gradients().items():
        if bool(gradient.any()):  # of what isn't finite too
            raise BrokenError(f"{what} has a gradient of parameter {name!r} that is not zero")


def _compare_aux(found: Passed, wanted: Sequence[Passed], what: str, than: str) -> None:
    """Refuse auxiliary losses that are not the sum of those of other forwards."""
    for name, loss in found.aux_losses.losses.items():
        sum_of = sum(float(one.aux_losses.losses[name].detach()) for one in wanted if name in one.aux_losses.losses)
        if not abs(float(loss.detach()) - sum_of) <= _AUX_LOSSES * max(abs(sum_of), 1.0):
            raise BrokenError(f"the auxiliary loss {name!r} {what} is {float(loss.detach()):.6g}, {than} {sum_of:.6g}")


def _with_other_placeholders(sample: Sample, vocabulary: int) -> Sample:
    """Return a sample with other ids at the placeholders."""
    tokens = sample.tokens.clone()
    for places in sample.placeholders.values():
        tokens[places] = (tokens[places] + 1) % vocabulary
    return attrs.evolve(sample, tokens=tokens)


def _with_swapped_encoders(sample: Sample) -> Sample:
    """Return a sample in which the encoders' names are exchanged, rows and placeholders together."""
    other = dict(zip(ENCODERS, reversed(ENCODERS), strict=True))
    return attrs.evolve(
        sample,
        placeholders={name: sample.placeholders[other[name]] for name in ENCODERS},
        rows={name: sample.rows[other[name]] for name in ENCODERS},
    )

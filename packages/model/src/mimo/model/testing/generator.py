"""All checks of a generator, alone, in two stages, and on two ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from torch import Tensor

from mimo.model.draws import item_keys, step_key
from mimo.model.spec import GeneratorSpec, Stage
from mimo.model.testing import modules
from mimo.model.testing.built import BuiltParts, Layout, build_stages
from mimo.model.testing.checks import BrokenError, Check, Checks, SkippedError, Verdict, assert_kept
from mimo.model.testing.compare import compare_gradients, compare_rows
from mimo.model.testing.encoder.single_process import check_measure, check_prepare
from mimo.model.testing.layouts import check_copies, check_initial_values

_NAME = "generator"
_RANKS = 2
_COUNTS = (3, 0, 2, 1)
"""Rows that items are made from, in turn."""
_LEFT_OUT = 0.05
"""Share of the weights that a formula of costs may leave out, such as norms."""


@attrs.frozen(kw_only=True, eq=False)
class GeneratorSubject:
    """A generator, and items to train it by, each with rows of a language model and a key.

    Args:
        spec: the generator.
        config: an instance of ``spec.config``.
        hidden: width of the rows that it reads.
        raw: items as a dataset hands them in, at least two, of unlike sizes where the modality has such.
    """

    spec: GeneratorSpec
    config: Any
    hidden: int
    raw: Sequence[Any]

    def sizes(self) -> list[tuple[int, ...]]:
        """Return the items' header sizes."""
        return [self.spec.measure(raw) for raw in self.raw]

    def counts(self) -> list[int]:
        """Return how many losses each item has."""
        return [self.spec.targets(self.config, size) for size in self.sizes()]

    def items(self, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
        """Return the items prepared, floating numbers as ``dtype``."""
        return [
            {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in self.spec.prepare(self.config, raw).items()
            }
            for raw in self.raw
        ]

    def spans(self) -> list[tuple[int, int]]:
        """Return which rows each item is made from: some of none, and with a row between them that is of no item."""
        counts = list(islice(cycle(_COUNTS), len(self.raw)))
        starts = accumulate((count + 1 for count in counts[:-1]), initial=1)
        return [(start, start + count) for start, count in zip(starts, counts, strict=True)]

    def seen(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the rows [R, hidden] of the language model."""
        rows = torch.randn(self.spans()[-1][1] + 1, self.hidden, generator=torch.Generator().manual_seed(5))
        return rows.to(dtype).requires_grad_()

    def keys(self) -> Tensor:
        """Return by what is drawn for each item, [N]."""
        return item_keys(step_key(1, 1), range(len(self.raw)), [0] * len(self.raw))

    def build(self, layout: Layout | None = None, *, stirred: bool = True) -> BuiltParts:
        """Build the module in a layout on the default group's ranks; collective over them.

        Args:
            layout: of the module; on this rank alone if None.
            stirred: whether its parameters are moved off their initial values; the same in any layout.
        """
        layout = layout or Layout()
        stages = [Stage(index, layout.pp) for index in range(layout.pp)]
        parts, axes = build_stages(self.spec, self.config, name=_NAME, layout=layout, stages=stages, hidden=self.hidden)
        built = BuiltParts(parts=parts, layout=layout, axes=axes)
        if stirred:
            built.stir()
        return built

    def layout(self, **changes: Any) -> Layout:
        """Return the layout of the whole module, with fields changed."""
        return Layout(**changes)

    def losses(self, built: BuiltParts, which: Sequence[int] | None = None, *, seen: Tensor | None = None) -> Tensor:
        """Return the losses of some items, in the order in which they are asked for; of all if None.

        Where ranks share the rows, those of its slice.

        Args:
            built: the module.
            which: indices of the items.
            seen: rows of the language model; None for those of `seen`, in the type of the parameters.

        Raises:
            BrokenError: a stage returns no tensor, or sends other rows than it promises.
        """
        which = range(len(self.raw)) if which is None else which
        items, spans, sizes = self.items(built.layout.dtype), self.spans(), self.sizes()
        keys = self.keys()[torch.tensor(which, dtype=torch.int64)]
        found, rows = None, _held(built, self.seen(built.layout.dtype) if seen is None else seen)
        for part in built.parts:
            first, last = part.stage.is_first, part.stage.is_last
            found = part.target_losses(
                [items[one] for one in which] if first or last else [],
                rows if first else None,
                [spans[one] for one in which],
                keys,
                sizes=[sizes[one] for one in which],
                hidden=found,
            )
            if not isinstance(found, Tensor):
                raise BrokenError(f"of {len(which)} items forward() returned {type(found).__name__}, not a tensor")
            if not last:
                self._check_sent(built, part.stage, [(sizes[one], spans[one]) for one in which], found)
        assert found is not None
        return found

    def _check_sent(
        self, built: BuiltParts, stage: Stage, items: Sequence[tuple[tuple[int, ...], tuple[int, int]]], sent: Tensor
    ) -> None:
        """Refuse a message of other rows than the spec promises for items of these sizes and spans."""
        stages = self.spec.stages
        assert stages is not None
        rows = sum(stages.message_rows(self.config, size, stop - start) for size, (start, stop) in items)
        promised = (-(-rows // built.slices), stages.width(self.config))
        if tuple(sent.shape) != promised:
            raise BrokenError(
                f"stage {stage.index} sends a tensor of shape {tuple(sent.shape)}, message_rows() and width() promise "
                f"{promised}"
            )

    def rows(self, built: BuiltParts) -> Tensor:
        """Return the losses of all items, one a row."""
        return self.losses(built).unsqueeze(1)

    def learn(self, built: BuiltParts) -> None:
        """Take the gradients of some sum of the losses of all items."""
        _learn(self, built, None, self.seen())


def check_losses(subject: GeneratorSubject) -> None:
    """forward() returns as many losses of an item as targets() says, finite and fp32."""
    built = subject.build()
    for index, (size, count) in enumerate(zip(subject.sizes(), subject.counts(), strict=True)):
        if type(count) is not int or count < 0:
            raise BrokenError(f"targets() of size {size} is {count!r}, not a whole number from 0")
        losses = subject.losses(built, [index])
        if tuple(losses.shape) != (count,) or losses.dtype != torch.float32:
            raise BrokenError(
                f"of item {index} of size {size} it returned losses of shape {tuple(losses.shape)} and type "
                f"{losses.dtype}, expected {(count,)} and torch.float32"
            )
        if not bool(torch.isfinite(losses).all()):
            raise BrokenError(f"of item {index} of size {size} a loss is not finite")


def check_empty(subject: GeneratorSubject) -> None:
    """forward() of no items returns no losses, and where they have a backward it works."""
    losses = subject.losses(subject.build(), [])
    if tuple(losses.shape) != (0,) or losses.dtype != torch.float32:
        raise BrokenError(f"it returned a tensor of shape {tuple(losses.shape)} and type {losses.dtype}")
    if losses.requires_grad:
        losses.sum().backward()


def check_alone(subject: GeneratorSubject) -> None:
    """An item's losses depend on itself, its rows and its key, not on the items beside it, nor on their order."""
    built, order = subject.build(), range(len(subject.raw))
    single = [subject.losses(built, [index]).detach().unsqueeze(1) for index in order]
    compare_rows(subject.rows(built), torch.cat(single), "losses of all items at once", "those of one at a time")
    turned = subject.losses(built, order[::-1]).unsqueeze(1)
    compare_rows(turned, torch.cat(single[::-1]), "losses of items in another order", "those of one at a time")


def check_spans(subject: GeneratorSubject) -> None:
    """An item learns from its own rows of the language model, and from no others."""
    built = subject.build()
    for index, (start, stop) in enumerate(subject.spans()):
        seen = subject.seen()
        subject.losses(built, [index], seen=seen).sum().backward()
        learned = set() if seen.grad is None else set(seen.grad.any(1).nonzero().flatten().tolist())
        if beyond := sorted(learned - set(range(start, stop))):
            raise BrokenError(f"item {index} is of rows {start} to {stop}, and rows {beyond} have gradients of it")


def check_types(subject: GeneratorSubject) -> None:
    """With bf16 weights, items and rows, losses are fp32, those of no items too, and rows have gradients in bf16."""
    built = subject.build(Layout(dtype=torch.bfloat16))
    for which in (None, ()):
        if (losses := subject.losses(built, which)).dtype != torch.float32:
            raise BrokenError(f"losses of {'all' if which is None else 'no'} items are {losses.dtype}")
    subject.losses(built).sum().backward()


def check_parts(subject: GeneratorSubject) -> None:
    """A frozen part gets no gradient, and the others still do."""
    if not subject.spec.parts:
        raise SkippedError("the spec names no parts")
    modules.check_frozen(subject, subject.spec.parts)


def check_costs(subject: GeneratorSubject) -> None:
    """flops() counts the weights, and more arithmetic for more items."""
    flops = subject.spec.flops
    if flops is None:
        raise SkippedError("the spec has no flops")
    sizes, counts = subject.sizes(), [stop - start for start, stop in subject.spans()]
    one, every = (
        list(flops(subject.config, subject.hidden, Stage(), "none", sizes[:number], counts[:number]).values())
        for number in (1, len(sizes))
    )
    counted, held = sum(work.weights for work in every), sum(p.numel() for p in subject.build().parameters.values())
    if abs(counted - held) > _LEFT_OUT * held:
        raise BrokenError(f"it counts {counted:,} weights, the module has {held:,}")
    if not sum(work.forward for work in every) > sum(work.forward for work in one) > 0:
        raise BrokenError("items beside the first take no arithmetic")


def check_made(subject: GeneratorSubject) -> None:
    """generate() makes an item for each span, the same again, fit to be trained by; save() writes it to a file."""
    spec, config = subject.spec, subject.config
    if spec.generate is None or spec.save is None:
        raise SkippedError("the spec has no generate and save")
    module, spans, keys = subject.build().parts[0].module, subject.spans(), subject.keys()
    seen = subject.seen().detach()
    first, again = (spec.generate(module, config, seen, spans, keys) for _ in range(2))
    if len(first) != len(spans):
        raise BrokenError(f"of {len(spans)} spans it made {len(first)} items")
    if made := len(spec.generate(module, config, seen, [], keys[:0])):
        raise BrokenError(f"of no spans it made {made} items")
    for index, pair in enumerate(zip(first, again, strict=True)):
        one, other = (spec.prepare(config, made) for made in pair)
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            raise BrokenError(f"item {index} is another in a second call with the same key")
    check_losses(attrs.evolve(subject, raw=tuple(first)))
    with TemporaryDirectory() as folder:
        for index, made in enumerate(first):
            path = spec.save(made, Path(folder) / f"item.{index}")
            if path.parent != Path(folder) or not path.is_file() or not path.name.startswith(f"item.{index}"):
                raise BrokenError(
                    f"save() says that it wrote {path.name!r}; expected a file item.{index} with a suffix"
                )


def check_tensor(subject: GeneratorSubject) -> None:
    """Tensor ranks compute together what one rank does: initial values, losses, gradients, those of rows on each."""
    if subject.spec.tensor is None:
        raise SkippedError("the spec has no tensor support")
    _check_layout(subject, Layout(tp=_RANKS))


def check_sequence(subject: GeneratorSubject) -> None:
    """Tensor ranks that also split the rows between layers compute what one rank does."""
    if subject.spec.tensor is None or not subject.spec.tensor.splits_rows:
        raise SkippedError("its tensor support does not split rows")
    _check_layout(subject, Layout(tp=_RANKS, sequence_parallel=True))


def check_context(subject: GeneratorSubject) -> None:
    """Context ranks compute what one rank does, wherever their slices of rows and losses are cut."""
    if subject.spec.context is None:
        raise SkippedError("the spec has no context support")
    _check_layout(subject, Layout(cp=_RANKS))


def check_stages(subject: GeneratorSubject) -> None:
    """Stages one after the other compute what the whole does, and send the rows that they promise."""
    stages = subject.spec.stages
    if stages is None:
        raise SkippedError("the spec has no stages")
    modules.refuse_layout(subject, _NAME, Layout(pp=_RANKS))
    for part in subject.build(Layout(pp=_RANKS)).parts:
        named = stages.parts(subject.config, part.stage)
        if named != (held := modules.held_parts(subject.spec, part)):
            raise BrokenError(f"stage {part.stage.index} holds the parts {sorted(held)}, parts() says {sorted(named)}")
    _check_layout(subject, Layout(pp=_RANKS))


def check_recompute(subject: GeneratorSubject) -> None:
    """Recomputation changes neither losses nor gradients."""
    if not subject.spec.recompute:
        raise SkippedError("the spec has no recomputation")
    for kind in subject.spec.recompute:
        _check_layout(subject, Layout(recompute=kind))  # type: ignore[arg-type]  # keys are what users may ask for


def _check_layout(subject: GeneratorSubject, layout: Layout) -> None:
    """Compare a layout with the whole module, with all items, with one, and without any."""
    modules.refuse_layout(subject, _NAME, layout)
    check_initial_values(*(subject.build(one, stirred=False).values() for one in (layout, Layout())))
    for which in (None, [0], []):
        split, whole = subject.build(layout), subject.build()
        losses, wanted = subject.losses(split, which), _held(split, subject.losses(whole, which))
        what = f"losses of {len(subject.raw) if which is None else len(which)} items"
        compare_rows(losses.unsqueeze(1), wanted.detach().unsqueeze(1), what, "those of the whole module")
        seen, seen_whole = subject.seen(), subject.seen()
        _learn(subject, split, which, seen)
        _learn(subject, whole, which, seen_whole)
        if which == []:  # where not even copies need have gradients
            continue
        check_copies(split)
        compare_gradients(split.gradients(), whole.gradients())
        assert seen.grad is not None
        assert seen_whole.grad is not None
        compare_gradients({"rows": _whole(split, seen.grad)}, {"rows": seen_whole.grad}, of="input")


def _held(built: BuiltParts, rows: Tensor) -> Tensor:
    """Return a rank's slice of rows [R, ...], padded with zeros."""
    each = -(-len(rows) // built.slices)
    mine = rows[built.slice * each :][:each]
    return torch.cat([mine, mine.new_zeros(each - len(mine), *rows.shape[1:])])


def _whole(built: BuiltParts, piece: Tensor) -> Tensor:
    """Return the sum of what the ranks have that share rows."""
    return built.axes.total(piece, ("cp", "tp") if built.axes.axis.splits_rows else ("cp",))


def _learn(subject: GeneratorSubject, built: BuiltParts, which: Sequence[int] | None, seen: Tensor) -> None:
    losses = subject.losses(built, which, seen=seen)
    if not losses.requires_grad and which == []:
        return
    count = sum(subject.counts()[one] for one in (range(len(subject.raw)) if which is None else which))
    weights = torch.randn(count, generator=torch.Generator().manual_seed(7))
    with ExitStack() as stack:
        later = [stack.enter_context(part.defer_weight_grads()) for part in built.parts]
        losses.backward(_held(built, weights))
    for compute in later:
        compute()


GENERATOR_CHECKS: Mapping[str, Check] = {
    "measure": Check(check_measure),
    "prepare": Check(check_prepare),
    "losses": Check(check_losses),
    "empty": Check(check_empty),
    "independence": Check(check_alone),
    "rows": Check(check_spans),
    "chance": Check(modules.check_chance),
    "gradients": Check(modules.check_gradients),
    "initial values": Check(modules.check_initial),
    "save and load": Check(modules.check_saved),
    "number types": Check(check_types),
    "parts": Check(check_parts),
    "costs": Check(check_costs),
    "published weights": Check(modules.check_published),
    "generation": Check(check_made),
    "tensor ranks": Check(check_tensor, _RANKS),
    "sequence parallel": Check(check_sequence, _RANKS),
    "context ranks": Check(check_context, _RANKS),
    "stages": Check(check_stages),
    "recompute": Check(check_recompute),
}
"""What is checked, by its short name, in the order in which a beginner should mend it."""

_NEEDED = frozenset({"measure", "prepare", "losses", "empty"})
"""What all other checks rely on."""


def check_generator(
    spec: GeneratorSpec,
    items: Sequence[Any],
    *,
    config: Any = None,
    hidden: int = 24,
    checks: Iterable[str] = GENERATOR_CHECKS,
    seconds: float = 300,
) -> Iterator[Verdict]:
    """Look whether a generator keeps its promises, and yield a verdict on each.

    Each check runs in forked processes of its own; this process computes nothing with torch.

    Args:
        spec: the generator.
        items: as a dataset hands them in, at least two, of unlike sizes where the modality has such.
        config: settings, small ones; the defaults if None.
        hidden: width of the rows that it reads.
        checks: names of the `GENERATOR_CHECKS` to run.
        seconds: how long a check may take.
    """
    if len(items) < 2:  # noqa: PLR2004 - one item shows nothing of what another one does to it
        msg = f"expected at least two items, got {len(items)}"
        raise ValueError(msg)
    config = spec.config() if config is None else config
    subject = GeneratorSubject(spec=spec, config=config, hidden=hidden, raw=tuple(items))
    return Checks(by_name=GENERATOR_CHECKS, needed=_NEEDED).look(subject, checks, seconds=seconds)


def assert_generator_conforms(
    spec: GeneratorSpec,
    items: Sequence[Any],
    *,
    config: Any = None,
    hidden: int = 24,
    checks: Iterable[str] = GENERATOR_CHECKS,
    seconds: float = 300,
) -> None:
    """Fail with all verdicts if a generator breaks a promise; arguments as for `check_generator`.

    Raises:
        AssertionError: its text is a line for each check.
    """
    verdicts = check_generator(spec, items, config=config, hidden=hidden, checks=checks, seconds=seconds)
    assert_kept(f"generator {spec.name!r}", verdicts)

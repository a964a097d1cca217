"""The conformance kit of generators: it finds each of these faults in one that is otherwise right, and none without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.model import (
    ContextSupport,
    GeneratorSpec,
    GeneratorStages,
    HfFamily,
    HfTensor,
    OpCost,
    Stage,
    TensorSupport,
)
from mimo.model.runtime import (
    ContextAxis,
    EncoderMlp,
    Linear,
    PackedRows,
    Split,
    TensorAxis,
    normal,
    split_blocks,
    uniform,
)
from mimo.model.testing import GENERATOR_CHECKS, assert_generator_conforms, check_generator

HIDDEN, MIDDLE = 6, 8
ITEMS = ((0.5, -1.0, 2.0), (1.5,), (-0.7, 0.9), (0.3, 0.1))
"""A raw item is a tuple of numbers, each of which has a loss."""


@attrs.frozen
class Config:
    """Nothing to set."""


class Guess(nn.Module):
    """Says of each item how far its numbers are from what its rows and a draw make of them.

    Where ranks share rows, each has a slice of the items behind `read`.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mlp = EncoderMlp(hidden, MIDDLE, hidden)
        self.out = Linear(hidden, 1)
        self.rows = PackedRows()
        self.stage = Stage()

    def read(self, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor) -> Tensor:
        """Return a row for each item of this rank's slice, [n, H]."""
        every, held = self.rows.gather(rows, total=len(rows) * self.rows.slices), self.rows.held(len(spans))
        mine = slice(held.start, held.stop)
        sums = [every[start:stop].sum(0, keepdim=True) for start, stop in spans[mine]]
        summed = torch.cat([every[:0], *sums]) + normal(keys[mine], rows.shape[1]).to(rows)
        summed = self.rows.pad(summed, total=len(spans))
        return summed + self.mlp(summed)  # type: ignore[no-any-return]

    def made(self, hidden: Tensor) -> Tensor:
        """Return a number for each row, [n, 1]."""
        return self.out(hidden).float()  # type: ignore[no-any-return]

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        rows: Tensor | None,
        spans: Sequence[tuple[int, int]],
        keys: Tensor,
        sizes: Sequence[tuple[int, ...]],
        hidden: Tensor | None,
    ) -> Tensor:
        """Return the losses, or a row for each item from the first of two stages."""
        if hidden is None:
            assert rows is not None
            hidden = self.read(rows, spans, keys)
        if not self.stage.is_last:
            return hidden
        counts = torch.tensor([size[0] for size in sizes], dtype=torch.int64)
        owners = torch.arange(len(sizes)).repeat_interleave(counts)
        made = self.rows.take(self.made(hidden), owners, total=len(sizes)).squeeze(1)
        held = self.rows.held(len(owners))
        values = torch.cat([made.new_zeros(0), *(item["value"].float() for item in items)])[held.start : held.stop]
        return (functional.pad(values, (0, len(made) - len(values))) - made).square()


def _attach(module: Any, context: ContextAxis) -> None:
    module.rows = attrs.evolve(module.rows, context=context)


def _plan(module: Any, axis: TensorAxis) -> Mapping[str, Split]:
    module.rows = attrs.evolve(module.rows, axis=axis)
    return split_blocks(module, axis)


def _cut(module: Any, stage: Stage) -> nn.Module:
    module.stage = stage
    for name in (*(() if stage.is_first else ("mlp",)), *(() if stage.is_last else ("out",))):
        delattr(module, name)
    return module  # type: ignore[no-any-return]


STAGES = GeneratorStages(
    layers=lambda _config: 2,
    message_rows=lambda _config, _size, _rows: 1,
    width=lambda _config: HIDDEN,
    cut=_cut,
    parts=lambda _config, stage: frozenset(
        name for name, held in (("mlp", stage.is_first), ("out", stage.is_last)) if held
    ),
)


def _save(raw: Any, path: Path) -> Path:
    target = path.with_name(f"{path.name}.txt")
    target.write_text(str(raw), encoding="utf-8")
    return target


def _generate(
    module: Any, _config: Config, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor
) -> list[tuple[float, ...]]:
    with torch.no_grad():
        return [tuple(one) for one in module.made(module.read(rows, spans, keys)).tolist()]


def _flops(
    _config: Config, hidden: int, _stage: Stage, _recompute: str, sizes: Sequence[tuple[int, ...]], _rows: Sequence[int]
) -> Mapping[str, OpCost]:
    weights = 2 * hidden * MIDDLE + MIDDLE + hidden + hidden + 1
    return {"all": OpCost(weighted=2.0 * len(sizes) * weights, weights=weights)}


PUBLISHED = HfFamily(
    model_type="guess",
    architecture="GuessModel",
    settings=lambda _published: {},
    describe=lambda _config: {},
    tensors=lambda _config: [
        HfTensor(ours="mlp.up.weight", theirs="fc.0.weight", dims=(1, 0)),
        HfTensor(ours="mlp.up.bias", theirs="fc.0.bias"),
        HfTensor(ours="mlp.down.weight", theirs="fc.1.weight"),
        HfTensor(ours="mlp.down.bias", theirs="biases", rows=(0, HIDDEN)),
        HfTensor(ours="out.bias", theirs="biases", rows=(HIDDEN, HIDDEN + 1)),
        HfTensor(ours="out.weight", theirs="out.weight"),
    ],
)


def _of_another(_config: Config) -> list[HfTensor]:
    return [HfTensor(ours="mlp.gate.weight", theirs="gate")]


def _without_rows(config: Config) -> list[HfTensor]:
    return [entry for entry in PUBLISHED.tensors(config) if entry.ours != "mlp.down.bias"]


def spec_of(module: type[Guess] = Guess, **fields: Any) -> GeneratorSpec:
    """Return a spec of a module."""
    spec = GeneratorSpec(
        name="guess",
        config=Config,
        measure=lambda raw: (len(raw),),
        targets=lambda _config, size: size[0],
        prepare=lambda _config, raw: {"value": torch.tensor(raw)},
        build=lambda _config, hidden: module(hidden),
        generate=_generate,
        save=_save,
        parts={"mlp": ("mlp",), "out": ("out",)},
        tensor=TensorSupport(divisible=lambda _config: {}, plan=_plan, splits_rows=True),
        context=ContextSupport(attach=_attach),
        stages=STAGES,
        recompute={"full": lambda module: [part.forward for part in module.modules() if isinstance(part, EncoderMlp)]},
        flops=_flops,
        hf=[PUBLISHED],
    )
    return attrs.evolve(spec, **fields)


def test_a_generator_that_keeps_its_promises_breaks_none() -> None:
    """Every check looks at it."""
    verdicts = list(check_generator(spec_of(), ITEMS, hidden=HIDDEN))
    assert [verdict.check for verdict in verdicts] == list(GENERATOR_CHECKS)
    assert [str(verdict) for verdict in verdicts if verdict.broken is not None or verdict.skipped is not None] == []


def test_a_plain_generator_needs_nothing_more() -> None:
    """Without the optional fields their checks are not looked at, each saying why."""
    none: Mapping[str, Any] = dict.fromkeys(("generate", "save", "tensor", "stages", "context", "flops"))
    plain = spec_of(Plain, parts={}, recompute={}, hf=(), **none)
    verdicts = {verdict.check: verdict for verdict in check_generator(plain, ITEMS, hidden=HIDDEN)}
    assert {name: verdict.skipped for name, verdict in verdicts.items() if verdict.skipped} == {
        "parts": "the spec names no parts",
        "costs": "the spec has no flops",
        "published weights": "the spec has no tables of published weights",
        "generation": "the spec has no generate and save",
        "tensor ranks": "the spec has no tensor support",
        "sequence parallel": "its tensor support does not split rows",
        "context ranks": "the spec has no context support",
        "stages": "the spec has no stages",
        "recompute": "the spec has no recomputation",
    }
    assert not any(verdict.broken for verdict in verdicts.values())


class Plain(Guess):
    """Knows no stages."""

    def forward(self, items: Any, rows: Any, spans: Any, keys: Any, *_of_stages: Any) -> Tensor:
        assert not _of_stages
        return super().forward(items, rows, spans, keys, [(len(item["value"]),) for item in items], None)


class Beside(Guess):
    """Lets the first item see the rows of all."""

    def read(self, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor) -> Tensor:
        return super().read(rows, [(0, len(rows)), *spans[1:]] if spans else spans, keys)


class Places(Guess):
    """Draws by the place of an item among those of a call."""

    def read(self, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor) -> Tensor:
        return super().read(rows, spans, torch.arange(len(keys)))


class Chance(Guess):
    """Draws from torch's generator."""

    def read(self, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor) -> Tensor:
        return super().read(rows, spans, torch.randint(1 << 40, keys.shape))


class InRowsType(Guess):
    """Returns losses in the type of the rows."""

    def forward(self, items: Any, *given: Any) -> Tensor:
        return super().forward(items, *given).bfloat16()


class Deaf(Guess):
    """Draws its inner part out of the graph."""

    def read(self, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor) -> Tensor:
        with torch.no_grad():
            return super().read(rows, spans, keys)


class Drops(Guess):
    """Sends zeros from its first stage."""

    def forward(self, items: Any, *given: Any) -> Tensor:
        found = super().forward(items, *given)
        return found if self.stage.is_last else 0 * found


class Few(Guess):
    """Needs an item."""

    def forward(self, items: Any, *given: Any) -> Tensor:
        return super().forward(items, *given)[None if items else 0]


def _drifts(module: Any, config: Config, rows: Tensor, spans: Any, keys: Tensor) -> list[tuple[float, ...]]:
    return [(one + float(torch.rand(())),) for (one,) in _generate(module, config, rows, spans, keys)]


def _longer(module: Any, config: Config, rows: Tensor, spans: Any, keys: Tensor) -> list[tuple[float, ...]]:
    return [*_generate(module, config, rows, spans, keys), (float(uniform(keys[:1], 1)),)] if spans else []


def _forgets(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    """Return how weights are split, and hand the axis to nothing."""
    splits = split_blocks(module, axis)
    split_blocks(module, TensorAxis.single())
    return splits


def _sums_nothing(module: Any, axis: TensorAxis) -> Mapping[str, Split]:
    return {path: Split(split.dim) for path, split in _plan(module, axis).items()}


FAULTS: Mapping[str, tuple[str, Callable[[], GeneratorSpec], str]] = {
    "targets of another number": (
        "losses",
        lambda: spec_of(targets=lambda _config, size: size[0] + 1),
        r"of item 0 of size \(3,\) it returned losses of shape \(3,\) and type torch.float32, expected \(4,\)",
    ),
    "no items are too few": ("empty", lambda: spec_of(Few), "IndexError"),
    "an item sees rows of others": ("rows", lambda: spec_of(Beside), "item 0 is of rows 1 to 4, and rows .* have grad"),
    "draws by place": ("independence", lambda: spec_of(Places), "losses of all items at once differ from those of one"),
    "draws by chance": ("chance", lambda: spec_of(Chance), "it drew from torch's generator"),
    "losses of bf16": ("number types", lambda: spec_of(InRowsType), r"losses of all items are torch\.bfloat16"),
    "no graph": ("gradients", lambda: spec_of(Deaf), "parameter 'mlp.up.weight' got no gradient"),
    "a part of nothing": ("parts", lambda: spec_of(parts={"mlp": ("mlp", "out"), "none": ("none",)}), "'none'"),
    "weights forgotten": (
        "costs",
        lambda: spec_of(flops=lambda *_: {"all": OpCost(weighted=1.0)}),
        "it counts 0 weights, the module has 117",
    ),
    "a table of another module": (
        "published weights",
        lambda: spec_of(hf=[attrs.evolve(PUBLISHED, tensors=_of_another)]),
        "the table names mlp.gate.weight, which the module lacks",
    ),
    "a table that leaves out rows": (
        "published weights",
        lambda: spec_of(hf=[attrs.evolve(PUBLISHED, tensors=_without_rows)]),
        "the table reads rows 6 to 7 of biases, a part of shape .*, after row 0",
    ),
    "made by chance": ("generation", lambda: spec_of(generate=_drifts), "item 0 is another in a second call with"),
    "more than asked for": ("generation", lambda: spec_of(generate=_longer), "of 4 spans it made 5 items"),
    "a file elsewhere": (
        "generation",
        lambda: spec_of(save=lambda raw, path: _save(raw, path.with_suffix(""))),
        "save\\(\\) says that it wrote 'item.txt'; expected a file item.0 with a suffix",
    ),
    "half of a sum": (
        "tensor ranks",
        lambda: spec_of(tensor=TensorSupport(divisible=lambda _config: {}, plan=_forgets)),
        "losses of 4 items differ from those of the whole module",
    ),
    "a slice that others learn from": (
        "context ranks",
        lambda: spec_of(context=ContextSupport(attach=lambda _module, _context: None)),
        r"losses of 4 items have shape \(8, 1\), those of the whole module \(4, 1\)",
    ),
    "copies of which each learns a part": (
        "sequence parallel",
        lambda: spec_of(tensor=TensorSupport(divisible=lambda _config: {}, plan=_sums_nothing, splits_rows=True)),
        "the gradient of parameter .* is not the same on all tensor ranks",
    ),
    "a message of other rows": (
        "stages",
        lambda: spec_of(stages=attrs.evolve(STAGES, message_rows=lambda _config, _size, rows: rows)),
        r"stage 0 sends a tensor of shape \(4, 6\), message_rows\(\) and width\(\) promise \(6, 6\)",
    ),
    "parts of another stage": (
        "stages",
        lambda: spec_of(stages=attrs.evolve(STAGES, parts=lambda _config, _stage: frozenset({"mlp"}))),
        r"stage 1 holds the parts \['out'\], parts\(\) says \['mlp'\]",
    ),
    "a stage that forgets": (
        "stages",
        lambda: spec_of(Drops),
        "losses of 4 items differ from those of the whole module",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    """By the check that is about it, in words that say what is wrong."""
    check, make, text = FAULTS[fault]
    needed = ["measure", "prepare"]
    verdicts = list(check_generator(make(), ITEMS, hidden=HIDDEN, checks=[*needed, check]))
    assert [verdict.broken for verdict in verdicts[:-1]] == [None] * len(needed)
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(verdicts[-1].broken)


def test_a_failure_lists_every_promise() -> None:
    """`assert_generator_conforms` fails with a line for each check, and asks for two items."""
    with pytest.raises(AssertionError, match=r"generator 'guess' breaks its promises\nok measure: .*\nNO losses: "):
        assert_generator_conforms(
            spec_of(targets=lambda _config, _size: 0), ITEMS, hidden=HIDDEN, checks=["measure", "losses"]
        )
    with pytest.raises(ValueError, match="expected at least two items, got 1"):
        next(check_generator(spec_of(), ITEMS[:1], hidden=HIDDEN))

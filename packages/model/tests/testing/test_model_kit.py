"""The conformance kit: it finds each of these faults in an encoder that is otherwise right, and none without one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import pytest
import torch
from pairs import ITEMS, WIDTH, Config, Pairs, spec_of
from torch import Tensor, nn

from mimo.model import (
    EncoderSpec,
    OpCost,
)
from mimo.model.runtime import (
    EncoderAttention,
    EncoderMlp,
    Linear,
    Split,
    TensorAxis,
    split_encoder,
)
from mimo.model.testing import CHECKS, ModuleLayout, assert_conforms, assert_layouts, check_encoder


def test_an_encoder_that_keeps_its_promises_breaks_none() -> None:
    """Every check but that of published weights looks at it."""
    verdicts = list(check_encoder(spec_of(), ITEMS, hidden=6))
    assert [verdict.check for verdict in verdicts] == list(CHECKS)
    assert [verdict.check for verdict in verdicts if verdict.skipped is not None] == ["published weights"]
    assert [str(verdict) for verdict in verdicts if verdict.broken is not None] == []


def _plain(module: type[Sums]) -> EncoderSpec:
    return EncoderSpec(
        name="plain",
        config=Config,
        measure=lambda raw: (len(raw),),
        rows=lambda _config, _size: 1,
        prepare=lambda _config, raw: {"sum": torch.tensor([sum(raw)])},
        build=lambda _config, hidden: module(hidden),
    )


def test_tensors_that_are_no_buffers_have_their_values() -> None:
    """A module that makes some while it is built is built with storage, not on the meta device."""
    checks = ["build", "rows", "initial values", "save and load"]
    for module in (Scaled, ScaledByList, ScaledByName):
        verdicts = check_encoder(_plain(module), ITEMS, hidden=6, checks=checks)
        assert [str(verdict)[:2] for verdict in verdicts] == ["ok"] * 4, module


def test_a_plain_encoder_needs_nothing_more() -> None:
    """Without the optional fields their checks are not looked at, each saying why."""
    verdicts = {verdict.check: str(verdict) for verdict in check_encoder(_plain(Sums), ITEMS, hidden=6)}
    assert not any(line.startswith("NO") for line in verdicts.values())
    assert verdicts["stages"].endswith("(not looked at: the spec has no stages)")
    assert verdicts["rows"].startswith("ok rows: forward() returns as many rows of an item as rows() says")


class Sums(nn.Module):
    """One row for each item, in PyTorch's own layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(1, hidden)

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows."""
        weight = self.project.weight
        sums = torch.stack([item["sum"] for item in items]) if items else weight.new_zeros(0, 1)
        return cast("Tensor", self.project(sums))


class Scaled(Sums):
    """Multiplies by a tensor that is neither a parameter nor a buffer."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.scale = torch.full((hidden,), 2.0)

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows."""
        rows = super().forward(items)
        return rows * self.scale.to(rows)


class ScaledByList(Scaled):
    """Keeps it in a list."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.kept = [self.scale]
        del self.scale

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows."""
        rows = Sums.forward(self, items)
        return rows * self.kept[0].to(rows)


class ScaledByName(Scaled):
    """Keeps it in a dict."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.kept = {"scale": self.scale}
        del self.scale

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows."""
        rows = Sums.forward(self, items)
        return rows * self.kept["scale"].to(rows)


class Longer(Pairs):
    """A row more than it promised."""

    def forward(self, *given: Any) -> Tensor:
        """Return them."""
        rows = super().forward(*given)
        return torch.cat((rows, rows[-1:]))


class Remembers(Pairs):
    """Adds what the last call saw."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.last: Tensor | None = None

    def forward(self, *given: Any) -> Tensor:
        """Return the rows."""
        rows = super().forward(*given)
        found = rows if self.last is None else rows + self.last
        self.last = rows.detach().sum()
        return found


class Standardises(Pairs):
    """Subtracts the mean of whatever items are there."""

    def forward(self, *given: Any) -> Tensor:
        """Return the rows."""
        rows = super().forward(*given)
        return rows - rows.mean(0) if len(rows) else rows


class Forgets(Pairs):
    """Has a parameter that nothing reads."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.projector.spare = Linear(2, 2)


class Unsharded(Pairs):
    """Scales heads by a buffer that knows all of them, beside queries that are cut."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        for part in self.modules():
            if isinstance(part, EncoderAttention):
                part.query.register_buffer("scales", torch.linspace(1, 2, WIDTH))
                part.query.register_forward_hook(_scale)


def _scale(module: nn.Module, _args: object, out: Tensor) -> Tensor:
    return out * module.get_buffer("scales")[: out.shape[1]].to(out)


class Shaky(Pairs):
    """Drops values by chance."""

    def start(self, *given: Any) -> Tensor:
        """Return fewer."""
        rows = super().start(*given)
        return rows * (torch.rand(rows.shape) > 0.1).to(rows)


class NeedsItems(Pairs):
    """Falls over an empty list."""

    def start(self, items: Sequence[Mapping[str, Tensor]], lengths: Sequence[int]) -> Tensor:
        """Return embedded pairs."""
        torch.stack([item["values"].sum() for item in items])
        return super().start(items, lengths)


class Unsaved(Pairs):
    """Draws a tensor at birth that no state dict holds."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.hidden_scale = [random.random()]

    def forward(self, *given: Any) -> Tensor:
        """Return the rows."""
        return super().forward(*given) * self.hidden_scale[0]


class Unseeded(Linear):
    """Draws its bias from a generator of its own."""

    def reset_parameters(self) -> None:
        """Draw."""
        super().reset_parameters()
        assert self.bias is not None
        nn.init.constant_(self.bias, random.random())


class DrawsElsewhere(Pairs):
    """Has initial values that the seed doesn't decide."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.embed = Unseeded(2, WIDTH)


class Promotes(Pairs):
    """Makes a tensor of another number type."""

    def forward(self, *given: Any) -> Tensor:
        """Return the rows."""
        rows = super().forward(*given)
        return rows + torch.zeros(rows.shape[1])


class Detaches(Pairs):
    """Cuts the graph between encoder and projector."""

    def pass_layers(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the rows of the layers, without their past."""
        return super().pass_layers(hidden, lengths).detach()


class Scribbles(Pairs):
    """Works on the items in place."""

    def start(self, items: Sequence[Mapping[str, Tensor]], lengths: Sequence[int]) -> Tensor:
        """Return embedded pairs."""
        for item in items:
            item["values"].clamp_(max=1.5)
        return super().start(items, lengths)


class Listed(Pairs):
    """Returns no tensor."""

    def forward(self, *given: Any) -> Any:
        """Return the rows one by one."""
        return list(super().forward(*given))


class DropsOut(Pairs):
    """Has a layer whose draws depend on the layout."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.projector.spill = nn.Dropout(0.1)


class Muted(Pairs):
    """Has a parameter that is multiplied by zero."""

    def start(self, *given: Any) -> Tensor:
        """Return embedded pairs."""
        return super().start(*given) + 0 * cast("Tensor", self.projector.spare).sum()

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.projector.spare = nn.Parameter(torch.ones(2))


class Shifts(Pairs):
    """Hands over other rows where it is divided."""

    def pass_layers(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the rows of the layers."""
        rows = super().pass_layers(hidden, lengths)
        return rows + 1 if self.stage.is_projector else rows


class StopsEarly(Pairs):
    """Lets the encoder learn only while the projector does."""

    def pass_layers(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the rows of the layers."""
        rows = super().pass_layers(hidden, lengths)
        assert isinstance(self.projector, EncoderMlp)
        return rows if self.projector.up.weight.requires_grad else rows.detach()


def _of_tensors(**changes: Any) -> EncoderSpec:
    tensor = spec_of().tensor
    assert tensor is not None
    return spec_of(tensor=attrs.evolve(tensor, **changes))


def _of_stages(**changes: Any) -> EncoderSpec:
    stages = spec_of().stages
    assert stages is not None
    return spec_of(stages=attrs.evolve(stages, **changes))


def _of_seam(module: type[Pairs] = Pairs, **changes: Any) -> EncoderSpec:
    seam = spec_of().seam
    assert seam is not None
    return spec_of(module, seam=attrs.evolve(seam, **changes))


def _no_sums(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    return {path: attrs.evolve(split, summed=False) for path, split in split_encoder(module, axis).items()}


def _random(_config: Config, raw: Any) -> Mapping[str, Tensor]:
    return {"values": torch.tensor(raw) + torch.rand(())}


FAULTS: Mapping[str, tuple[Callable[[], EncoderSpec], str, str]] = {
    "wrong row count": (lambda: spec_of(Longer), "rows", "item 0 of size (4,) became a tensor of shape (3, 6)"),
    "another grid than rows": (
        lambda: spec_of(grid=lambda _config, size: (1, size[0], 2)),
        "rows",
        "grid() of size (4,) is (1, 4, 2), rows() 2",
    ),
    "no tensor": (lambda: spec_of(Listed), "rows", "of 1 items forward() returned list, not a tensor"),
    "dropout": (
        lambda: spec_of(DropsOut),
        "build",
        "would depend on the layout, got Dropout at projector.spill. Set its probability to 0, or use",
    ),
    "items changed in place": (lambda: spec_of(Scribbles), "items", "it changed 'values' of item 0; work on a copy"),
    "an error with one item": (
        lambda: spec_of(prepare=lambda _config, raw: {"values": torch.tensor(raw).view(-1, 4)}),
        "prepare",
        "is invalid for input of size 2 (with item 1 of size (2,))",
    ),
    "state shared between calls": (lambda: spec_of(Remembers), "memory", "rows of item 0 after other items differ"),
    "batch-dependent output": (
        lambda: spec_of(Standardises),
        "independence",
        "rows of all items at once differ from",
    ),
    "missing gradient": (
        lambda: spec_of(Forgets),
        "gradients",
        "parameter 'projector.spare.weight' got no gradient",
    ),
    "cut graph": (lambda: spec_of(Detaches), "gradients", "got no gradient"),
    "a parameter without effect": (
        lambda: spec_of(Muted),
        "gradients",
        "the gradient of parameter 'projector.spare' is all zeros",
    ),
    "frozen with another": (
        lambda: spec_of(StopsEarly),
        "parts",
        "got no gradient where only part 'projector' is frozen",
    ),
    "unsharded buffer": (
        lambda: spec_of(Unsharded),
        "tensor ranks",
        "rows of 3 items differ from those of the whole",
    ),
    "chance": (lambda: spec_of(Shaky), "chance", "it drew from torch's generator"),
    "no items": (lambda: spec_of(NeedsItems), "empty", "RuntimeError: stack expects a non-empty TensorList"),
    "unsaved state": (lambda: spec_of(Unsaved), "save and load", "rows after loading differ from those before"),
    "unseeded values": (
        lambda: spec_of(DrawsElsewhere),
        "initial values",
        "'embed.bias' differs between two modules",
    ),
    "number types": (lambda: spec_of(Promotes), "number types", "rows are torch.float32"),
    "no sum over split rows": (
        lambda: _of_tensors(plan=_no_sums),
        "sequence parallel",
        "the gradient of parameter",
    ),
    "wrong message": (
        lambda: _of_stages(message_rows=lambda _config, size: size[0]),
        "stages",
        "stage 0 sends a tensor of shape (6, 8), message_rows() and width() promise (12, 8)",
    ),
    "wrong parts of a stage": (
        lambda: _of_stages(parts=lambda _config, _stage: frozenset({"encoder"})),
        "stages",
        "stage 1 holds the parts ['encoder', 'projector'], parts() says ['encoder']",
    ),
    "wrong rows at the seam": (
        lambda: _of_seam(rows=lambda _config, size: size[0]),
        "seam",
        "the tower sends a tensor of shape (6, 8), rows() and width() of the seam promise (12, 8)",
    ),
    "a seam elsewhere than it says": (
        lambda: _of_seam(parts=frozenset({"encoder"})),
        "seam",
        "the tower holds ['encoder'], and the seam has ['encoder'] behind it; cut() is to keep the parameters of one",
    ),
    "other rows behind the seam": (lambda: spec_of(Shifts), "seam", "rows of 3 items differ from those of the whole"),
    "careless prepare": (lambda: spec_of(prepare=_random), "prepare", "'values' differs from one call to the next"),
    "no mapping": (
        lambda: spec_of(prepare=lambda _config, raw: torch.tensor(raw)),
        "prepare",
        "of item 0 it returned Tensor, not a mapping of tensors by name",
    ),
    "no tensors by name": (
        lambda: spec_of(prepare=lambda _config, raw: {"values": raw}),
        "prepare",
        "of item 0 'values' is tuple, not a tensor",
    ),
    "sizes that are no numbers": (
        lambda: spec_of(measure=lambda raw: [len(raw)]),
        "measure",
        "of item 0 it returned [4], not a tuple of whole numbers",
    ),
    "weights left out": (
        lambda: spec_of(flops=lambda *_given: {"encoder": OpCost(weighted=1, weights=3)}),
        "costs",
        "it counts 3 weights, the module has",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found(fault: str) -> None:
    """By the check that is for it, in words that lead to it."""
    make, check, words = FAULTS[fault]
    (verdict,) = check_encoder(make(), ITEMS, hidden=6, checks=[check])
    assert words in str(verdict.broken)


def test_what_fails_for_the_same_reason_is_said_once() -> None:
    """Checks after one that all need are not looked at."""
    verdicts = list(check_encoder(spec_of(DropsOut), ITEMS, hidden=6, checks=["measure", "build", "rows", "memory"]))
    assert [verdict.broken is not None for verdict in verdicts] == [False, True, False, False]
    assert [verdict.skipped for verdict in verdicts] == [None, None, "mend 'build' first", "mend 'build' first"]


def test_an_author_sees_all_verdicts_at_once() -> None:
    """`assert_conforms` fails with a line for each check."""
    with pytest.raises(AssertionError, match=r"(?s)encoder 'pairs' breaks its promises\nok measure: .*\nNO rows: "):
        assert_conforms(spec_of(Longer), ITEMS, hidden=6, checks=["measure", "rows"])


def test_a_single_item_is_refused() -> None:
    """It shows nothing of what another does to it."""
    with pytest.raises(ValueError, match="expected at least two items, got 1"):
        check_encoder(spec_of(), ITEMS[:1])


def test_layouts_of_ones_own_are_compared() -> None:
    """With the whole module, or bit for bit with one that cuts alike; the layout that differs is named."""
    batches, usual = [ITEMS, ITEMS[:1], ()], ModuleLayout(cp=2, tp=2, sequence_parallel=True)
    assert_layouts(spec_of(), batches, [usual, ModuleLayout(pp=2, tp=2)], hidden=6)
    again = attrs.evolve(usual, recompute="full", splits_backward=True)
    assert_layouts(spec_of(), batches, [again], like=usual, hidden=6)
    with pytest.raises(AssertionError, match=r"encoder 'pairs' on ModuleLayout\(pp=1, cp=1, tp=2, .* differ"):
        assert_layouts(spec_of(Unsharded), batches, [ModuleLayout(tp=2)], hidden=6)

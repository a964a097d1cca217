"""The kit of language models: it finds each of these faults in one that is otherwise right, and none without one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import attrs
import pytest
import torch
from torch import Tensor, nn

from mimo.model import DECODER, HYBRID, AuxLossNames, DecoderConfig, HybridConfig, LanguageModelSpec, OpCost, Stage
from mimo.model.decoder.model import Decoder, Layer
from mimo.model.runtime import (
    NO_LABEL,
    DecodeCache,
    Experts,
    LanguageBatch,
    Linear,
    Mlp,
    Split,
    TensorAxis,
    local,
)
from mimo.model.testing import (
    LANGUAGE_CHECKS,
    LanguageLayout,
    assert_language_layouts,
    assert_language_model_conforms,
    check_language_model,
)

DENSE = DecoderConfig(vocabulary=13, hidden=8, layers=2, heads=2, intermediate=12)
MIXED = DecoderConfig(
    vocabulary=11, hidden=16, layers=3, heads=4, kv_heads=2, intermediate=10, tied=True, experts=4, dense_layers=1,
    expert_intermediate=7, shared_intermediate=6, expert_bias_rate=0.01, balance_loss=0.3, z_loss=0.1, next_tokens=1,
)  # fmt: skip
STATES = HybridConfig(
    vocabulary=11, hidden=12, pattern="ME*-", heads=4, kv_heads=2, head_dim=4, intermediate=10, activation="relu2",
    experts=4, expert_intermediate=7, shared_intermediate=6, router_score="sigmoid", router_bias=True, mamba_heads=6,
    mamba_head_dim=3, mamba_groups=2, mamba_state=5, mamba_chunk=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "config", "skipped"),
    [
        (DECODER, DENSE, {"expert ranks"}),
        (DECODER, MIXED, {"published weights"}),
        (HYBRID, STATES, set()),
    ],
    ids=["dense", "experts, tied, further tokens", "hybrid"],
)
def test_our_language_models_keep_every_promise(spec: LanguageModelSpec, config: Any, skipped: set[str]) -> None:
    """Nothing is broken, and nothing is left out but what the settings don't have."""
    verdicts = list(check_language_model(spec, config=config))
    assert [verdict.check for verdict in verdicts] == list(LANGUAGE_CHECKS)
    assert [str(verdict) for verdict in verdicts if verdict.broken is not None] == []
    assert {verdict.check for verdict in verdicts if verdict.skipped is not None} == skipped


class Noted(Decoder):
    """Reads numbers while it is built."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        self.numbers = [parameter.sum().item() for parameter in self.parameters()]


class DropsOut(Decoder):
    """Has a layer whose draws depend on the layout."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        self.drop = nn.Dropout(0.1)


class Local(Decoder):
    """Names layers by their index in the stage."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        self.layers = nn.ModuleDict({str(place): layer for place, layer in enumerate(self.layers.values())})


class Longer(Decoder):
    """Returns a row more than there are tokens."""

    def forward(self, *given: Any) -> Tensor:
        """Return them."""
        rows = super().forward(*given)
        return torch.cat((rows, rows[-1:]))


class Wide(Decoder):
    """Computes losses in fp64."""

    def losses(self, *given: Any) -> Tensor:
        """Return them."""
        return super().losses(*given).double()


class NeedsTokens(Decoder):
    """Falls over a microbatch without tokens."""

    def forward(self, batch: LanguageBatch, *given: Any) -> Tensor:
        """Return the rows."""
        batch.tokens.max()
        return super().forward(batch, *given)


class Unlikely(Decoder):
    """Writes what is least likely."""

    def greedy(self, hidden: Tensor) -> Tensor:
        """Return it."""
        return self.logits(hidden).argmin(1)


class Leaks(Decoder):
    """Attends to all samples."""

    def forward(self, batch: LanguageBatch, *given: Any) -> Tensor:
        """Return the rows."""
        return super().forward(attrs.evolve(batch, lengths=(sum(batch.lengths),)), *given)


class Averages(Decoder):
    """Divides losses by the number of labels."""

    def losses(self, hidden: Tensor, labels: Tensor, *given: Any) -> Tensor:
        """Return them."""
        return super().losses(hidden, labels, *given) / (labels != NO_LABEL).sum().clamp_min(1)


class Peeks(Decoder):
    """Adds the next row of the same sample."""

    def end(self, hidden: Tensor) -> Tensor:
        """Return the rows."""
        rows = super().end(hidden)
        rows[:-1] += torch.where((self.samples[:-1] == self.samples[1:])[:, None], rows[1:], 0)
        return rows

    def forward(self, batch: LanguageBatch, *given: Any) -> Tensor:
        """Return the rows."""
        self.samples = batch.samples
        return super().forward(batch, *given)


class Pays(Decoder):
    """Has a loss of rows without label."""

    def losses(self, hidden: Tensor, labels: Tensor, *given: Any) -> Tensor:
        """Return them."""
        found = super().losses(hidden, labels, *given)
        return found + (labels == NO_LABEL).to(found)


class CountsPadding(Decoder):
    """Lets the number of rows decide how much is learned."""

    def end(self, hidden: Tensor) -> Tensor:
        """Return the rows."""
        return _learning(super().end(hidden), 1 + len(hidden) / 10)


class Adds(Decoder):
    """Adds encoders' rows to what stands at their places."""

    def _embed(self, batch: LanguageBatch, rows: Mapping[str, Tensor]) -> Tensor:
        hidden = cast("Tensor", self.embedding(batch.tokens))
        for name, given in rows.items():
            hidden = hidden.index_add(0, batch.placeholders[name], given.to(hidden.dtype))
        return hidden


class Unreached(Decoder):
    """Lets no gradient reach encoders."""

    def _embed(self, batch: LanguageBatch, rows: Mapping[str, Tensor]) -> Tensor:
        return super()._embed(batch, {name: given.detach() for name, given in rows.items()})


class Names(Decoder):
    """Treats one encoder's rows in a way of their own."""

    def _embed(self, batch: LanguageBatch, rows: Mapping[str, Tensor]) -> Tensor:
        return super()._embed(batch, {name: given * len(name) for name, given in rows.items()})


class Remembers(Decoder):
    """Adds what the last call saw."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        self.last: list[float] = [0.0]

    def end(self, hidden: Tensor) -> Tensor:
        """Return the rows."""
        rows = super().end(hidden) + self.last[0]
        self.last[0] = float(rows.detach().sum())
        return rows


class Shaky(Decoder):
    """Drops values by chance."""

    def end(self, hidden: Tensor) -> Tensor:
        """Return fewer."""
        rows = super().end(hidden)
        return rows * (torch.rand(rows.shape) > 0.1).to(rows)


class Forgets(Decoder):
    """Has a parameter that nothing reads."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        if stage.is_last:
            self.norm.spare = Linear(2, 2)


class Unseeded(Linear):
    """Draws its weight from a generator of its own."""

    def reset_parameters(self) -> None:
        """Draw."""
        super().reset_parameters()
        nn.init.constant_(self.weight, random.random())


class DrawsElsewhere(Decoder):
    """Has initial values that the seed doesn't decide."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        if stage.is_last:
            self.head = Unseeded(config.hidden, config.vocabulary, bias=False)


class Unsaved(Decoder):
    """Draws a number at birth that no state dict holds."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        self.scale = [random.random()]

    def end(self, hidden: Tensor) -> Tensor:
        """Return the rows."""
        return super().end(hidden) * self.scale[0]


class Promotes(Decoder):
    """Makes a tensor of another number type."""

    def end(self, hidden: Tensor) -> Tensor:
        """Return the rows."""
        return super().end(hidden) + torch.zeros(hidden.shape[1])


class StopsEarly(Decoder):
    """Lets the layers learn only while the head does."""

    def end(self, hidden: Tensor) -> Tensor:
        """Return the rows."""
        return super().end(hidden if self.head.weight.requires_grad else hidden.detach())


class Restarts(Decoder):
    """Gives a decode cache and reads nothing of it."""

    def forward(self, batch: LanguageBatch, *given: Any) -> Tensor:
        """Return the rows."""
        return super().forward(attrs.evolve(batch, decode_cache=None), *given)


class Confuses(Decoder):
    """Gives a decode cache whose sequences stay where they are when another ends."""

    def new_decode_cache(self) -> DecodeCache:
        """Return the cache."""
        return Unmoved()


class Unmoved(DecodeCache):
    """Moves nothing."""

    def keep(self, sequences: Sequence[int]) -> None:
        """Drop numbers alone."""
        self.seen = tuple(self.seen[sequence] for sequence in sequences)


class Shifts(Decoder):
    """Hands over other rows where it is cut."""

    def begin(self, *given: Any) -> Tensor:
        """Return the rows."""
        return super().begin(*given) + (0 if self.stage.is_first else 1)


class Repeats(Decoder):
    """Has a layer that computes something else the second time."""

    def __init__(self, config: DecoderConfig, stage: Stage) -> None:
        super().__init__(config, stage)
        for index in self.layers:
            self.layers[index] = Alternates(config, int(index))


class Alternates(Layer):
    """Has other gradients at every second call."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.calls = [0]

    def forward(self, *given: Any) -> Any:
        """Return the rows."""
        self.calls[0] += 1
        rows, choices = super().forward(*given)
        return _learning(rows, self.calls[0]), choices


class Defers(Decoder):
    """Has a head that learns nothing where gradients of weights are deferred."""

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = local(self.head.weight)
        return hidden @ (weight if self.weight_grad_queue is None else weight.detach()).t()


def _learning(rows: Tensor, scale: float) -> Tensor:
    """Return rows whose gradient is multiplied."""
    factor = rows.new_tensor(scale)
    return rows * factor + (rows * (1 - factor)).detach()


def _half(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    """Return the plan, with feed-forward parts whose sums nobody adds up."""
    assert DECODER.tensor is not None
    splits = DECODER.tensor.plan(module, axis)
    for part in module.modules():
        if isinstance(part, Mlp):
            part.axis = TensorAxis.single()
    return splits


def _no_sums(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    assert DECODER.tensor is not None
    return {path: attrs.evolve(split, summed=False) for path, split in DECODER.tensor.plan(module, axis).items()}


def _loud(module: nn.Module, axis: Any) -> Mapping[str, Split]:
    """Return the plan of experts that return more the more ranks there are."""
    assert DECODER.experts is not None
    for part in module.modules():
        if isinstance(part, Experts):
            part.register_forward_hook(lambda _part, _args, out: out * axis.ep)
    return DECODER.experts.plan(module, axis)


def _of_tensors(plan: Any) -> LanguageModelSpec:
    assert DECODER.tensor is not None
    return spec_of(tensor=attrs.evolve(DECODER.tensor, plan=plan))


def _of_experts(plan: Any) -> LanguageModelSpec:
    assert DECODER.experts is not None
    return spec_of(experts=attrs.evolve(DECODER.experts, plan=plan))


def _of_context(attach: Any) -> LanguageModelSpec:
    assert DECODER.context is not None
    return spec_of(context=attrs.evolve(DECODER.context, attach=attach))


def _of_table(config: DecoderConfig) -> Any:
    entries = DECODER.hf[0].tensors(config)
    return [*entries, attrs.evolve(entries[0], ours="layers.7.norm", theirs="norm")]


def spec_of(module: type[Decoder] = Decoder, **changes: Any) -> LanguageModelSpec:
    """Return a decoder's plugin that builds ``module``, with fields changed."""
    return attrs.evolve(DECODER, name="faulty", build=module, **changes)


@attrs.frozen
class Fault:
    """A language model that breaks a promise.

    Args:
        make: makes it.
        check: finds it.
        words: are in what the check says.
        config: its settings.
    """

    make: Callable[[], LanguageModelSpec]
    check: str
    words: str
    config: DecoderConfig = DENSE


FAULTS: Mapping[str, Fault] = {
    "numbers read": Fault(lambda: spec_of(Noted), "build", "(while stage 0 of 2 was built on the meta device)"),
    "dropout": Fault(lambda: spec_of(DropsOut), "build", "would depend on the layout, got Dropout at drop."),
    "local names": Fault(
        lambda: spec_of(Local),
        "names",
        "'layers.1.mlp_norm.weight'] are in the whole module or in one of 2 stages, not in both; name layers by",
    ),
    "ties that are not there": Fault(
        lambda: spec_of(tied=lambda _config: True),
        "names",
        "tied() is True, and first and last of 2 stages both hold []",
    ),
    "ties that nobody names": Fault(
        lambda: spec_of(tied=lambda _config: False),
        "names",
        "tied() is False, and first and last of 2 stages both hold ['embedding.weight']",
        attrs.evolve(DENSE, tied=True),
    ),
    "too many layers": Fault(
        lambda: spec_of(layers=lambda _config: 3),
        "layers",
        "it is 3, and the last of 3 stages holds no layer",
    ),
    "too few layers": Fault(
        lambda: spec_of(layers=lambda _config: 1), "layers", "it is 1, and the last of 2 stages still holds a layer"
    ),
    "another row": Fault(
        lambda: spec_of(Longer), "rows", "stage 0 returned a tensor of shape (16, 8) of 15 tokens, expected (15, 8)"
    ),
    "fp64 losses": Fault(lambda: spec_of(Wide), "rows", "losses are torch.float64, expected torch.float32"),
    "no tokens": Fault(lambda: spec_of(NeedsTokens), "empty", "Expected reduction dim to be specified"),
    "another vocabulary": Fault(
        lambda: spec_of(vocabulary=lambda _config: 12),
        "vocabulary",
        "logits of 12 rows have shape (12, 13), vocabulary() is 12",
    ),
    "least likely": Fault(lambda: spec_of(Unlikely), "vocabulary", "the largest of logits()"),
    "samples that see each other": Fault(
        lambda: spec_of(Leaks),
        "independence",
        "losses of packed samples differ from those of one at a time: row 7",
    ),
    "a mean": Fault(lambda: spec_of(Averages), "independence", "losses of packed samples differ"),
    "foresight": Fault(
        lambda: spec_of(Peeks),
        "causality",
        "rows before token 1, after a change of it and all later ones, differ",
    ),
    "a loss without label": Fault(lambda: spec_of(Pays), "labels", "a row without label has a loss"),
    "padding that counts": Fault(
        lambda: spec_of(CountsPadding),
        "labels",
        "with padding at the end the gradient of parameter",
    ),
    "rows on top": Fault(
        lambda: spec_of(Adds),
        "placeholders",
        "rows with other ids at the placeholders differ from those before: row 1",
    ),
    "rows without gradient": Fault(lambda: spec_of(Unreached), "placeholders", "rows of 'vision' got no gradient"),
    "rows by name": Fault(lambda: spec_of(Names), "placeholders", "rows where encoders change names differ"),
    "state shared between calls": Fault(
        lambda: spec_of(Remembers), "state", "rows after other samples differ from those before"
    ),
    "chance": Fault(lambda: spec_of(Shaky), "chance", "it drew from torch's generator"),
    "missing gradient": Fault(
        lambda: spec_of(Forgets),
        "gradients",
        "parameter 'norm.spare.weight' got no gradient; requires_grad_(False)",
    ),
    "microbatches that matter": Fault(lambda: spec_of(CountsPadding), "lanes", "the gradient of parameter"),
    "losses that nobody announced": Fault(
        lambda: spec_of(aux_losses=lambda _config: AuxLossNames()),
        "auxiliary losses",
        "forward() adds the losses ['balance', 'next_tokens', 'z'] and counts ['layers.1.load', 'layers.2.load', "
        "'next_tokens.0.layers.0.load'], aux_losses() says [] and {}",
        MIXED,
    ),
    "losses that nobody adds": Fault(
        lambda: spec_of(aux_losses=lambda _config: AuxLossNames(losses=("more",))),
        "auxiliary losses",
        "forward() adds the losses [] and counts [], aux_losses() says ['more'] and {}",
    ),
    "unseeded values": Fault(
        lambda: spec_of(DrawsElsewhere),
        "initial values",
        "'head.weight' differs between two modules of one seed",
    ),
    "unsaved state": Fault(lambda: spec_of(Unsaved), "save and load", "rows after loading differ from those before"),
    "number types": Fault(lambda: spec_of(Promotes), "number types", "rows are torch.float32; keep buffers"),
    "wrong parts of a stage": Fault(
        lambda: spec_of(stage_parts=lambda _config, _stage: frozenset({"layers"})),
        "parts",
        "stage 0 of 2 holds the parts ['embedding', 'layers'], stage_parts() says ['layers']",
    ),
    "frozen with another": Fault(
        lambda: spec_of(StopsEarly), "parts", "got no gradient where only part 'head' is frozen"
    ),
    "weights left out": Fault(
        lambda: spec_of(flops=lambda *given: {"layers": OpCost(weighted=sum(given[3]), weights=3)}),
        "costs",
        "of stage 0 of 2 it counts 3 weights, the stage has",
    ),
    "a table of other weights": Fault(
        lambda: spec_of(hf=[attrs.evolve(DECODER.hf[0], tensors=_of_table)]),
        "published weights",
        "the table names layers.7.norm, which the module lacks",
    ),
    "an idle cache": Fault(
        lambda: spec_of(Restarts), "decode cache", "rows of a sample in pieces of (1, 1, 1, 1, 1, 1, 1) differ"
    ),
    "a cache that confuses samples": Fault(
        lambda: spec_of(Confuses), "decode cache", "rows of a sample beside others differ"
    ),
    "other rows where it is cut": Fault(lambda: spec_of(Shifts), "stages", "a rank's rows differ from those of"),
    "other gradients again": Fault(lambda: spec_of(Repeats), "recompute", "the gradient of rows of 'vision' differs"),
    "a head that nobody defers": Fault(
        lambda: spec_of(Defers), "deferred gradients", "other parameters have gradients: ['head.weight']"
    ),
    "sums that nobody adds up": Fault(lambda: _of_tensors(_half), "tensor ranks", "a rank's rows differ"),
    "no sum over split rows": Fault(lambda: _of_tensors(_no_sums), "sequence parallel", "the gradient of parameter"),
    "context that nobody knows": Fault(lambda: _of_context(lambda _module, _context: None), "context ranks", "rows"),
    "loud experts": Fault(lambda: _of_experts(_loud), "expert ranks", "a rank's rows differ", MIXED),
}

ALL = LANGUAGE_CHECKS.keys()
CUT = frozenset({"stages", "tensor ranks", "sequence parallel", "context ranks"})
ALSO: Mapping[str, AbstractSet[str]] = {
    "too many layers": {"parts"},
    "least likely": CUT,
    "samples that see each other": {"lanes", "context ranks"},
    "a mean": {"lanes", "vocabulary", "context ranks"},
    "foresight": {"decode cache"} | CUT,
    "a loss without label": {"sequence parallel"},
    "padding that counts": {"lanes"} | CUT,
    "rows on top": {"sequence parallel"},
    "state shared between calls": ALL,
    "chance": ALL,
    "missing gradient": {"parts"},
    "microbatches that matter": {"labels"} | CUT,
    "unseeded values": {"recompute", "deferred gradients"} | CUT,
    "unsaved state": ALL,
    "frozen with another": {"stages"},
    "other gradients again": {"lanes"},
    "sums that nobody adds up": {"sequence parallel"},
}
"""Other checks that may find a fault, since it breaks their promises too."""


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_of_a_language_model_is_found(fault: str) -> None:
    """By the check that is for it, in words that lead to it."""
    planted = FAULTS[fault]
    (verdict,) = check_language_model(planted.make(), config=planted.config, checks=[planted.check])
    assert planted.words in str(verdict.broken)


def test_every_check_of_a_language_model_finds_a_fault() -> None:
    """None is without one."""
    assert {planted.check for planted in FAULTS.values()} == set(LANGUAGE_CHECKS)


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_check_alone(fault: str) -> None:
    """And by those whose promise it breaks too."""
    planted = FAULTS[fault]
    verdicts = check_language_model(planted.make(), config=planted.config)
    found = {verdict.check for verdict in verdicts if verdict.broken is not None}
    assert planted.check in found
    assert found <= {planted.check} | ALSO.get(fault, set())


def test_an_author_of_a_language_model_sees_all_verdicts_at_once() -> None:
    """What others rely on is named first, and they are not looked at."""
    with pytest.raises(
        AssertionError,
        match=r"(?s)language model 'faulty' breaks its promises\nok names: .*\nNO rows: .*\n-  state: .*mend 'rows'",
    ):
        assert_language_model_conforms(spec_of(Longer), config=DENSE, checks=["names", "rows", "state"])


def test_layouts_of_a_language_model_of_ones_own_are_compared() -> None:
    """With the whole module, or bit for bit with one that cuts the same; the layout that differs is named."""
    with pytest.raises(AssertionError, match=r"language model 'faulty' on LanguageLayout\(pp=2, cp=1, .* differ"):
        assert_language_layouts(spec_of(Shifts), [LanguageLayout(pp=2)], config=DENSE)
    with pytest.raises(AssertionError, match=r"rows are not to the bit those on LanguageLayout\(pp=1, "):
        assert_language_layouts(spec_of(Shifts), [LanguageLayout(pp=2)], like=LanguageLayout(), config=DENSE)


def test_a_language_model_without_options_needs_nothing_more() -> None:
    """Their checks are not looked at, each saying why."""
    bare: dict[str, Any] = {"tensor": None, "context": None, "experts": None, "recompute": {}, "flops": None, "hf": ()}
    checks = ["recompute", "costs", "published weights", "tensor ranks", "sequence parallel", "context ranks"]
    verdicts = [str(one) for one in check_language_model(spec_of(**bare), config=DENSE, checks=checks)]
    assert all("(not looked at: " in line for line in verdicts)
    assert verdicts[3].endswith("(not looked at: the spec has no tensor support)")

"""By how much plugins differ from the library's own model of a family, in several layouts.

A family of `hf-decoder` or `hf-encoder`, or a whole model, is shrunk from the library's own config by one rule. What is
measured: loss, outputs and every gradient of layouts beside the library on each sample alone; whether a sample changes
others that it is packed with; whether published weights go in and out to the bit.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import transformers
from bounds import GRADIENTS
from oracle import ROUNDING
from torch import Tensor

from mimo.hooks import UserError
from mimo.model import EncoderSpec, LanguageModelSpec, supported_axes
from mimo.model.testing import try_axes
from mimo.testing import RanksError, fork_ranks

LOSS, OUTPUTS = 1e-6, 1e-5
"""Bounds: of relative differences of losses, and of outputs."""
_SMALL_GRADIENT = 1e-3
"""Share of the whole gradient's norm below which a parameter's counts as that."""
ALONE = "one process"
VERSION = f"transformers {transformers.__version__}"
Tensors: TypeAlias = Mapping[str, Tensor]


@attrs.frozen(kw_only=True)
class Difference:
    """Of one layout from the library.

    Args:
        loss: relative.
        outputs: of logits or rows, over the largest; None where they weren't compared.
        gradients: of the parameter that differs most, over its own norm.
        worst: that parameter.
        rounding: by how much the library's own gradients change where each weight begins as the next number; 0 where
            nothing needed that to be known.
    """

    loss: float
    outputs: float | None
    gradients: float
    worst: str = ""
    rounding: float = 0.0

    @property
    def problem(self) -> str:
        """What is larger than it may be, nothing where all is well."""
        return self.problem_within(GRADIENTS)

    def problem_within(self, gradients: float) -> str:
        """Return the same with another bound of gradients, which may differ by `oracle.ROUNDING` times the rounding."""
        gradients = max(gradients, ROUNDING * self.rounding)
        each = {
            "the loss": (self.loss, LOSS),
            **({} if self.outputs is None else {"outputs": (self.outputs, OUTPUTS)}),
            f"the gradient of {self.worst}": (self.gradients, gradients),
        }
        return "; ".join(f"{what} by {size:.1e}" for what, (size, bound) in each.items() if not size <= bound)


@attrs.frozen(kw_only=True)
class Outcome:
    """What was found of a family.

    Args:
        version: of the library.
        problem: why it can't be trained, or what of it is wrong; empty where all is as in the library.
        refused: by axis that the plugin has, why it can't be split along that.
        differences: by layout.
        leak: by how much other samples of a microbatch change one, over the largest output: by no bit, where all is
            well. None where gradients of whole microbatches alone show it.
        tensors: published ones that went in and out to the bit.
        weights: why they didn't.
    """

    version: str = VERSION
    problem: str = ""
    refused: Mapping[str, str] = attrs.field(factory=dict)
    differences: Mapping[str, Difference] = attrs.field(factory=dict)
    leak: float | None = None
    tensors: int = 0
    weights: str = ""


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of families, and how one is measured.

    Args:
        spec: the plugin.
        small: of a model type, the small config.
        measure: of a rank, a config and names of layouts, the differences.
        leak: of a config, the share that others of a microbatch change.
        weights: of a config, how many published tensors went in and out.
        gradients: of a config, the bound of gradients.
    """

    spec: LanguageModelSpec | EncoderSpec
    small: Callable[[str], Any]
    measure: Callable[[int, Any, Sequence[str]], Mapping[str, Difference]]
    leak: Callable[[Any], float]
    weights: Callable[[Any], int]
    gradients: Callable[[Any], float] = lambda _config: GRADIENTS


def outcome_of(kind: Kind, model_type: str) -> Outcome:
    """Return what is found of a family: tried here, measured on forked ranks."""
    try:
        config = kind.small(model_type)
        tried = try_axes(kind.spec, config)
    except UserError as error:
        return Outcome(problem=one_line(error.got))
    refused = {axis: one_line(tried[axis]) for axis in supported_axes(kind.spec) if tried[axis]}
    try:
        return _measured(kind, config, refused)
    except (RanksError, UserError) as error:
        return Outcome(problem=one_line(f"fails: {str(error).strip().splitlines()[-1]}"), refused=refused)


def forked(world: int, function: Callable[..., object], *args: object) -> list[Any]:
    """Run a function on forked ranks, as `fork_ranks` does; once more, with a warning, where none of them answers.

    Classes may be registered in this process alone, which has computed: of many forks of such a one some never answer.
    """
    try:
        return fork_ranks(world, function, *args)
    except RanksError as error:
        if str(error).count("no result") < world:
            raise
        warnings.warn(f"no rank answered, forked again for {function}", RuntimeWarning, stacklevel=2)
        return fork_ranks(world, function, *args)


def _measured(kind: Kind, config: Any, refused: Mapping[str, str]) -> Outcome:
    axes = [axis for axis in supported_axes(kind.spec) if axis not in refused]
    alone = [ALONE, *(f"{axis}=2" for axis in axes if axis == "pp")]
    (first,) = forked(1, _on_one, kind, config, alone)
    differences, leak, (tensors, weights) = first
    if split := [f"{axis}=2" for axis in axes if axis in {"tp", "ep"}]:
        ranks = forked(2, kind.measure, config, split)
        differences |= {name: _largest(one[name] for one in ranks) for name in split}
    bound = kind.gradients(config)
    found = {name: one.problem_within(bound) for name, one in differences.items()}
    problems = [f"{name}: {problem}" for name, problem in found.items() if problem]
    if leak != 0:
        problems.append(f"samples of a microbatch change each other by {leak:.1e}")
    return Outcome(
        problem="; ".join(f"differs: {one}" for one in problems),
        refused=refused,
        differences=differences,
        leak=leak,
        tensors=tensors,
        weights=one_line(weights),
    )


def _on_one(
    rank: int, kind: Kind, config: Any, layouts: Sequence[str]
) -> tuple[Mapping[str, Difference], float, tuple[int, str]]:
    try:
        weights = kind.weights(config), ""
    except Exception as error:  # noqa: BLE001 - whatever a table meets in a family is what the table says
        weights = 0, f"{type(error).__name__}: {error}"
    return {**kind.measure(rank, config, layouts)}, kind.leak(config), weights


def _largest(every: Iterable[Difference]) -> Difference:
    """Return of each number the largest of all ranks."""
    ranks = list(every)
    worst = max(ranks, key=lambda one: one.gradients)
    loss, outputs = (max(getattr(one, name) for one in ranks) for name in ("loss", "outputs"))
    return attrs.evolve(worst, loss=loss, outputs=outputs)


def difference_of(
    *,
    losses: tuple[float, float],
    outputs: tuple[Tensor, Tensor] | None = None,
    gradients: tuple[Tensors, Tensors],
) -> Difference:
    """Return by how much one differs from the other, which is the library's, of each.

    Args:
        losses: sums.
        outputs: of the same shape, if any are compared.
        gradients: by the library's names; one that is left out counts as zeros.
    """
    (loss, wanted), (ours, theirs) = losses, gradients
    floor = _SMALL_GRADIENT * sum(float(one.norm()) ** 2 for one in theirs.values()) ** 0.5
    gaps = {}
    for name in ours.keys() | theirs.keys():
        mine, other = ours.get(name), theirs.get(name)
        gap = mine if other is None else other if mine is None else mine - other
        assert gap is not None
        gaps[name] = float(gap.norm()) / max(float(other.norm()) if other is not None else 0.0, floor)
    worst = max(sorted(gaps), key=gaps.__getitem__)
    return Difference(
        loss=abs(loss - wanted) / abs(wanted),
        outputs=None if outputs is None else float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()),
        gradients=gaps[worst],
        worst=worst,
    )


def one_line(text: str) -> str:
    """Return a reason on one line, without the setting that it came by and where to look further."""
    text = re.sub(r"(modules\.language\.)?config\.model_type: ", "", " ".join(text.split()))
    return re.sub(r" plugins/transformers/README\.md lists [^.]*\.", "", text)

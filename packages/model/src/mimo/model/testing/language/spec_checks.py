"""Checks of what a language model's spec says beside the stages that it builds: names, sizes, parts, costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mimo.model.build.create_on import create_on
from mimo.model.spec import OpCost, Stage
from mimo.model.testing.checks import BrokenError, SkippedError
from mimo.model.testing.language.subject import LanguageSubject
from mimo.model.testing.modules import check_frozen, held_parts

_STAGES = 3
"""Stages that a module is cut into to look at each, if it has as many layers."""
_MANY = 1 << 20
"""More stages than there are layers: the last has none."""
_LEFT_OUT = 0.05
"""Share of the weights by which a formula of costs may be wrong, where it leaves out norms and biases besides."""


def check_build(subject: LanguageSubject) -> None:
    """build() makes each stage, on the meta device too, without layers whose result would depend on the layout."""
    for stage in _stages(subject):
        try:
            _shapes(subject, stage)
        except Exception as error:
            error.add_note(f"while stage {stage.index} of {stage.count} was built on the meta device")
            raise
    subject.build()


def check_names(subject: LanguageSubject) -> None:
    """Parameters have the same names whatever the stages, each on one of them, or where it is tied on both ends."""
    whole, stages = _shapes(subject, Stage()), [_shapes(subject, stage) for stage in _stages(subject)]
    every = set[str]().union(*stages)
    if missing := sorted(whole.keys() ^ every):
        raise BrokenError(
            f"{missing} are in the whole module or in one of {len(stages)} stages, not in both; name layers by their "
            "index in the whole"
        )
    for index, stage in enumerate(stages):
        if wrong := [name for name, shape in stage.items() if whole[name] != shape]:
            raise BrokenError(
                f"stage {index} of {len(stages)} holds {wrong[0]!r} in another shape than the whole module"
            )
        for other in range(index):
            shared = sorted(stage.keys() & stages[other].keys())
            at_ends = other == 0 and index == len(stages) - 1
            if shared and not at_ends:
                raise BrokenError(f"stages {other} and {index} both hold {shared}")
            if at_ends and bool(shared) != subject.spec.tied(subject.config):
                raise BrokenError(
                    f"tied() is {not shared}, and first and last of {len(stages)} stages both hold {shared}"
                )


def check_layers(subject: LanguageSubject) -> None:
    """layers() is the number of layers that stages share out."""
    layers = subject.spec.layers(subject.config)
    if layers < 1:
        raise BrokenError(f"it is {layers}")
    last, behind, none = (
        set(_shapes(subject, stage))
        for stage in (Stage(layers - 1, layers), Stage(layers, layers + 1), Stage(_MANY - 1, _MANY))
    )
    if layers > 1 and last == none:
        raise BrokenError(f"it is {layers}, and the last of {layers} stages holds no layer")
    if behind != none:
        raise BrokenError(f"it is {layers}, and the last of {layers + 1} stages still holds a layer")


def check_parts(subject: LanguageSubject) -> None:
    """stage_parts() says which parts a stage holds; a frozen part gets no gradient, and the others still do."""
    spec, config, stages = subject.spec, subject.config, _stages(subject)
    built = subject.build(subject.layout(pp=len(stages)))
    for part in built.parts:
        held, named = held_parts(spec, part), spec.stage_parts(config, part.stage)
        if held != named:
            raise BrokenError(
                f"stage {part.stage.index} of {len(stages)} holds the parts {sorted(held)}, stage_parts() says "
                f"{sorted(named)}"
            )
    check_frozen(subject, sorted(spec.stage_parts(config, Stage())))


def check_costs(subject: LanguageSubject) -> None:
    """flops() counts the weights of each stage, and arithmetic that the stages share out; more for more rows."""
    spec, config = subject.spec, subject.config
    if spec.flops is None:
        raise SkippedError("the spec has no flops")
    lengths = [len(sample) for sample in subject.samples()]
    stages = _stages(subject)
    few, many = (
        _total(spec.flops(config, Stage(), "none", given, sum(given)).values()) for given in (lengths[:1], lengths)
    )
    if not many.forward > few.forward > 0:
        raise BrokenError("samples beside the first take no arithmetic")
    each = [_total(spec.flops(config, stage, "none", lengths, sum(lengths)).values()) for stage in stages]
    for stage, cost in zip(stages, each, strict=True):
        shapes = _shapes(subject, stage).values()
        held, matrices = (sum(shape.numel() for shape in shapes if len(shape) >= dims) for dims in (0, 2))
        if not matrices - _LEFT_OUT * held <= cost.weights <= held + _LEFT_OUT * held:
            raise BrokenError(
                f"of stage {stage.index} of {stage.count} it counts {cost.weights:,} weights, the stage has {held:,}"
            )
    if abs(_total(each).forward - many.forward) > 1e-6 * many.forward:
        raise BrokenError(
            f"{len(stages)} stages take {_total(each).forward:,.0f} operations, the whole module {many.forward:,.0f}"
        )


def _stages(subject: LanguageSubject) -> list[Stage]:
    count = min(_STAGES, subject.spec.layers(subject.config))
    return [Stage(index, count) for index in range(count)]


def _shapes(subject: LanguageSubject, stage: Stage) -> Mapping[str, torch.Size]:
    """Return the shapes of a stage's parameters by path."""
    with create_on("meta"):
        module = subject.spec.build(subject.config, stage)
    return {path: parameter.shape for path, parameter in module.named_parameters()}


def _total(costs: Iterable[OpCost]) -> OpCost:
    return sum(costs, OpCost())

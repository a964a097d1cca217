"""What an optimizer plugin will hold and send, from shapes, before anything is allocated. Free of torch.

The functions of `Estimates` mirror those of `OptimizerSpec`: `Estimates.laid` returns what ``prepare`` makes of the
parameters of a stage, `Estimates.state` what ``build`` holds of those that it steps, and `Estimates.sent` what
reductions and gathering send. Bytes are those of tensors: messages on their way and what an allocator rounds up to are
not among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

WEIGHT_BYTES = 4
"""Of a number of a parameter, of its reduced gradient, and of most optimizers' state: all of them are fp32."""


@attrs.frozen(kw_only=True)
class Lanes:
    """The data lanes that hold a parameter of one rank: ``size`` times ``copies`` of them.

    Args:
        size: over how many neighbours a copy is spread, as `mimo.topology.Module.shard_lanes` says.
        index: this rank's place among them.
        copies: how many copies there are.
    """

    size: int = 1
    index: int = 0
    copies: int = 1


@attrs.frozen(kw_only=True)
class ParameterShape:
    """A parameter as this rank holds it.

    Args:
        name: its full name.
        shape: of this rank's piece of it.
        ranks: over how many ranks it is cut.
        total: numbers of all of it; None where it is not cut.
        trained: whether it is.
        number_bytes: of one of its numbers.
        floating: whether these are floating-point numbers.
        layer: the number of the layer of its stage that alone holds it; None for one that no layer holds alone.
        experts: whether it lies on the expert view of the grid.
        tied: whether ranks of another stage hold a copy of it.
        whole: as `mimo.optimizer.ModuleParameters.whole` says.
    """

    name: str
    shape: tuple[int, ...]
    ranks: int = 1
    total: int | None = None
    trained: bool = True
    number_bytes: int = WEIGHT_BYTES
    floating: bool = True
    layer: int | None = None
    experts: bool = False
    tied: bool = False
    whole: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def mean_numbers(self) -> float:
        """How many of its ranks has on average, the same for all of them."""
        return (self.numbers if self.total is None else self.total) / self.ranks

    @property
    def bytes(self) -> int:
        """What its numbers take."""
        return self.numbers * self.number_bytes


@attrs.frozen(kw_only=True)
class PartShapes:
    """What `mimo.optimizer.ModuleParameters` is to `OptimizerSpec.prepare`, as shapes.

    Args:
        parameters: in order, frozen ones too, each the piece of its tensor or expert rank.
        lanes: of all but experts.
        expert_lanes: of experts.
        number_bytes: of a number that layers compute with.
    """

    parameters: tuple[ParameterShape, ...]
    lanes: Lanes = Lanes()
    expert_lanes: Lanes = Lanes()
    number_bytes: int = WEIGHT_BYTES

    def lanes_of(self, parameter: ParameterShape) -> Lanes:
        """Return the lanes that hold a parameter."""
        return self.expert_lanes if parameter.experts else self.lanes


@attrs.frozen(kw_only=True)
class LaidBytes:
    """What a rank holds of the parameters of a part, without the optimizer's state, in bytes of its device.

    Args:
        pieces: the trained ones as `OptimizerSpec.build` is to step them, in the order in which it is to see them.
        weights: parameters, or this rank's pieces of them, always there.
        gathered: what layers compute with besides, during the whole step.
        gradients: likewise of gradients.
        gathered_inside: what is gathered more, at most, while the part computes.
        gradients_inside: what a backward holds more of gradients, at most, until they are reduced or added.
    """

    pieces: tuple[ParameterShape, ...]
    weights: int
    gathered: int = 0
    gradients: int = 0
    gathered_inside: int = 0
    gradients_inside: int = 0


@attrs.frozen(kw_only=True)
class SteppedShapes:
    """What `OptimizerSpec.build` is given, as shapes.

    Args:
        pieces: of parameters, in order.
        on_accelerator: whether they are on one, rather than in the memory of the host.
    """

    pieces: tuple[ParameterShape, ...]
    on_accelerator: bool = False


@attrs.frozen(kw_only=True)
class StateBytes:
    """What an optimizer holds beside parameters and gradients.

    Args:
        device: bytes where the parameters are.
        host: bytes of host memory.
        at_most: whether only the run itself decides what lies where; then each is the most that it can be.
    """

    device: int = 0
    host: int = 0
    at_most: bool = False


@attrs.frozen(kw_only=True)
class Numbers:
    """How many numbers a stage has on a rank before they are spread, of parameters with the same lanes.

    Args:
        trained: of trained parameters.
        all: of frozen ones too.
        number_bytes: of a number that layers compute with.
        lanes: theirs.
    """

    trained: float
    all: float
    number_bytes: int = WEIGHT_BYTES
    lanes: Lanes = Lanes()


@attrs.frozen(kw_only=True)
class SentBytes:
    """What a rank sends over the data lanes for a stage, as `OptimizerSpec.prepare` has it.

    Args:
        step: once a step.
        forward: in each forward.
        backward: in each backward, without deferred weight gradients.
        grad_accumulation: whenever a backward has added its gradients.
    """

    step: float = 0
    forward: float = 0
    backward: float = 0
    grad_accumulation: float = 0

    def __add__(self, other: SentBytes) -> SentBytes:
        """Return what both send."""
        return SentBytes(
            step=self.step + other.step,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            grad_accumulation=self.grad_accumulation + other.grad_accumulation,
        )


def replicated(part: PartShapes, _config: object = None) -> LaidBytes:
    """Return what `mimo.optimizer.runtime.replicate` makes: everything whole on every lane.

    Layers that compute in less than fp32 have a copy in that.
    """
    trained = tuple(one for one in part.parameters if one.trained)
    copied = part.number_bytes if part.number_bytes != WEIGHT_BYTES else 0
    return LaidBytes(
        pieces=trained,
        weights=sum(one.bytes for one in part.parameters),
        gathered=sum(one.numbers * copied for one in part.parameters if one.floating),
        gradients=sum(one.bytes for one in trained),
    )


def adamw_state(stepped: SteppedShapes, _config: object = None, *, moment_bytes: int = WEIGHT_BYTES) -> StateBytes:
    """Return what AdamW holds: two moments, whose numbers have as many bytes, and one number that counts steps."""
    return StateBytes(device=sum(2 * moment_bytes * piece.numbers + WEIGHT_BYTES for piece in stepped.pieces))


def reduced_once(numbers: Numbers, _config: object = None) -> SentBytes:
    """Return what is sent where gradients are whole on every lane and summed once a step, round a ring."""
    lanes = numbers.lanes.size * numbers.lanes.copies
    return SentBytes(step=2 * (lanes - 1) / lanes * WEIGHT_BYTES * numbers.trained)


@attrs.frozen(kw_only=True)
class Estimates:
    """Estimates of a plugin's memory and messages; without them it counts as AdamW that replicates.

    Args:
        laid: given the parameters of a part and the plugin's config, what `OptimizerSpec.prepare` makes of them.
        state: given what the plugin steps of a module with one config, what the optimizer holds that
            `OptimizerSpec.build` makes.
        sent: given numbers of a stage and the config, what ranks send to gather parameters and reduce gradients.
    """

    laid: Callable[[PartShapes, Any], LaidBytes] = replicated
    state: Callable[[SteppedShapes, Any], StateBytes] = adamw_state
    sent: Callable[[Numbers, Any], SentBytes] = reduced_once

"""What an optimizer plugin hands in. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import attrs

from mimo.hooks import OptimizerBytes
from mimo.optimizer.estimates import Estimates
from mimo.topology import Coordinates, ExpertCoordinates, Grid, Overlap

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mimo.topology.meshes import Meshes

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
Phase: TypeAlias = Literal["forward", "backward"]
Access: TypeAlias = Literal["step", "any"]
"""The kind of access to parameters: the optimizer steps the trained ones, or any may be read or changed outside."""
GRADIENT_SCALE = "gradient_scale"
"""Key of an optimizer's parameter groups: what it multiplies gradients by itself as it steps; see `OptimizerSpec`."""
Sums: TypeAlias = Literal["lanes", "stages"]
"""Over what gradients are summed: the ranks that share a stage, or the stages that share a parameter."""
LOSS_SCALES = (2.0**-16, 2.0**32)
"""Smallest and largest loss scale of fp16. Below, values are not finite by themselves; above, gradients are zero."""


def _nothing(*_given: Any) -> None:
    """Do nothing."""


@attrs.frozen(kw_only=True)
class ModuleParameters:
    """Parameters of one module that train on this rank, as an optimizer needs to know them.

    Args:
        grid: the module's grid; its name is the module's.
        rank: this process.
        parameters: DTensors on the module's tensor mesh, or its expert mesh, by full name, in the same order on every
            rank that holds the same stages; plain ones will do where that mesh has one rank. In fp32, whatever the
            layers compute in.
        frozen: the others, likewise.
        modules: the stages that hold them.
        stages: their numbers.
        precision: what the layers compute in: ``fp32``, ``bf16`` or ``fp16``.
        summed: names of which each tensor rank, of experts each rank along ``etp``, computes only part of the gradient.
        tied: names of which the first and the last stage each hold a copy; stage 0 owns and counts them.
        experts: names of those on the expert mesh ``(ep, etp)``, of which each rank along ``edp`` holds a copy and only
            part of the gradient.
        whole: names of those that are not trained and that other code than layers changes between steps: they stay
            whole on every lane, and fp32.
        observe: the plugin calls it with "lanes", ``stages`` and this rank's own gradients whenever a sum of some of
            them over lanes begins, before any other rank has added to them. It only reads them, and waits for nothing.
    """

    grid: Grid
    rank: int
    parameters: Mapping[str, nn.Parameter]
    frozen: Mapping[str, nn.Parameter] = attrs.field(factory=dict)
    modules: tuple[nn.Module, ...] = ()
    stages: tuple[int, ...] = (0,)
    precision: Precision = "fp32"
    summed: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    observe: Callable[[Sums, Sequence[int], Sequence[Tensor]], None] = _nothing

    @property
    def place(self) -> Coordinates:
        """Where this rank stands in the module's grid."""
        return self.grid.coordinates(self.rank)

    @property
    def expert_place(self) -> ExpertCoordinates:
        """Where this rank stands in the expert view of the grid."""
        return self.grid.expert_coordinates(self.rank)

    def only(self, names: Iterable[str]) -> ModuleParameters:
        """Return those of ``names`` alone."""
        names = list(names)
        parameters = {name: self.parameters[name] for name in names if name in self.parameters}
        frozen = {name: self.frozen[name] for name in names if name in self.frozen}
        return attrs.evolve(
            self,
            parameters=parameters,
            frozen=frozen,
            summed=self.summed & parameters.keys(),
            tied=self.tied & parameters.keys(),
            experts=self.experts & (parameters.keys() | frozen.keys()),
            whole=self.whole & frozen.keys(),
        )


class DeferredGrads(Protocol):
    """Weight gradients that a backward of a stage has deferred, and that are about to be computed."""

    @property
    def parameters(self) -> Collection[Tensor]:
        """The autograd leaves of these gradients."""

    def on_grad_accumulation(self, callback: Callable[[Tensor], None]) -> None:
        """Call ``callback`` with each leaf once all deferred parts of its gradient have been added."""


def _no_bounds(*_given: Any) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return nullcontext()


@attrs.frozen
class Prepared:
    """How parameters and gradients are laid out over the data lanes.

    Args:
        reduce: leaves the gradient of each of ``parameters`` summed over the whole step, in fp32.
        parameters: what the optimizer steps, by full name: None for the given ones, or this rank's shards of them as
            DTensors of the full shape, whose mesh has an axis `mimo.topology.DATA` beside the axes of the given one.
        frozen: likewise, for parameters that are not trained.
        gather: called on all lanes before stages run; begins to gather the weights that they compute with. It waits
            only on the given executor, a thread that runs tasks in order.
        on_compute: returns the context of each forward and backward of a stage, without deferred weight gradients;
            entered and left on all lanes in the same order.
        on_grad_accumulation: returns the context of each backward of a stage, or of its deferred part. When it ends,
            the stage's gradients, or pending sums of them, contain everything that this backward adds. It receives the
            deferred gradients, None for a whole backward, and whether it is the last in the step. Sums over lanes may
            begin within; ``reduce`` then waits for them.
        before_tied: called before gradients of tied parameters are summed over stages, which is before ``reduce``;
            puts those that belong to other parameters than the given ones where ``reduce`` would.
        synchronize: called before values of the parameters are read or changed outside the layers, with the kind of
            access; it invalidates or writes back what layers have gathered.
    """

    reduce: Callable[[], None]
    parameters: Mapping[str, nn.Parameter] | None = None
    frozen: Mapping[str, nn.Parameter] | None = None
    gather: Callable[[Executor], None] = _nothing
    on_compute: Callable[[Phase], AbstractContextManager[None]] = _no_bounds
    on_grad_accumulation: Callable[[DeferredGrads | None, bool], AbstractContextManager[None]] = _no_bounds
    before_tied: Callable[[], None] = _nothing
    synchronize: Callable[[Access], None] = _nothing


@attrs.frozen(kw_only=True)
class Share:
    """What one optimizer of this rank is to step: the parameters of a module that follow one rule.

    Args:
        part: these alone, as they lie.
        config: the rule's settings of its plugin.
        prepared: what the module's plugin, which may be another one, has returned for the stages here.
    """

    part: ModuleParameters
    config: Any
    prepared: tuple[Prepared, ...] = ()


@attrs.frozen(kw_only=True)
class OptimizerSpec:
    """An optimizer plugin.

    Args:
        name: what users write as ``optimizer.plugin``.
        config: attrs class of its own settings; learning rate, schedule and clipping are `MimoOptimizer`'s.
        rendezvous: whether a forward or backward under this config waits for the other data lanes, to gather parameters
            or to reduce gradients.
        overlaps: what may go over data lanes under this config while layers compute.
        shard_lanes: over how many neighbouring data lanes a copy of a parameter is spread under this config: 1 for a
            copy on each, 0 for all.
        precisions: what layers may compute in under this plugin, while parameters, their gradients once reduced, and
            state stay fp32.
        lays: keys of its config that say how parameters lie, which `prepare` and ``rendezvous`` read. A module has
            them, and not some of its parameters: those that follow a pattern lie as their module's others do.
        prepare: decides how parameters and gradients lie over the data lanes, before the first step. Called once for
            each stage of a module, whose gradients are reduced together, and for what several stages here share.
        build: makes the optimizer of parameters of one module, over all its stages here: once for each set of
            settings that some of them have, laid out by this plugin's `prepare` or by another's. Its state is scalars,
            and tensors or DTensors shaped like the parameter, all present from the start. Gradients are scaled in place
            before it steps, unless its ``defaults`` hold the key `GRADIENT_SCALE`: then each parameter group is given
            the scale, for it to multiply by itself.
        agree: decides by what the optimizers are built that the plugin steps parameters with here, before any of them
            is: what it returns for each is given to ``build`` in place of the config. It is called on every rank of a
            run that names the plugin, with nothing where it steps nothing, so that all ranks can talk to each other.
        memory: returns what an optimizer made by `build` holds, for the metrics; None if there is nothing to report.
        estimates: of what it will hold and send, before anything is allocated; see `mimo.optimizer.estimates`.
    """

    name: str
    config: type
    rendezvous: Callable[[Any], bool]
    overlaps: Callable[[Any], frozenset[Overlap]] = lambda _config: frozenset()
    shard_lanes: Callable[[Any], int] = lambda _config: 1
    precisions: frozenset[Precision] = frozenset({"fp32"})
    lays: frozenset[str] = frozenset()
    prepare: Callable[[ModuleParameters, Meshes, Any], Prepared]
    build: Callable[[Mapping[str, nn.Parameter], Any, Meshes], torch.optim.Optimizer]
    agree: Callable[[Sequence[Share], Meshes], Sequence[Any]] | None = None
    memory: Callable[[Any], OptimizerBytes] | None = None
    estimates: Estimates = attrs.field(factory=Estimates)

"""Spreads the parameters of a part of a module over its data lanes, and says what is to happen when."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mimo.optimizer import Access, DeferredGrads, ModuleParameters, Phase, Prepared
from mimo.optimizer.runtime import FlatSum, InOrder, layers, replicate, sum_over
from mimo.topology import StageId
from mimo.topology.meshes import Meshes, as_parameter, laid_out, local
from mimo_optimizer_distributed._fsdp import Begun, Group
from mimo_optimizer_distributed._order import Order
from mimo_optimizer_distributed._scatter import Scatter
from mimo_optimizer_distributed.sharding import Sharding
from mimo_optimizer_distributed.units import Owned, owned, sort_by_layer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(
    part: ModuleParameters,
    meshes: Meshes,
    config: Sharding,
    before_gather: Callable[[Collection[str]], None],
    reduced: Callable[[Collection[str]], None],
    *,
    gathers_when_ready: bool,
) -> Prepared:
    """Do what `mimo_optimizer_distributed.spec.shard` says."""
    kinds = [False, True] if part.experts else [False]
    lanes = max(meshes.shard_group(part.grid, experts=experts).size() for experts in kinds)
    if lanes == 1:
        config = attrs.evolve(config, shard="optimizer")
    wanted = meshes.device_type != "cpu" if config.overlap_grad_reduce == "auto" else config.overlap_grad_reduce
    overlaps = wanted and len(part.stages) == 1  # what stages share is final with the last of them
    if lanes == 1 and part.precision == "fp32":
        return replicate(part, meshes, overlaps=overlaps, reduced=reduced)
    return Spread(
        part,
        meshes,
        config,
        overlaps=overlaps,
        before_gather=before_gather,
        gathers_when_ready=gathers_when_ready,
        reduced=reduced,
    ).prepared


class Spread:
    """A part of a module whose parameters are spread over lanes.

    Args:
        part: what and where they are.
        meshes: the groups of this rank.
        config: how they are spread.
        overlaps: whether gradients are summed while a backward runs.
        before_gather: is called with the names of what is about to be gathered.
        gathers_when_ready: whether that may wait, and so is called by a thread.
        reduced: is called with the names of what has its gradient of the step.
    """

    def __init__(
        self,
        part: ModuleParameters,
        meshes: Meshes,
        config: Sharding,
        *,
        overlaps: bool,
        before_gather: Callable[[Collection[str]], None],
        gathers_when_ready: bool,
        reduced: Callable[[Collection[str]], None],
    ) -> None:
        self._overlaps = overlaps
        self._gathers_when_ready = gathers_when_ready
        self._before_gather = before_gather
        self._reduced = reduced
        has_streams = gathers_when_ready and meshes.device_type != "cpu"
        self._beside = torch.Stream(meshes.device_type) if has_streams else None
        everything = {**part.parameters, **part.frozen}
        left = {name for name, parameter in everything.items() if not _can_be_spread(parameter)} | part.whole
        self._part, self._meshes = part, meshes
        self._left = replicate(part.only(left), meshes, reduced=reduced)
        given = {name: parameter for name, parameter in everything.items() if name not in left}
        found = {name: one.replace(_plain(one.parameter)) for name, one in owned(part.modules, given).items()}
        kinds = {name in part.experts for name in given}
        self._lanes = {experts: self._lane_groups(experts=experts) for experts in kinds}
        self._further = list(self._further_sums(frozenset(given)))
        self._late = part.tied.union(*(names for names, _ in self._further))
        self._waiting: dict[str, Tensor] = {}
        self._tied_is_complete = False
        self._around: list[Group] = []
        self._tied: list[Group] = []
        self._layers: dict[nn.Module, list[Group]] = {}
        stacked = [layer for module in part.modules for layer in layers(module)] if len(part.modules) == 1 else []
        for layer, some in sort_by_layer(stacked, found).items():
            groups = self._around if layer is None else self._layers.setdefault(layer, [])
            groups += self._group(some)
        self._pieces = dict(self._lay_out(given))
        self._sums = [_Sum(group, self._take) for group in self._backward_order if group.trains]
        self._reduces_early = config.shard != "optimizer"
        self._in_order = InOrder(self._sums, name=part.grid.name) if overlaps else None
        self._gathers_ahead = config.overlap_param_gather is not False
        self._order: Order | None = None
        if config.shard == "full":
            self._order = Order(self._around, self._layers, name=part.grid.name, ahead=self._gathers_ahead)
        else:
            for module in part.modules:
                _wait_before(module, self._around)
            for layer, groups in self._layers.items():
                for inner in layer.modules():  # a stage may use what is in a layer without calling the layer
                    _wait_before(inner, groups)

    @property
    def prepared(self) -> Prepared:
        """What to do when."""
        part = self._part
        return Prepared(
            self._reduce,
            parameters={name: piece for name, piece in self._pieces.items() if name in part.parameters},
            frozen={name: piece for name, piece in self._pieces.items() if name in part.frozen},
            gather=self._gather,
            on_compute=self._on_compute,
            on_grad_accumulation=self._on_grad_accumulation,
            before_tied=self._reduce_tied,
            synchronize=self._synchronize,
        )

    @property
    def _groups(self) -> Iterator[Group]:
        """Yield all of them, in the order of a forward, which all lanes share."""
        yield from self._around
        for groups in self._layers.values():
            yield from groups

    @property
    def _backward_order(self) -> Iterator[Group]:
        """Yield all of them in the order in which a backward ends with them; what is around ends with the inputs."""
        for groups in reversed(self._layers.values()):
            yield from groups
        yield from self._around

    def _lane_groups(self, *, experts: bool) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the lanes over which a copy is spread, and those that hold copies of a piece."""
        grid = self._part.grid
        return self._meshes.shard_group(grid, experts=experts), self._meshes.copies_group(grid, experts=experts)

    def _further_sums(self, names: frozenset[str]) -> Iterator[tuple[frozenset[str], dist.ProcessGroup]]:
        """Yield which gradients are then summed over what other groups, once a step."""
        part = self._part
        experts, tied, summed = part.experts & names, part.tied & names, part.summed & names
        for some, group in (
            (tied, self._copies(experts=False)),
            (names - tied - experts, self._copies(experts=False)),
            (summed - experts, self._meshes.axes_group(part.grid, ("tp",))),
            (experts, self._copies(experts=True)),
            (summed & experts, self._meshes.axes_group(part.grid, ("etp",)) if experts else None),
        ):
            if some and group is not None and group.size() > 1:
                yield some, group

    def _copies(self, *, experts: bool) -> dist.ProcessGroup | None:
        """Return the lanes that hold copies of a piece; none where a copy is not spread, and is summed over them."""
        lanes, copies = self._lanes.get(experts, (None, None))
        return copies if lanes is not None and lanes.size() > 1 else None

    def _group(self, found: Mapping[str, Owned]) -> Iterator[Group]:
        """Yield groups of parameters with equal layout; copies of tied parameters by themselves.

        Those of the other stage then go in messages of the same length, so that sums are made in one order, and the
        copies stay the same to the bit.
        """
        part, dtype = self._part, _DTYPES[self._part.precision]
        tied = {name: one for name, one in found.items() if name in part.tied}
        experts = {name: one for name, one in found.items() if name in part.experts}
        others = {name: one for name, one in found.items() if name not in tied.keys() | experts.keys()}
        for some in (tied, others, experts):
            if some:
                group = Group(
                    some,
                    mesh=self._meshes.shard_mesh(part.grid, experts=some is experts),
                    sums=partial(self._begin_sum, some is experts),
                    dtype=dtype,
                    before=partial(self._before_gather, tuple(some)),
                )
                if some is tied:
                    self._tied.append(group)
                yield group

    def _begin_sum(self, experts: bool, gradients: Sequence[Tensor]) -> Begun:  # noqa: FBT001 - by `partial`
        lanes, copies = self._lanes[experts]
        group = copies if lanes.size() == 1 else lanes
        if self._overlaps:
            (stage,) = self._part.stages
            group = self._meshes.gradient_group(StageId(self._part.grid.name, stage), group)
        self._part.observe("lanes", self._part.stages, gradients)
        return (_Whole if lanes.size() == 1 else Scatter)(group, gradients)

    def _lay_out(self, given: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's pieces, as parameters of the whole shape, in the order of the given ones."""
        part = self._part
        meshes = {
            experts: self._meshes.parameter_mesh(part.grid, experts=experts)
            for experts in {name in part.experts for name in given}
        }
        pieces = {name: piece for group in self._groups for name, piece in group.pieces.items()}
        for name, parameter in given.items():
            yield name, _piece_of(parameter, pieces[name], meshes[name in part.experts])

    def _gather(self, executor: Executor) -> None:
        if self._order is not None:
            return
        for group in self._groups:
            if self._gathers_when_ready:
                group.gather_when_ready(executor, self._beside)
            else:
                group.gather()
            if not self._gathers_ahead:
                group.wait()

    @contextmanager
    def _on_compute(self, phase: Phase) -> Iterator[None]:
        with nullcontext() if self._order is None else self._order.on_compute(phase):
            yield
        if phase == "backward":  # in fp32 at once, what is not deferred too, before the next one adds to it
            self._add()

    @contextmanager
    def _on_grad_accumulation(self, deferred: DeferredGrads | None, last: bool) -> Iterator[None]:  # noqa: FBT001 - as `Prepared` has it
        sums_now = self._reduces_early or (last and self._in_order is not None)
        for one in self._sums:
            one.is_last = last
        with (
            self._in_order.on_grad_accumulation(deferred) if sums_now and self._in_order is not None else nullcontext()
        ):
            yield
        if sums_now and self._in_order is None:
            for one in self._sums:  # one message at a time, and not all of them in memory
                one.begin()
                one.end()
        if self._reduces_early:  # all lanes meet here anyway, and no layer computes
            for one in self._sums:
                one.end()
        self._add()

    def _add(self) -> None:
        for one in self._sums:
            one.group.add()

    def _reduce_tied(self) -> None:
        self._complete([one for one in self._sums if one.group in self._tied])
        self._tied_is_complete = True

    def _reduce(self) -> None:
        self._left.reduce()
        self._complete([one for one in self._sums if not (self._tied_is_complete and one.group in self._tied)])
        self._tied_is_complete = False

    @torch.no_grad()
    def _complete(self, sums: Sequence[_Sum]) -> None:
        """Leave the gradients of groups summed over all that the whole step has added."""
        for one in sums:
            one.complete()
        # In an order that all ranks share, whichever of the first sums came back first.
        names = [name for one in sums for name in one.group.pieces if name in self._late]
        waiting = {name: self._waiting.pop(name) for name in names if name in self._waiting}
        for some, group in self._further:
            sum_over(group, [total for name, total in waiting.items() if name in some])
        self._give(waiting)

    def _take(self, group: Group) -> None:
        """Take what the lanes have summed of a group in the whole step: as the gradients, or to be summed further."""
        sums = group.take_sums()
        self._waiting |= {name: total for name, total in sums.items() if name in self._late}
        self._give({name: total for name, total in sums.items() if name not in self._late})

    def _give(self, sums: Mapping[str, Tensor]) -> None:
        """Make sums the gradients of pieces."""
        for name, total in sums.items():
            self._pieces[name].grad = laid_out(total, like=self._pieces[name])
        if sums:
            self._reduced(sums.keys())

    def _synchronize(self, access: Access) -> None:
        for group in self._groups:
            if group.is_gathered and (access == "any" or group.trains):
                group.release()


class _Sum:
    """The sums over lanes of a group's gradients in a step; ``take`` is called with it when it has the last of them."""

    def __init__(self, group: Group, take: Callable[[Group], None]) -> None:
        self.group = group
        self.is_last = False
        self._take = take
        self._has_begun = False
        self._takes = False

    @property
    def leaves(self) -> Collection[Tensor]:
        """What layers compute with of those that are trained, as far as it has been gathered yet."""
        return self.group.leaves

    def begin(self) -> None:
        """Begin to sum what has been added, without waiting for another lane."""
        self.group.begin_sum()
        self._has_begun, self._takes = True, self.is_last

    def look(self) -> None:
        """Take the sum if it is there, without waiting for it."""
        if self.group.is_summing and self.group.is_summed:
            self.end()

    def end(self) -> None:
        """Wait for the sum that has begun, if there is one."""
        if self.group.is_summing:
            self.group.end_sum()
            if self._takes:
                self._take(self.group)

    def complete(self) -> None:
        """Have the sum of all that was added in the step be taken."""
        if not self._has_begun:
            self.begin()
        self.end()
        self._take(self.group)
        self._has_begun = False


class _Whole:
    """A sum over lanes that each hold whole copies."""

    def __init__(self, group: dist.ProcessGroup, gradients: Sequence[Tensor]) -> None:
        self._gradients = list(gradients)
        self._sum = FlatSum(group, self._gradients)

    @property
    def is_done(self) -> bool:
        """Whether `end` would not wait."""
        return self._sum.is_done

    def end(self) -> list[Tensor]:
        """Wait, and return the sums."""
        self._sum.end()
        return self._gradients


def _can_be_spread(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 0 and parameter.is_floating_point()


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """Return the piece of a tensor rank as FSDP2 is to see it, and layers, once it is gathered: a plain tensor."""
    return nn.Parameter(local(parameter).detach(), requires_grad=parameter.requires_grad)


def _piece_of(parameter: nn.Parameter, piece: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return a lane's piece of a tensor rank's piece of a parameter."""
    inner: tuple[Placement, ...] = tuple(parameter.placements) if isinstance(parameter, DTensor) else (Replicate(),)
    copies = (Replicate(),) * (mesh.ndim - len(inner) - 1)
    found = DTensor.from_local(
        piece, mesh, (*copies, *inner, Shard(0)), run_check=False, shape=parameter.shape, stride=_stride(parameter)
    )
    return as_parameter(found, requires_grad=parameter.requires_grad)


def _stride(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return that of the whole parameter, contiguous."""
    return torch.empty(parameter.shape, device="meta").stride()


def _wait_before(module: nn.Module, groups: Iterable[Group]) -> None:
    """Have the forward of ``module`` wait for what it needs."""
    waited = tuple(groups)

    def wait(_module: nn.Module, _given: Any) -> None:
        for group in waited:
            group.wait()

    module.register_forward_pre_hook(wait, prepend=True)

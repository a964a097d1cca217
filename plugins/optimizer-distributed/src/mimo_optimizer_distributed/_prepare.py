"""Spreads the parameters of a part of a module over its data lanes, and says what is to happen when."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mimo.optimizer import ModuleParameters, Phase, Prepared
from mimo.optimizer.runtime import replicate, sum_over
from mimo.topology.meshes import Meshes
from mimo_optimizer_distributed._fsdp import Group
from mimo_optimizer_distributed._order import Order
from mimo_optimizer_distributed.sharding import Sharding
from mimo_optimizer_distributed.units import Owned, layers, owned, sort_by_layer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(
    part: ModuleParameters, meshes: Meshes, config: Sharding, before_gather: Callable[[Collection[str]], None]
) -> Prepared:
    """Do what `mimo_optimizer_distributed.sharding.shard` says."""
    kinds = [False, True] if part.experts else [False]
    lanes = max(meshes.shard_group(part.grid, experts=experts).size() for experts in kinds)
    if lanes == 1 and part.precision == "fp32":
        return replicate(part, meshes)
    shard = "optimizer" if lanes == 1 else config.shard
    return Spread(part, meshes, shard=shard, before_gather=before_gather).prepared


class Spread:
    """A part of a module whose parameters are spread over lanes.

    Args:
        part: what and where they are.
        meshes: the groups of this rank.
        shard: as `Sharding.shard`.
        before_gather: is called with the names of what is about to be gathered.
    """

    def __init__(
        self,
        part: ModuleParameters,
        meshes: Meshes,
        *,
        shard: str,
        before_gather: Callable[[Collection[str]], None],
    ) -> None:
        self._before_gather = before_gather
        everything = {**part.parameters, **part.frozen}
        left = {name for name, parameter in everything.items() if not _can_be_spread(parameter)} | part.whole
        self._part, self._meshes = part, meshes
        self._left = replicate(part.only(left), meshes)
        given = {name: parameter for name, parameter in everything.items() if name not in left}
        found = {name: one.replace(_plain(one.parameter)) for name, one in owned(part.modules, given).items()}
        self._around: list[Group] = []
        self._tied: list[Group] = []
        self._tied_is_complete = False
        self._layers: dict[nn.Module, list[Group]] = {}
        stacked = [layer for module in part.modules for layer in layers(module)] if len(part.modules) == 1 else []
        for layer, some in sort_by_layer(stacked, found).items():
            groups = self._around if layer is None else self._layers.setdefault(layer, [])
            groups += self._group(some)
        self._pieces = dict(self._lay_out(given))
        self._reduces_early = shard != "optimizer"
        self._order = Order(self._around, self._layers, name=part.grid.name) if shard == "full" else None
        if self._order is None:
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
            computing=self._computing,
            gradients_added=self._added,
            before_tied=self._reduce_tied,
            settle=self._settle,
        )

    @contextmanager
    def _computing(self, phase: Phase) -> Iterator[None]:
        with nullcontext() if self._order is None else self._order.computing(phase):
            yield
        if phase == "backward":  # in fp32 at once, what is not put off too, before the next one adds to it
            for group in self._groups:
                group.add()

    @property
    def _groups(self) -> Iterator[Group]:
        """Yield all of them, in an order that all lanes share."""
        yield from self._around
        for groups in self._layers.values():
            yield from groups

    def _group(self, found: Mapping[str, Owned]) -> Iterator[Group]:
        """Yield groups of what lies alike; copies of tied parameters by themselves.

        Those of the other stage then go in messages of the same length, so that sums are made in one order, and the
        copies stay the same to the bit.
        """
        part, dtype = self._part, _DTYPES[self._part.precision]
        tied = {name: one for name, one in found.items() if name in part.tied}
        experts = {name: one for name, one in found.items() if name in part.experts}
        others = {name: one for name, one in found.items() if name not in tied.keys() | experts.keys()}
        for some in (tied, others, experts):
            if some:
                mesh = self._meshes.shard_mesh(part.grid, experts=some is experts)
                group = Group(some, mesh=mesh, dtype=dtype, before=partial(self._before_gather, tuple(some)))
                if some is tied:
                    self._tied.append(group)
                yield group

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

    def _gather(self) -> None:
        if self._order is None:
            for group in self._groups:
                group.gather()

    def _added(self) -> None:
        if self._reduces_early:
            _scatter(list(self._groups))
        else:
            for group in self._groups:
                group.add()

    def _reduce_tied(self) -> None:
        self._complete(self._tied)
        self._tied_is_complete = True

    def _reduce(self) -> None:
        self._left.reduce()
        self._complete([group for group in self._groups if not (self._tied_is_complete and group in self._tied)])
        self._tied_is_complete = False

    @torch.no_grad()
    def _complete(self, groups: Sequence[Group]) -> None:
        """Leave the gradients of groups summed over all that the whole step has added."""
        part, grid = self._part, self._part.grid
        if not self._reduces_early:
            _scatter(groups)
        sums = {name: sum_ for group in groups for name, sum_ in group.take_gradients().items()}
        copies = self._meshes.copies_group(grid)
        sum_over(copies, _some(sums, part.tied))
        sum_over(copies, _some(sums, sums.keys() - part.tied - part.experts))
        sum_over(self._meshes.axes_group(grid, ("tp",)), _some(sums, part.summed))
        if part.experts:
            sum_over(self._meshes.copies_group(grid, experts=True), _some(sums, part.experts))
        for name, total in sums.items():
            piece = self._pieces[name]
            assert isinstance(piece, DTensor)
            piece.grad = DTensor(total, copy.copy(piece._spec), requires_grad=False)  # noqa: SLF001

    def _settle(self) -> None:
        for group in self._groups:
            if group.is_gathered:
                group.release()


def _scatter(groups: Sequence[Group]) -> None:
    """Give each lane its piece of the sums of what lanes have added since the last time."""
    for group in groups:
        group.reduce()
    for group in groups:
        group.end_reduction()


def _some(sums: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    wanted = set(names)
    return [sum_ for name, sum_ in sums.items() if name in wanted]


def _can_be_spread(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 0 and parameter.is_floating_point()


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """Return the piece of a tensor rank as FSDP2 is to see it, and layers, once it is gathered: a plain tensor."""
    piece = parameter.detach()
    if isinstance(piece, DTensor):
        piece = piece.to_local()
    return nn.Parameter(piece, requires_grad=parameter.requires_grad)


def _piece_of(parameter: nn.Parameter, piece: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return a lane's piece of a tensor rank's piece of a parameter."""
    inner: tuple[Placement, ...] = tuple(parameter.placements) if isinstance(parameter, DTensor) else (Replicate(),)
    copies = (Replicate(),) * (mesh.ndim - len(inner) - 1)
    found = DTensor.from_local(
        piece, mesh, (*copies, *inner, Shard(0)), run_check=False, shape=parameter.shape, stride=_stride(parameter)
    )
    return nn.Parameter(found, requires_grad=parameter.requires_grad)


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

"""A module built in a layout, and what this rank's pieces of its parameters are together with those of the others."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.model.build import Frozen
from mimo.model.build.build import build_part
from mimo.model.build.part import Part
from mimo.model.parallel import ContextAxis, ExpertAxis, Split, TensorAxis
from mimo.model.spec import LanguageModelSpec, ModuleSpec, Stage
from mimo.model.testing.checks import BrokenError
from mimo.topology import DATA_AXES, ROW_AXES, Grid, Module, ModuleGraph, Recompute
from mimo.topology.collectives import all_gather_json
from mimo.topology.meshes import Meshes, gradient_of, local

_STIRRED = 0.1
"""By how much parameters are moved off their initial values."""
_STIRRED_SUM = 1.0
"""And at most by how much what a wide matrix makes of ordinary rows is: more would leave of softmaxes only rounding."""


@attrs.frozen(kw_only=True)
class Layout:
    """How a module of any kind is laid out.

    Args:
        pp: pipeline stages, all on this rank.
        cp: context ranks.
        tp: tensor ranks.
        sequence_parallel: whether tensor ranks split the rows between layers.
        recompute: what backward computes again.
        splits_backward: whether weight gradients are deferred, as some schedules do.
        loss_rows: of how many rows the loss of a language model holds logits at a time, 0 for all.
        frozen: what is not trained.
        dtype: of weights and rows.
        seed: of initial values.
    """

    pp: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    splits_backward: bool = False
    loss_rows: int = 0
    frozen: Frozen = frozenset()
    dtype: torch.dtype = torch.float32
    seed: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of a grid of it, but for its stages."""
        return {"cp": self.cp, "tp": self.tp}

    @property
    def ranks(self) -> int:
        """Number of ranks: each plays all stages."""
        return math.prod(size for axis, size in self.sizes.items() if axis in {*DATA_AXES, *ROW_AXES})

    def grid(self, name: str) -> Grid:
        """Return the grid of a module of this layout."""
        return Grid(name=name, ranks=range(self.pp * self.ranks), pp=self.pp, **self.sizes)


@attrs.frozen(kw_only=True, eq=False)
class RankAxes:
    """Where this rank stands among those of a layout, stages apart.

    Args:
        grid: of the ranks, as one stage.
        meshes: of the same.
        axis: its tensor ranks.
        context: its context ranks.
        experts: the ranks that share its experts.
    """

    grid: Grid
    meshes: Meshes
    axis: TensorAxis
    context: ContextAxis
    experts: ExpertAxis

    @classmethod
    def of(cls, name: str, layout: Layout, *, experts: bool) -> RankAxes:
        """Return those of this rank on the default group's ranks, or alone for one; collective over them."""
        rank = dist.get_rank()
        ranks = range(layout.ranks) if layout.ranks > 1 else (rank,)
        grid = Grid(name=name, ranks=ranks, **layout.sizes)
        graph = ModuleGraph(modules=(Module(grid=grid, trains=(True,), experts=experts),), arrows=())
        meshes = Meshes(graph, rank=rank, device_type="cpu")
        group = partial(meshes.axes_group, grid)
        return cls(
            grid=grid,
            meshes=meshes,
            axis=TensorAxis.of(meshes.tensor_mesh(grid), sequence_parallel=layout.sequence_parallel),
            context=ContextAxis.of(group(("cp",))),
            experts=ExpertAxis.of(grid, rank, group=group(("ep", "etp")), rows=group(ROW_AXES))
            if experts
            else ExpertAxis.single(),
        )

    @property
    def lane(self) -> int:
        """Which data lane this rank belongs to."""
        return self.grid.coordinates(self.meshes.rank).dp

    def total(self, piece: Tensor, axes: Sequence[str]) -> Tensor:
        """Return the sum of all ranks' pieces along some axes."""
        group, total = self.meshes.axes_group(self.grid, axes), piece.clone()
        if group.size() > 1:
            dist.all_reduce(total, group=group)
        return total

    def collect(self, piece: Tensor, axis: str, dim: int, total: int) -> Tensor:
        """Return what is cut along ``dim`` over the ranks of an axis, of ``total`` indices."""
        group = self.meshes.axes_group(self.grid, (axis,))
        if group.size() == 1:
            return piece.clone()
        among = TensorAxis(group=group, rank=group.rank(), size=group.size())
        return among.collect(piece.transpose(0, dim).contiguous(), total).transpose(0, dim)


@attrs.frozen(kw_only=True, eq=False)
class BuiltParts:
    """All stages of a module, as this rank holds them."""

    parts: Sequence[Part]
    layout: Layout
    axes: RankAxes

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those of all stages, by their path in the module; of one that two stages hold the later's."""
        return {path: parameter for _, path, parameter in self._held()}

    def clear_gradients(self) -> None:
        """Drop the gradients of all stages, of both copies of one that two stages hold."""
        for *_, parameter in self._held():
            parameter.grad = local(parameter).grad = None

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers, likewise."""
        return {path: buffer.clone() for part in self.parts for path, buffer in part.module.named_buffers()}

    @property
    def slices(self) -> int:
        """Number of slices that rows are cut into."""
        return self.axes.context.size * (self.axes.axis.size if self.axes.axis.splits_rows else 1)

    @property
    def slice(self) -> int:
        """Which of them is this rank's."""
        axis, context = self.axes.axis, self.axes.context
        return context.rank * axis.size + axis.rank if axis.splits_rows else context.rank

    def stir(self) -> None:
        """Move every floating parameter off its initial value by what follows from its name."""
        with torch.no_grad():
            for part, path, parameter in self._held():
                if not parameter.is_floating_point():
                    continue
                name, split = f"{part.name}.{path}", part.splits[f"{part.name}.{path}"]
                seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                noise *= min(_STIRRED, _STIRRED_SUM / math.sqrt(parameter.shape[-1] if parameter.dim() else 1))
                piece = local(parameter)
                piece += split.piece(noise, self.axes.experts if split.experts else self.axes.axis).to(piece)

    def gradients(self) -> dict[str, Tensor]:
        """Return the full gradient of each parameter that has one on some rank, as the optimizer sees it; collective.

        Those of the copies that two stages hold are added up.
        """
        found: dict[str, Tensor] = {}
        for part, path, split, parameter in self._learning():
            gradient = gradient_of(parameter)
            piece = torch.zeros_like(local(parameter)) if gradient is None else gradient
            piece = self.axes.total(piece, ("edp",) if split.experts else DATA_AXES)
            if split.summed:
                piece = self.axes.total(piece, ("etp",) if split.experts else ("tp",))
            full = self._full(piece, split, parameter)
            found[path] = found[path] + full if f"{part.name}.{path}" in part.tied_copies and path in found else full
        return found

    def values(self) -> dict[str, Tensor]:
        """Return the full value of each parameter; collective.

        Raises:
            BrokenError: copies that two stages hold differ.
        """
        found: dict[str, Tensor] = {}
        for part, path, parameter in self._held():
            full = self._full(local(parameter).detach(), part.splits[f"{part.name}.{path}"], parameter)
            if path in found and not torch.equal(found[path], full):
                raise BrokenError(f"the value of parameter {path!r} is another on stage {part.stage.index}")
            found[path] = full
        return found

    def pieces(self) -> dict[str, Tensor]:
        """Return what this rank holds of each gradient."""
        found = {path: gradient_of(parameter) for path, parameter in self.parameters.items()}
        return {path: gradient for path, gradient in found.items() if gradient is not None}

    def _held(self) -> Iterator[tuple[Part, str, torch.nn.Parameter]]:
        """Yield each stage's parameters with their paths in the module."""
        for part in self.parts:
            for name, parameter in part.parameters.items():
                yield part, name.removeprefix(f"{part.name}."), parameter

    def _learning(self) -> Collection[tuple[Part, str, Split, torch.nn.Parameter]]:
        """Return what has a gradient on some rank: others take part in its sums with zeros."""
        held = [(part, path, part.splits[f"{part.name}.{path}"], parameter) for part, path, parameter in self._held()]
        mine = [gradient_of(parameter) is not None for *_, parameter in held]
        everyones = all_gather_json(mine) if self.layout.ranks > 1 else [mine]
        return [one for one, *has in zip(held, *everyones, strict=True) if any(has)]

    def _full(self, piece: Tensor, split: Split, like: Tensor) -> Tensor:
        axis = "etp" if split.experts else "tp"
        full = piece.clone() if split.dim is None else self.axes.collect(piece, axis, split.dim, like.shape[split.dim])
        return self.axes.collect(full, "ep", 0, like.shape[0]) if split.experts else full


def build_stages(
    spec: ModuleSpec,
    config: Any,
    *,
    name: str,
    layout: Layout,
    stages: Sequence[Stage],
    hidden: int | None = None,
) -> tuple[list[Part], RankAxes]:
    """Build stages of a module in a layout on the default group's ranks; collective over them."""
    experts = isinstance(spec, LanguageModelSpec) and spec.experts is not None and spec.experts.count(config) > 0
    axes = RankAxes.of(name, layout, experts=experts)
    build: Callable[..., Part] = partial(
        build_part,
        spec,
        config,
        grid=layout.grid(name),
        axis=axes.axis,
        context=axes.context,
        experts=axes.experts,
        mesh=axes.meshes.tensor_mesh(axes.grid),
        expert_mesh=axes.meshes.expert_mesh(axes.grid) if experts else None,
        seed=layout.seed,
        device=torch.device("cpu"),
        dtype=layout.dtype,
        hidden=hidden,
        frozen=layout.frozen,
        recompute=layout.recompute,
        splits_backward=layout.splits_backward,
        loss_rows=layout.loss_rows,
    )
    return [build(stage=stage) for stage in stages], axes

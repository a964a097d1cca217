"""What the kit looks at, an encoder with items to encode, and what it says of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mimo.model.build import Frozen
from mimo.model.build.build import build_part
from mimo.model.build.part import Part
from mimo.model.parallel import ContextAxis, TensorAxis, local
from mimo.model.spec import EncoderSpec, Stage
from mimo.topology import Grid, Recompute

NAME = "encoder"
"""What the module is called in the parts that the kit builds."""


@attrs.frozen(kw_only=True)
class Verdict:
    """What the kit says of one promise.

    Args:
        check: its short name.
        promise: what an encoder promises.
        broken: how it is broken; None where it holds or was not checked.
        skipped: why it was not looked at; None where it was.
    """

    check: str
    promise: str
    broken: str | None = None
    skipped: str | None = None

    def __str__(self) -> str:
        """Return it as a line, with what was found below it."""
        if self.skipped is not None:
            return f"-  {self.check}: {self.promise} (not looked at: {self.skipped})"
        if self.broken is None:
            return f"ok {self.check}: {self.promise}"
        return f"NO {self.check}: {self.promise}\n   {self.broken}"


class BrokenError(AssertionError):
    """A promise is broken; its text says how."""


class SkippedError(Exception):
    """A promise can't be looked at; its text says why."""


@attrs.frozen(kw_only=True)
class ModuleLayout:
    """How a module is laid out, and where in it this rank stands.

    Args:
        pp: pipeline stages, all on this rank.
        cp: context ranks.
        tp: tensor ranks.
        sequence_parallel: whether tensor ranks split the rows between layers.
        seam: whether the projector is a stage of its own, behind the tower's.
        recompute: what backward computes again.
        splits_backward: whether weight gradients are deferred, as some schedules do.
        frozen: what is not trained.
        dtype: of weights and rows.
        seed: of initial values.
    """

    pp: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    seam: bool = False
    recompute: Recompute = "none"
    splits_backward: bool = False
    frozen: Frozen = frozenset()
    dtype: torch.dtype = torch.float32
    seed: int = 1


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """An encoder, and items to encode.

    Args:
        spec: the encoder.
        config: an instance of ``spec.config``.
        hidden: width of the rows that it must deliver.
        raw: items as a dataset hands them in, at least two, of unlike sizes where the modality has such.
    """

    spec: EncoderSpec
    config: Any
    hidden: int
    raw: Sequence[Any]

    def sizes(self) -> list[tuple[int, ...]]:
        """Return the items' header sizes."""
        return [self.spec.measure(raw) for raw in self.raw]

    def counts(self) -> list[int]:
        """Return the rows that each item becomes."""
        return [self.spec.rows(self.config, size) for size in self.sizes()]

    def items(self, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
        """Return the items prepared, floating numbers as ``dtype``."""
        return [
            {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in self.spec.prepare(self.config, raw).items()
            }
            for raw in self.raw
        ]

    def build(self, layout: ModuleLayout | None = None, *, stirred: bool = True) -> Built:
        """Build the module in a layout on the default group's ranks; collective over them.

        Args:
            layout: of the module; on this rank alone if None.
            stirred: whether its parameters are moved off their initial values, among them zeros and ones that hide
                mistakes; the same in any layout.
        """
        layout = layout or ModuleLayout()
        mesh = _mesh(layout)
        axis = TensorAxis.of(mesh["tp"], sequence_parallel=layout.sequence_parallel)
        context = ContextAxis.of(mesh.get_group("cp"))
        grid = Grid(name=NAME, ranks=range(layout.pp * layout.cp * layout.tp), pp=layout.pp, cp=layout.cp, tp=layout.tp)
        build = partial(
            build_part,
            self.spec,
            self.config,
            grid=grid,
            axis=axis,
            context=context,
            mesh=mesh["tp"],
            seed=layout.seed,
            device=torch.device("cpu"),
            dtype=layout.dtype,
            hidden=self.hidden,
            frozen=layout.frozen,
            recompute=layout.recompute,
            splits_backward=layout.splits_backward,
        )
        count = layout.pp + layout.seam
        parts = [build(stage=Stage(index, count, layout.seam)) for index in range(count)]
        built = Built(parts=parts, layout=layout, axis=axis, context=context)
        if stirred:
            built.stir()
        return built


@attrs.frozen(kw_only=True, eq=False)
class Built:
    """All stages of a module, as this rank holds them."""

    parts: Sequence[Part]
    layout: ModuleLayout
    axis: TensorAxis
    context: ContextAxis

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those of all stages, by their path in the module."""
        prefix = f"{NAME}."
        return {name.removeprefix(prefix): found for part in self.parts for name, found in part.parameters.items()}

    @property
    def slices(self) -> int:
        """Number of slices that rows are cut into."""
        return self.context.size * (self.axis.size if self.axis.splits_rows else 1)

    @property
    def slice(self) -> int:
        """Which of them is this rank's."""
        return self.context.rank * self.axis.size + self.axis.rank if self.axis.splits_rows else self.context.rank

    def encode(self, items: Sequence[Mapping[str, Tensor]], sizes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return this rank's rows of these items, through all stages."""
        rows: Any = None
        for part in self.parts:
            rows = part.encode(items if part.stage.is_first else [], sizes, rows)
            if not isinstance(rows, Tensor):
                raise BrokenError(f"of {len(items)} items forward() returned {type(rows).__name__}, not a tensor")
        return cast("Tensor", rows)

    def stir(self) -> None:
        """Move every floating parameter off its initial value by what follows from its name."""
        with torch.no_grad():
            for part in self.parts:
                for name, parameter in part.parameters.items():
                    if not parameter.is_floating_point():
                        continue
                    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
                    piece = local(parameter.detach())
                    piece += part.splits[name].piece(noise, self.axis).to(piece)

    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradient of each parameter that has one, as the optimizer sees it; collective."""
        found = {}
        for part in self.parts:
            for name, parameter in part.parameters.items():
                if parameter.grad is None:
                    continue
                split, gradient = part.splits[name], parameter.grad
                piece = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                piece = _total(piece, self.context)
                if split.summed:
                    piece = self.axis.total(piece)
                found[name.removeprefix(f"{NAME}.")] = _whole(piece, split.dim, parameter, self.axis)
        return found

    def values(self) -> dict[str, Tensor]:
        """Return the whole value of each parameter; collective."""
        found = {}
        for part in self.parts:
            for name, parameter in part.parameters.items():
                piece = local(parameter.detach())
                found[name.removeprefix(f"{NAME}.")] = _whole(piece, part.splits[name].dim, parameter, self.axis)
        return found


def _total(piece: Tensor, context: ContextAxis) -> Tensor:
    total = piece.clone()
    if context.size > 1:
        dist.all_reduce(total, group=context.group)
    return total


def _whole(piece: Tensor, dim: int | None, like: Tensor, axis: TensorAxis) -> Tensor:
    if dim is None or axis.size == 1:
        return piece.clone()
    return axis.collect(piece.transpose(0, dim).contiguous(), like.shape[dim]).transpose(0, dim)


def _mesh(layout: ModuleLayout) -> DeviceMesh:
    """Return the mesh ``(cp, tp)`` of all ranks, or of this one alone where the place has a single one."""
    names = ("cp", "tp")
    if layout.cp * layout.tp > 1:
        return init_device_mesh("cpu", (layout.cp, layout.tp), mesh_dim_names=names)
    alone = [DeviceMesh("cpu", [[rank]], mesh_dim_names=names) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()]

"""Muon over matrices that may be cut over any mesh axes, beside AdamW over everything else.

The arithmetic is `torch.optim.Muon`'s own: momentum on the pieces, Newton-Schulz on whole matrices in bf16, so that
pieces travel in bf16 and nothing is lost by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim._muon import (  # torch offers its formulas under no public name
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from mimo.optimizer.runtime import LocalAdamW, load_in_place, local_gradient, zeros_like
from mimo_optimizer_muon._exchange import Exchange
from mimo_optimizer_muon._matrices import Matrix, Shape, piece_shape, share_out

_EXPERTS = "ep"
"""Axis of the meshes on which experts lie."""


def has_matrices(parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix, or a stack of the matrices of experts."""
    return parameter.ndim == 2 or (parameter.ndim == 3 and _on_expert_mesh(parameter))  # noqa: PLR2004 - of dims


def _on_expert_mesh(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and _EXPERTS in (parameter.device_mesh.mesh_dim_names or ())


@attrs.frozen
class _Cuts:
    """Over which axes of which mesh matrices are cut; None for none."""

    mesh: DeviceMesh | None
    axes: tuple[int, ...]


@attrs.frozen(kw_only=True, eq=False)
class _Bucket:
    """Matrices that travel together.

    Args:
        exchange: their way.
        members: of each the number of its parameter, and its number in the parameter's stack.
        shapes: of the whole matrices.
    """

    exchange: Exchange
    members: tuple[tuple[int, int], ...]
    shapes: tuple[Shape, ...]


class ShardedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` for matrices and `LocalAdamW` for the rest, for plain tensors and DTensors.

    Each matrix of a `DTensor` is brought together on one of the ranks over which it is cut, the work shared out evenly;
    ranks that hold copies do the same work. So all ranks over which a matrix is cut must step together, with the same
    parameters in the same order; a gradient that is missing is zero. Of a stack of experts each matrix counts for
    itself. State is there from the start: ``momentum_buffer`` like the parameter, and that of `LocalAdamW`.

    Args:
        matrices: parameters that `has_matrices` is true of.
        others: all other parameters.
        lr: learning rate.
        weight_decay: of both, times the learning rate before any adjustment.
        momentum: share of the momentum buffer that stays at each step.
        nesterov: whether the step looks ahead, by the gradient and the new momentum.
        iterations: of Newton-Schulz, below 100.
        adjust_lr: how the learning rate of a matrix [A, B] follows from ``lr``: ``original``, by
            ``sqrt(max(1, A / B))`` (Jordan et al. 2024), or ``match_rms_adamw``, by ``0.2 sqrt(max(A, B))``, with
            which updates are as large as AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2).
        betas: AdamW's.
        eps: AdamW's.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        *,
        lr: float = 0.0,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        iterations: int,
        adjust_lr: Literal["original", "match_rms_adamw"],
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        matrices, others = list(matrices), list(others)
        self._adamw = LocalAdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay) if others else None
        groups: list[dict[str, Any]] = [{"params": matrices}] if matrices else []
        if self._adamw is not None:
            groups += self._adamw.param_groups  # the same objects: who sets a learning rate here sets it there
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov})
        self._iterations = iterations
        self._adjust_lr = adjust_lr
        self._matrices = matrices
        for parameter in matrices:
            self.state[parameter] = {"momentum_buffer": zeros_like(parameter)}
        if self._adamw is not None:
            self.state.update(self._adamw.state)
        self._buckets = _make_buckets(matrices)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, into the memory that is there, as `load_in_place` does."""
        load_in_place(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter."""
        assert closure is None, "closures are not supported"
        if self._matrices:
            self._step_matrices(self.param_groups[0])
        if self._adamw is not None:
            self._adamw.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        values = [_local(parameter) for parameter in self._matrices]
        gradients = [local_gradient(parameter) for parameter in self._matrices]
        buffers = [_local(self.state[parameter]["momentum_buffer"]) for parameter in self._matrices]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)  # what torch.optim calls too
        updates = torch._foreach_lerp(gradients, buffers, momentum) if group["nesterov"] else buffers  # noqa: SLF001
        torch._foreach_mul_(values, 1 - lr * group["weight_decay"])
        pieces = [_stack(update.to(torch.bfloat16, copy=True)) for update in updates]
        targets = [_stack(value) for value in values]
        for bucket in self._buckets:
            wholes = bucket.exchange.gather([pieces[parameter][at] for parameter, at in bucket.members])
            found = bucket.exchange.scatter([self._orthogonal(whole) for whole in wholes])
            for (parameter, at), shape, update in zip(bucket.members, bucket.shapes, found, strict=True):
                adjusted = _adjust_lr(lr, self._adjust_lr, torch.Size(shape))
                targets[parameter][at].add_(update, alpha=-adjusted)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        return _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), self._iterations, EPS)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _stack(piece: Tensor) -> Sequence[Tensor]:
    """Return the matrices of a parameter's piece, views."""
    return (piece,) if piece.ndim == 2 else piece.unbind(0)  # noqa: PLR2004 - of dims


def _make_buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    found: dict[_Cuts, list[tuple[int, int, tuple[int, ...]]]] = {}
    for number, parameter in enumerate(parameters):
        cuts, dims = _cuts(parameter)
        members = found.setdefault(cuts, [])
        members += [(number, at, dims) for at in range(len(_stack(_local(parameter.detach()))))]
    return [_make_bucket(parameters, cuts, members) for cuts, members in found.items() if members]


def _make_bucket(
    parameters: Sequence[nn.Parameter], cuts: _Cuts, members: Sequence[tuple[int, int, tuple[int, ...]]]
) -> _Bucket:
    groups = [] if cuts.mesh is None else [cuts.mesh.get_group(axis) for axis in cuts.axes]
    sizes, place = [group.size() for group in groups], [group.rank() for group in groups]
    shapes = [_matrix_shape(parameters[number]) for number, _, _ in members]
    for (number, at, dims), shape in zip(members, shapes, strict=True):
        here = _stack(_local(parameters[number].detach()))[at].shape
        assert here == piece_shape(shape, dims, sizes, place), (here, shape, dims, sizes, place)
    owners = share_out(shapes, sizes)
    matrices = [Matrix(shape, dims, owner) for shape, (_, _, dims), owner in zip(shapes, members, owners, strict=True)]
    like = torch.empty(0, device=parameters[members[0][0]].device, dtype=torch.bfloat16)
    return _Bucket(
        exchange=Exchange(matrices, groups, like=like),
        members=tuple((number, at) for number, at, _ in members),
        shapes=tuple(shapes),
    )


def _matrix_shape(parameter: Tensor) -> Shape:
    return int(parameter.shape[-2]), int(parameter.shape[-1])


def _cuts(parameter: Tensor) -> tuple[_Cuts, tuple[int, ...]]:
    """Return which mesh axes cut the matrices of a parameter, and along which dim of the matrix each does.

    An axis that cuts a stack leaves its matrices whole.
    """
    if not isinstance(parameter, DTensor):
        return _Cuts(None, ()), ()
    mesh, stacked = parameter.device_mesh, parameter.ndim - 2
    cut: dict[int, int] = {}
    for axis, placement in enumerate(parameter.placements):
        # Others, such as strided shards, are not cut as `torch.chunk` does.
        assert type(placement) in {Shard, Replicate}, f"{placement} of a parameter"
        if isinstance(placement, Shard) and placement.dim >= stacked and mesh.size(axis) > 1:
            cut[axis] = placement.dim - stacked
    return _Cuts(mesh if cut else None, tuple(cut)), tuple(cut.values())

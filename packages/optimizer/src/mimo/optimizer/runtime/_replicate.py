"""Gradients of parameters that every data lane holds whole: summed once a step, in flat messages of about one size.

A gradient is summed over every axis along which the parameter is replicated and the work is not: the data axes for
all, the tensor axis too for those of which each tensor rank computes only a part; for experts, whose axes are others,
those ranks that hold copies of the same experts, and then ``etp`` likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mimo.optimizer._specs import DeferredGrads, ModuleParameters, Prepared
from mimo.optimizer.runtime._adamw import zeros_like
from mimo.optimizer.runtime._in_order import InOrder
from mimo.topology import StageId
from mimo.topology.meshes import DATA_AXES, Meshes, gradient_of, laid_out, leaf_of, local, tied_pairs

T = TypeVar("T")
MESSAGE_BYTES = 25 * 2**20
"""Of gradients that are summed in one message, at least, if there are as many; DistributedDataParallel's choice."""


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's piece of the gradient, in place, which is the parameter's own from now on.

    One that nothing contributed to is made zero.
    """
    if parameter.grad is None:
        gradient = gradient_of(parameter)
        parameter.grad = zeros_like(parameter) if gradient is None else laid_out(gradient, like=parameter)
    return local(parameter.grad)


class FlatSum:
    """A sum of gradients over a group that has begun, those of one dtype in one message."""

    def __init__(self, group: dist.ProcessGroup, gradients: Sequence[Tensor]) -> None:
        self._works: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        if group.size() == 1:
            return
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            same_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
            first, *others = same_dtype
            in_place = first.is_contiguous() and not others
            flat = first.view(-1) if in_place else torch.cat([gradient.reshape(-1) for gradient in same_dtype])
            work = dist.all_reduce(flat, group=group, async_op=True)
            assert work is not None
            self._works.append((work, flat, [] if in_place else same_dtype))

    @property
    def is_done(self) -> bool:
        """Whether `end` would not wait."""
        return all(work.is_completed() for work, _, _ in self._works)

    def end(self) -> None:
        """Wait for the sums, and leave them in the place of the gradients."""
        for work, flat, gradients in self._works:
            work.wait()
            if not gradients:  # the message was the gradient itself, to which collectives write unseen
                increment_version(flat)
                continue
            sums = torch.split(flat, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [sum_.view_as(to) for sum_, to in zip(sums, gradients, strict=True)])
        self._works.clear()


def sum_over(group: dist.ProcessGroup, gradients: Sequence[Tensor]) -> None:
    """Sum ``gradients`` over ``group`` in place, in messages one after the other, so that few are copied at a time."""
    for some in in_messages(gradients, lambda gradient: gradient):
        FlatSum(group, some).end()


def in_messages(items: Iterable[T], tensor_of: Callable[[T], Tensor]) -> Iterator[list[T]]:
    """Yield items in order, as many at once as fill a message."""
    some: list[T] = []
    size = 0
    for item in items:
        some.append(item)
        tensor = tensor_of(item)
        size += tensor.numel() * tensor.element_size()
        if size >= MESSAGE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


class _Message:
    """Parameters whose gradients are summed at once.

    ``observe`` is called with the gradients before they are, ``reduced`` with the names when they are.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        observe: Callable[[Sequence[Tensor]], None],
        reduced: Callable[[Collection[str]], None],
    ) -> None:
        self.parameters = parameters
        self._group = group
        self._observe = observe
        self._reduced = reduced
        self._has_begun = False
        self._sum: FlatSum | None = None

    @property
    def leaves(self) -> Collection[Tensor]:
        """The leaves of the parameters."""
        return [leaf_of(parameter) for parameter in self.parameters.values()]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin the sum, without waiting for another lane."""
        assert not self._has_begun, "gradients are summed once a step"
        self._has_begun = True
        gradients = [local_gradient(parameter) for parameter in self.parameters.values()]
        self._observe(gradients)
        self._sum = FlatSum(self._group, gradients)

    def look(self) -> None:
        """Take the sum if it is there, without waiting for it."""
        if self._sum is not None and self._sum.is_done:
            self._end(self._sum)

    def complete(self) -> None:
        """Have the gradients of the step be summed."""
        if not self._has_begun:
            self.begin()
        if self._sum is not None:
            self._end(self._sum)
        self._has_begun = False

    @torch.no_grad()
    def _end(self, sum_: FlatSum) -> None:
        sum_.end()
        self._sum = None
        self._reduced(self.parameters.keys())


def replicate(
    part: ModuleParameters,
    meshes: Meshes,
    *,
    overlaps: bool = False,
    reduced: Callable[[Collection[str]], None] = lambda _names: None,
) -> Prepared:
    """Keep parameters whole on every lane; ``reduce`` sums their gradients over the lanes.

    Args:
        part: the parameters.
        meshes: the groups of this rank.
        overlaps: whether sums begin while the last backward of a step runs: of one stage, of a module whose
            `mimo.topology.Module.overlaps` has sums.
        reduced: is called with full names of parameters whose gradients are final for the step.
    """
    grid, mixed = part.grid, part.experts
    shared = meshes.axes_group(grid, DATA_AXES)
    assert not part.summed & part.tied, "a tied parameter is split over tensor ranks, or full and equal on each"
    summed = {name for name in part.summed if (grid.etp if name in mixed else grid.tp) > 1}  # else one makes all of it
    split, tied, split_experts, parts, parts_experts = (
        {name: part.parameters[name] for name in part.parameters if name in names}
        for names in (
            part.parameters.keys() - part.tied - summed - mixed,
            part.tied,
            mixed - summed,
            summed - mixed,
            summed & mixed,
        )
    )
    groups = [(split, shared)]
    if split_experts:
        groups.append((split_experts, meshes.axes_group(grid, ("edp",))))
    observe = partial(part.observe, "lanes", part.stages)
    early: list[_Message] = []
    late: list[_Message] = []
    if overlaps:
        (number,) = part.stages
        stage = StageId(grid.name, number)
        cut = [(one, meshes.gradient_group(stage, group)) for some, group in groups for one in _cut(some)]
        positions = {name: index for index, name in enumerate(part.parameters)}
        early = [
            _Message(one, group, observe, reduced)
            for one, group in sorted(cut, key=lambda each: max(map(positions.__getitem__, each[0])), reverse=True)
        ]
    else:
        late = [_Message(one, group, observe, reduced) for some, group in groups for one in _cut(some)]
    # Tied ones are in a message of their own, of one length on both stages: the sum is then made in one order, and the
    # copies stay the same to the bit.
    late = [
        _Message(tied, shared, observe, reduced),
        *late,
        *(_Message(one, meshes.axes_group(grid, (*DATA_AXES, "tp")), observe, reduced) for one in _cut(parts)),
    ]
    for one in _cut(parts_experts):  # one after the other, as for both together there is no group
        late += [
            _Message(one, meshes.axes_group(grid, ("edp",)), observe, lambda _names: None),
            _Message(one, meshes.axes_group(grid, ("etp",)), lambda _gradients: None, reduced),
        ]
    in_order = InOrder(early, name=grid.name)

    def on_grad_accumulation(deferred: DeferredGrads | None, last: bool) -> AbstractContextManager[None]:  # noqa: FBT001 - as `Prepared` has it
        return in_order.on_grad_accumulation(deferred) if last else nullcontext()

    def reduce() -> None:
        for message in (*late, *early):
            message.complete()

    return Prepared(reduce, on_grad_accumulation=on_grad_accumulation) if early else Prepared(reduce)


def _cut(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Return parameters from the last to the first, as many at once as fill a message."""
    return [dict(some) for some in in_messages(reversed(list(parameters.items())), lambda item: item[1])]


@torch.no_grad()
def reduce_tied(parameter: nn.Parameter, part: ModuleParameters, meshes: Meshes) -> None:
    """Add up the gradients of a parameter that the first and the last stage both hold, on both."""
    pair = next(pair for pair in tied_pairs(part.grid) if part.rank in pair)
    sum_over(meshes.group(pair), [local_gradient(parameter)])

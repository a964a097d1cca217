"""Counts what a forward takes whose weights have no storage: products with them and of what they make, what is saved.

What doesn't depend on weights, as places of patches, is computed; what does has no storage either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.model import OpCost
from mimo_transformers.cost.saved import SavedTensors
from mimo_transformers.model.per_sample import change_tensors, tensors_in

_CONVOLUTION = "aten::convolution"
_SOLVED = "aten::linalg_solve_triangular"
_MULTIPLIED = "aten::mul.Tensor"
_SUMMED = "aten::sum.dim_IntList"
_CHOSEN = "aten::topk"
_FACTORS: Mapping[str, tuple[int, int]] = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    _CONVOLUTION: (0, 1),
}
"""Which arguments of an operation are multiplied with each other."""


@attrs.frozen
class _Weight:
    """A tensor that follows from weights alone.

    Args:
        tensor: itself, so that its storage isn't another's.
        part: that holds the first of these weights.
        origins: storages of them.
    """

    tensor: Tensor
    part: str | None
    origins: frozenset[int]


class ForwardCounter(TorchDispatchMode):
    """Adds up products and what autograd saves, while it counts, by the part of a model that holds the weights.

    A product of activations counts to the part of the last product with weights, and so does what is saved. Such
    products are those of matrices, sums over what two tensors make of each other's rows element by element, and solved
    triangular systems. All other work that goes element by element is left out.

    Args:
        parts: parameters without storage, each with the name of its part; None where products count for nothing.
        part: to which what comes before the first product with weights counts; None for nothing.

    Attributes:
        costs: by part, of what isn't in layers.
        layer_costs: likewise, of what is.
        layer_inputs: elements of the rows that layers are given.
        beside: elements that they are given besides, as masks and angles, each storage once.
        layers: how many of them have run.
        saved: all that autograd has saved.
    """

    def __init__(self, parts: Iterable[tuple[Tensor, str | None]], *, part: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.costs: dict[str, OpCost] = {}
        self.layer_costs: dict[str, OpCost] = {}
        self.layer_inputs, self.layers, self.beside = 0, 0, 0.0
        parts = list(parts)
        self._in_layer = False
        self._width = 0  # of the rows between layers
        self._part = part
        self._first = next((own for _, own in parts if own is not None), None)
        self._weights = {(key := id(one.untyped_storage())): _Weight(one, own, frozenset((key,))) for one, own in parts}
        self._factors: set[int] = set()  # storages of weights of products
        self._others: set[int] = set()  # of those that are used in another way
        self._multiplied: Tensor | None = None  # the last product that was made element by element
        self.saved, self._seen = SavedTensors(one for one, _ in parts), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, by shapes alone if one of its operands has no storage."""
        del types
        named, operands = dict(kwargs or {}), args
        tensors = tensors_in((args, named))
        if any(one.is_meta for one in tensors):
            args, named = change_tensors((args, named), lambda tensor: tensor.to("meta"))
        else:
            named = _on_host(named)
        found = _in_turn(func, args, named) if func.name() == _CHOSEN else func(*args, **named)
        if isinstance(found, Tensor) and found.is_meta:
            owners = [self._weights.get(id(one.untyped_storage())) for one in tensors]
            own = [owner for owner in owners if owner]
            origins = frozenset[int]().union(*(owner.origins for owner in own))
            if len(own) == len(owners):
                self._weights[id(found.untyped_storage())] = _Weight(found, own[0].part if own else None, origins)
            elif (name := func.name()) in _FACTORS:
                self._factors |= origins
                one, other = (operands[place] for place in _FACTORS[name])
                inputs = other.shape[1:].numel() if name == _CONVOLUTION else one.shape[-1]
                self._count(found, one, other, inputs)
            else:
                self._others |= origins
                if not own:
                    self._count_inner(name, found, tensors)
        return found

    def is_product(self, weight: Tensor) -> bool:
        """Tell whether rows are multiplied with a weight as a matrix: not if it was seen in other work alone."""
        key = id(weight.untyped_storage())
        return key in self._factors or key not in self._others

    def _count_inner(self, name: str, found: Tensor, given: Sequence[Tensor]) -> None:
        """Add what an operation on activations does that is a product of matrices under another name."""
        before, self._multiplied = self._multiplied, None
        first = given[0] if given else found
        if name == _MULTIPLIED and any(one.numel() < found.numel() or _shares(before, one) for one in given):
            self._multiplied = found
        if name == _SOLVED:
            operations = float(found.numel() * first.shape[-1])
        elif name == _SUMMED and _shares(before, first) and found.numel() < first.numel():
            operations = 2.0 * first.numel()
        else:
            return
        if self._part is not None:
            self._add(self._part, OpCost(inner=operations))

    def _count(self, found: Tensor, one: Tensor, other: Tensor, inputs: int) -> None:
        """Add a product of two factors, each element of which is a sum over so many ``inputs``."""
        owners = [self._weights.get(id(factor.untyped_storage())) for factor in (one, other)]
        operations = 2.0 * found.numel() * inputs
        if not any(owners):
            cost = OpCost(inner=operations)  # of attention: queries times keys, and scores times values
        else:
            rows = one if owners[1] else other
            (self._part,) = {owner.part for owner in owners if owner}
            ends = rows.numel() + found.numel()
            of_items = 0.0 if rows.is_meta else operations
            cost = OpCost(weighted=operations, of_items=of_items, operands=ends, working=2.0 * found.numel())
        if self._part is not None:
            self._add(self._part, cost)

    def _add(self, part: str, cost: OpCost) -> None:
        costs = self.layer_costs if self._in_layer else self.costs
        costs[part] = costs.get(part, OpCost()) + cost

    def _add_saved(self) -> None:
        """Add what has been saved since the last time: tensor ranks split what a layer saves, but for its own rows."""
        part = self._part or self._first
        if part is not None:
            for shape, elements in self.saved.elements(self._seen):
                split = self._in_layer and shape[-1:] != (self._width,)
                self._add(part, OpCost(split=elements) if split else OpCost(copied=elements))
        self._seen = len(self.saved)

    @contextmanager
    def counting(self, layers: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Count a forward within that autograd records, in these layers and around them."""
        hooks = []
        for layer in layers:
            hooks += [layer.register_forward_pre_hook(self._begin, with_kwargs=True)]
            hooks += [layer.register_forward_hook(self._end)]
        try:
            with self.saved.collecting(), self, _Functions(self.saved):
                yield
            self._add_saved()
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, _layer: nn.Module, given: Any, named: Any) -> None:
        hidden, *others = tensors_in((given, named))
        self._width = self._width or hidden.shape[-1]
        self._add_saved()
        self.beside += self.saved.leave_out(*others)
        self._in_layer = True
        self.layers += 1
        self.layer_inputs += hidden.numel()

    def _end(self, *_given: Any) -> None:
        self._add_saved()
        self._in_layer = False


def _in_turn(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the largest of values, and which they are; of values without storage each in turn, as often as others."""
    values, places = func(*args, **named)
    if places.is_meta:
        values_given, dim = args[0], args[2] if len(args) > 2 else named.get("dim", -1)  # noqa: PLR2004 - `topk`'s order
        each = torch.arange(places.numel()).view(*places.movedim(dim, -1).shape) % values_given.shape[dim]
        places = each.movedim(-1, dim)
    return values, places


def _shares(one: Tensor | None, other: Tensor) -> bool:
    """Tell whether two tensors are views of one storage."""
    return one is not None and one.untyped_storage()._cdata == other.untyped_storage()._cdata  # noqa: SLF001 - as StorageWeakRef.cdata


def repeated(layers: OpCost, count: int, inputs: float) -> OpCost:
    """Return the cost of layers that save their inputs, and compute all else again in turn.

    Args:
        layers: that save all.
        count: how many.
        inputs: elements that all of them are given.
    """
    one = (layers.split + layers.copied - inputs) / max(count, 1)
    return attrs.evolve(layers, repeated=layers.forward, split=0, copied=inputs, recomputed=max(0.0, one))


class _Functions(TorchFunctionMode):
    """Makes tensors of numbers where they can be read, and has attention save what its kernels do.

    ``torch.tensor`` is no operation that is dispatched, and attention without storage would be computed step by step.
    """

    def __init__(self, saved: SavedTensors) -> None:
        super().__init__()
        self._saved = saved

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a function of torch."""
        del types
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            with self._saved.paused():
                found = func(*args, **named).transpose(-3, -2).contiguous().transpose(-3, -2)  # as kernels lay it out
            self._saved.add(*tensors_in((args, named)), found, found[..., 0].clone())  # and the sums of its scores
            return found
        return func(*args, **(_on_host(named) if func is torch.tensor else named))


def _on_host(named: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the host in the place of a device without storage."""
    device = named.get("device")
    return named if device is None or torch.device(device).type != "meta" else {**named, "device": "cpu"}

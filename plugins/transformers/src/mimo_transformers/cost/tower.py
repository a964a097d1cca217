"""What an encoder of the library takes: it runs a few times without storage, and other sizes follow from these.

Of pictures in tiles all grows with their number, of those of their own size with the number of their pixels, and
attention with its square. What a tower makes of all pairs of rows of several images, as a mask over them, is found by
what layers of two and of three equal ones are given beyond those of one. Products with what isn't trained, since
nothing that is handed on depends on it, are left out. What can't run so is counted by its weights, as often as an image
has rows.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
from torch import nn

from mimo.model import OpCost
from mimo_transformers.cost.products import ForwardCounter, repeated

Shape = tuple[int, int, int]
"""How many pictures an image becomes, and their height and width in pixels."""
_SIDES = (64, 128, 256, 512, 1024, 2048)
"""Of squares that are looked at."""
_OTHER = (555, 1044)
"""Of an image that no point is."""
_POINTS = 3
"""Through which a polynomial of the second degree goes."""
_TOLERANCE = 0.01


@attrs.frozen(kw_only=True)
class ItemCost:
    """What an encoder takes for items.

    Args:
        costs: by part, of what isn't in layers.
        layer_costs: likewise, of what is.
        layers: how many there are.
        layer_inputs: elements of the rows that they are given.
        beside: elements that they are given besides.
    """

    costs: Mapping[str, OpCost]
    layer_costs: Mapping[str, OpCost]
    layers: int
    layer_inputs: float
    beside: float = 0

    @property
    def forward(self) -> float:
        """Operations of the forward."""
        return sum(one.forward for one in (*self.costs.values(), *self.layer_costs.values()))


class TowerCost:
    """What an encoder takes, by the shapes of images.

    It runs in a thread of its own, one at a time, so that no mode of those who ask counts its operations as theirs.

    Args:
        encoder: without storage; its children are its parts, in order.
        run: it on images of these sizes together.
        layers: of its tower, as far as these are known; they may be computed again.
        shape: of an image of a size.
        rows: that it becomes.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        run: Callable[[Sequence[tuple[int, int]]], object],
        layers: Sequence[nn.Module],
        shape: Callable[[tuple[int, int]], Shape],
        rows: Callable[[tuple[int, int]], int],
    ) -> None:
        self._parts = {name: list(part.parameters()) for name, part in encoder.named_children()}
        self._tower = next(iter(self._parts))
        self._run, self._layers, self._shape, self._rows = run, layers, shape, rows
        self._known: dict[Shape, ItemCost] = {}
        self._measuring = threading.Lock()
        self._points = self._find_points()
        self._paired = self._find_paired()

    def of(self, sizes: Sequence[tuple[int, ...]], recompute: str) -> Mapping[str, OpCost]:
        """Return by part what a forward takes over images of these sizes; see `mimo.model.EncoderSpec.flops`."""
        shapes = Counter((self._shape((height, width)), (height, width)) for height, width in sizes)
        total = _combined([(self._item(shape, size), float(count)) for (shape, size), count in shapes.items()])
        found = {}
        for name, part in self._parts.items():
            inside = total.layer_costs.get(name, OpCost())
            if recompute == "full" and inside.forward:
                inside = repeated(inside, total.layers, total.layer_inputs)
            beside = OpCost(weights=sum(one.numel() for one in part))
            if name == self._tower:
                pixels = [float(math.prod(shape)) for shape, _ in shapes.elements()]
                own = sum((self._paired * one) ** 2 for one in pixels)  # which is of each image by itself
                copied = max(0.0, total.beside - own)
                beside = attrs.evolve(beside, copied=copied, paired=self._paired * sum(pixels))
            found[name] = inside + total.costs.get(name, OpCost()) + beside
        return found

    def _item(self, shape: Shape, size: tuple[int, int]) -> ItemCost:
        if len(self._points) == _POINTS:
            return _through(self._points, math.prod(shape))
        return self._measured(shape, size)

    def _measured(self, shape: Shape, size: tuple[int, int]) -> ItemCost:
        with self._measuring:
            if shape not in self._known:
                with ThreadPoolExecutor(1) as alone:
                    self._known[shape] = alone.submit(self._measure, [size]).result()
            return self._known[shape]

    def _measure(self, sizes: Sequence[tuple[int, int]]) -> ItemCost:
        named = [(one, name if one.requires_grad else None) for name, part in self._parts.items() for one in part]
        counter = ForwardCounter(named)
        try:
            with counter.counting(self._layers):
                self._run(sizes)
        except RuntimeError:  # it reads numbers back that depend on weights
            return self._by_weights(sum(map(self._rows, sizes)))
        return ItemCost(
            costs=counter.costs,
            layer_costs=counter.layer_costs,
            layers=counter.layers,
            layer_inputs=counter.layer_inputs,
            beside=counter.beside,
        )

    def _by_weights(self, rows: int) -> ItemCost:
        """Return what so many rows take if each is multiplied once with all that is trained."""
        trained = {name: sum(one.numel() for one in part if one.requires_grad) for name, part in self._parts.items()}
        costs = {name: OpCost(weighted=2.0 * rows * count) for name, count in trained.items()}
        return ItemCost(costs=costs, layer_costs={}, layers=0, layer_inputs=0)

    def _find_paired(self) -> float:
        """Return the square root of elements beside rows that grow with the square of the images, for each pixel."""
        sides = {math.prod(self._shape((side, side))): (side, side) for side in _SIDES[:_POINTS]}
        pixels, size = max(sides.items())
        with self._measuring, ThreadPoolExecutor(1) as alone:
            one, two, three = (alone.submit(self._measure, [size] * count).result().beside for count in (1, 2, 3))
        return math.sqrt(max(0.0, three - 2 * two + one) / 2) / pixels

    def _find_points(self) -> Sequence[tuple[int, ItemCost]]:
        """Return what is measured of three numbers of pixels, if that of another follows from it; none otherwise."""
        sides = {math.prod(self._shape((side, side))): (side, side) for side in _SIDES}
        if len(sides) < _POINTS:
            return ()
        chosen = sorted(sides)
        points = [
            (pixels, self._measured(self._shape(sides[pixels]), sides[pixels]))
            for pixels in (chosen[0], chosen[len(chosen) // 2], chosen[-1])
        ]
        shape = self._shape(_OTHER)
        wanted, found = self._measured(shape, _OTHER).forward, _through(points, math.prod(shape)).forward
        return points if abs(found - wanted) <= _TOLERANCE * wanted else ()


def _through(points: Sequence[tuple[int, ItemCost]], pixels: int) -> ItemCost:
    """Return the value at a number of pixels of the polynomial through points (Lagrange's form)."""
    others = [[other for other, _ in points if other != own] for own, _ in points]
    return _combined(
        [
            (cost, math.prod((pixels - other) / (own - other) for other in rest))
            for (own, cost), rest in zip(points, others, strict=True)
        ]
    )


def _combined(costs: Sequence[tuple[ItemCost, float]]) -> ItemCost:
    """Return the sum of costs, each multiplied by its factor."""
    return ItemCost(
        costs=_summed([(one.costs, factor) for one, factor in costs]),
        layer_costs=_summed([(one.layer_costs, factor) for one, factor in costs]),
        layers=max((one.layers for one, _ in costs), default=0),
        layer_inputs=sum(factor * one.layer_inputs for one, factor in costs),
        beside=sum(factor * one.beside for one, factor in costs),
    )


def _summed(costs: Sequence[tuple[Mapping[str, OpCost], float]]) -> Mapping[str, OpCost]:
    found: dict[str, OpCost] = {}
    for parts, factor in costs:
        for name, one in parts.items():
            scaled = OpCost(
                weighted=factor * one.weighted,
                of_items=factor * one.of_items,
                inner=factor * one.inner,
                split=factor * one.split,
                copied=factor * one.copied,
                operands=factor * one.operands,
            )
            before = found.get(name, OpCost())
            working = before.working + factor * one.working  # of items, that all go through one part after the other
            found[name] = attrs.evolve(before + scaled, working=working)
    return found

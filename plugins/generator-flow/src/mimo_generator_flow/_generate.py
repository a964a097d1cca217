"""From noise to pictures. Shapes: N pictures, L patches of each, E numbers of a patch, R rows, H their width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from mimo_generator_flow._config import FlowConfig
from mimo_generator_flow._draws import draw_noise
from mimo_generator_flow._model import FlowTransformer
from mimo_generator_flow._pictures import to_image

if TYPE_CHECKING:
    from PIL import Image

Velocity: TypeAlias = Callable[[Tensor, float], Tensor]
"""Of where pictures are, and when, with which velocity they move."""


@torch.no_grad()
def generate(
    module: nn.Module, config: FlowConfig, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor
) -> list[Image.Image]:
    """Return a picture for each span of ``rows`` [R, H]; it follows from the rows and its key, of ``keys`` [N]."""
    assert isinstance(module, FlowTransformer)
    count = len(spans)
    if not count:
        return []
    patches = draw_noise(config, keys, device=rows.device)
    patches = solve(config, patches, velocity_of(module, config, rows, spans))
    return [to_image(config, own) for own in patches.unflatten(0, (count, -1))]


def velocity_of(
    module: FlowTransformer, config: FlowConfig, rows: Tensor, spans: Sequence[tuple[int, int]]
) -> Velocity:
    """Return with which velocity pictures move that are made from these spans of ``rows``, guided or not."""
    guided, count = config.guidance != 1, len(spans)
    packing = module.pack([*spans, *([(0, 0)] * count if guided else ())], device=rows.device)
    connected = module.connected(rows, packing)

    def velocity(patches: Tensor, time: float) -> Tensor:
        times = patches.new_full((len(packing.counts), 1), time)
        if not guided:
            return module.velocity(patches, times, connected, packing)
        both = module.velocity(patches.repeat(2, 1), times, connected, packing)
        own, without = both.chunk(2)
        return without + config.guidance * (own - without)

    return velocity


def solve(config: FlowConfig, start: Tensor, velocity: Velocity) -> Tensor:
    """Return where what is at ``start`` at time 0 is at time 1, after as many equal steps as settings say.

    The solvers are Euler's and the two of second order with two stages in Hairer, Nørsett and Wanner 1993, "Solving
    ordinary differential equations I", section II.1: the midpoint rule of Runge and the trapezoidal one of Heun.
    """
    x, step = start, 1 / config.steps
    for index in range(config.steps):
        time = index * step
        slope = velocity(x, time)
        if config.solver == "midpoint":
            slope = velocity(x + step / 2 * slope, time + step / 2)
        elif config.solver == "heun":
            slope = (slope + velocity(x + step * slope, time + step)) / 2
        x = x + step * slope
    return x

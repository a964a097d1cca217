"""From noise to pictures: solvers, guidance, and a generator that has learned two colours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from PIL import Image
from torch import Tensor

from mimo.model.runtime import item_keys, step_key
from mimo_generator_flow import FLOW, FlowConfig
from mimo_generator_flow._generate import solve, velocity_of
from mimo_generator_flow._model import FlowTransformer
from mimo_generator_flow._pictures import to_image

SMALL = FlowConfig(height=4, width=6, channels=3, patch=2, hidden=24, layers=2, heads=6, intermediate=20, steps=4)


def _stirred(config: FlowConfig, hidden: int = 10) -> FlowTransformer:
    torch.manual_seed(3)
    module = FlowTransformer(config, hidden)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return module


def _generate(module: FlowTransformer, config: FlowConfig, *given: Any) -> list[Any]:
    assert FLOW.generate is not None
    return list(FLOW.generate(module, config, *given))


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2)])
def test_a_solver_has_its_order(solver: Any, order: int) -> None:
    """With twice as many steps its error is half as large, or a quarter; a call is made for each stage."""
    times: list[float] = []

    def error(steps: int) -> float:
        config = attrs.evolve(SMALL, solver=solver, steps=steps)

        def velocity(x: Tensor, time: float) -> Tensor:
            times.append(time)
            return x * (2 * time - 3)

        start = torch.ones(1, 1, dtype=torch.float64)
        return abs(float(solve(config, start, velocity)) - float(torch.tensor(-2.0, dtype=torch.float64).exp()))

    coarse, fine = error(64), error(128)
    assert 0.9 * 2**order < coarse / fine < 1.1 * 2**order
    assert len(times) == (64 + 128) * order
    assert min(times) == 0
    assert max(times) == pytest.approx(1, abs=0.02)


def test_a_straight_way_is_followed_exactly() -> None:
    """In one step, by every solver."""
    for solver in ("euler", "midpoint", "heun"):
        config = attrs.evolve(SMALL, solver=solver, steps=1)
        assert float(solve(config, torch.ones(1, 1), lambda _x, _time: torch.full((1, 1), 2.5))) == 3.5


def test_guidance_moves_away_from_what_no_rows_give() -> None:
    """Velocities are those without rows and so many times the difference; 0 are those without rows alone."""
    module, rows, spans = _stirred(SMALL), torch.randn(5, 10), [(0, 3), (3, 3), (2, 5)]
    patches, where = torch.randn(3 * 6, 12), 0.3
    with torch.no_grad():
        own, without, guided = (
            velocity_of(module, attrs.evolve(SMALL, guidance=guidance), rows, spans)(patches, where)
            for guidance in (1.0, 0.0, 2.5)
        )
        alone = velocity_of(module, attrs.evolve(SMALL, guidance=1.0), rows, [(0, 0)] * 3)(patches, where)
    torch.testing.assert_close(without, alone)
    torch.testing.assert_close(guided, alone + 2.5 * (own - alone))
    torch.testing.assert_close(guided[6:12], alone[6:12])  # the picture of no rows has nothing to be guided by
    assert not torch.allclose(own[:6], alone[:6])


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_pictures_follow_from_keys_and_rows(guidance: float) -> None:
    """The same in a second call and in other batches but for rounding; of another key another; of no spans none."""
    config = attrs.evolve(SMALL, guidance=guidance)
    module, rows, spans = _stirred(config), torch.randn(5, 10), [(0, 3), (3, 3), (2, 5)]
    keys = item_keys(step_key(1, 0), range(3), [0] * 3)
    made = _generate(module, config, rows, spans, keys)
    assert [(one.mode, one.size) for one in made] == [("RGB", (6, 4))] * 3
    assert [one.tobytes() for one in _generate(module, config, rows, spans, keys)] == [one.tobytes() for one in made]
    (alone,) = _generate(module, config, rows, spans[2:], keys[2:])
    assert all(abs(one - other) <= 1 for one, other in zip(alone.tobytes(), made[2].tobytes(), strict=True))
    (other,) = _generate(module, config, rows, spans[2:], keys[:1])
    assert other.tobytes() != made[2].tobytes()
    assert _generate(module, config, rows, [], keys[:0]) == []


def test_nothing_is_kept_for_a_backward() -> None:
    """Generating asks for no gradient, whatever rows and parameters do."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    rows = torch.randn(3, 10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _generate(_stirred(SMALL), SMALL, rows, [(0, 3)], torch.zeros(1, dtype=torch.int64))
    assert not kept


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_come_back(channels: int, tmp_path: Path) -> None:
    """A picture that is prepared, cut into patches, put together and saved has each pixel where it was."""
    config = attrs.evolve(SMALL, channels=channels)
    mode = "L" if channels == 1 else "RGB"
    image = Image.frombytes(mode, (6, 4), bytes(10 * index % 256 for index in range(4 * 6 * channels)))
    pixels = FLOW.prepare(config, image)["pixels"]
    assert pixels.shape == (channels, 4, 6)
    assert (float(pixels.min()), float(pixels.max())) <= (-0.9, 1.0)
    patches = pixels.view(channels, 2, 2, 3, 2).permute(1, 3, 2, 4, 0).reshape(6, -1)
    again = to_image(config, patches)
    assert again.mode == mode
    assert again.tobytes() == image.tobytes()
    assert set(to_image(config, 3 * torch.ones_like(patches)).tobytes()) == {255}
    assert set(to_image(config, -3 * torch.ones_like(patches)).tobytes()) == {0}
    assert FLOW.save is not None
    path = FLOW.save(again, tmp_path / "sample.0")
    assert path == tmp_path / "sample.0.png"
    with Image.open(path) as saved:
        assert saved.tobytes() == image.tobytes()


def test_pictures_are_stretched_to_the_size_that_is_made() -> None:
    """Whatever size, mode and aspect they have."""
    for image in (Image.new("L", (40, 3), 200), Image.new("RGBA", (1, 1), (200, 200, 200, 255))):
        pixels = FLOW.prepare(SMALL, image)["pixels"]
        assert pixels.shape == (3, 4, 6)
        torch.testing.assert_close(pixels, torch.full_like(pixels, 200 / 127.5 - 1))


def test_it_learns_which_rows_mean_which_picture(run_ranks: Callable[..., list[Any]]) -> None:
    """After a few hundred steps on two pictures, what is made of either's row is near it, by any key."""
    (distances,) = run_ranks(1, _learned)
    assert max(distances) < 0.15


def _learned(_rank: int) -> list[float]:
    config = FlowConfig(
        height=8, width=8, channels=1, patch=4, hidden=32, layers=2, heads=4, intermediate=64, steps=8, guidance=1.5
    )
    torch.manual_seed(2)
    module = FlowTransformer(config, 8)
    pictures = [Image.new("L", (8, 8), 40), Image.new("L", (8, 8), 215)]
    items, rows, spans = [FLOW.prepare(config, one) for one in pictures], torch.randn(2, 8), [(0, 1), (1, 2)]
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.0)
    steps, copies = 300, 8
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        keys = item_keys(step_key(1, step), range(2 * copies), [0] * (2 * copies))
        loss = module(items * copies, rows, spans * copies, keys).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    made = _generate(module, config, rows, spans * 4, item_keys(step_key(7, 0), range(8), [0] * 8))
    return [
        float((FLOW.prepare(config, one)["pixels"] - item["pixels"]).abs().mean())
        for one, item in zip(made, items * 4, strict=True)
    ]

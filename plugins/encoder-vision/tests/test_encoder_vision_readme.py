"""The README's encoder works as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh

from mimo.model.runtime import TensorAxis, build_part
from mimo.topology import Grid


def _check_readme(_rank: int) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"__name__": "colour"}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - the README is ours
    (spec,) = names["mimo_register_encoders"]()
    part = build_part(
        spec,
        spec.config(),
        grid=Grid(name="vision", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
        hidden=6,
    )
    images = [Image.new("RGB", (9, 5), colour) for colour in ("red", "blue")]
    rows = part.encode([spec.prepare(spec.config(), image) for image in images], [spec.measure(i) for i in images])
    assert rows.shape == (2, 6)
    rows.sum().backward()
    assert all(parameter.grad is not None for parameter in part.parameters.values())
    assert part.encode([], []).shape == (0, 6)


def test_readme_encoder(run_ranks: Callable[..., list[Any]]) -> None:
    """What an author copies gives one row for each image, learns, and takes no image too."""
    run_ranks(1, _check_readme)

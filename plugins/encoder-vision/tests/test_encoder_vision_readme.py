"""The README's encoder works as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.distributed.device_mesh import DeviceMesh

from mimo.model.runtime import TensorAxis, build_part, gradient_of
from mimo.topology import Grid


def _check_readme(_rank: int, dtype: torch.dtype) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*COLOUR.*?)```", text, re.DOTALL)
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
        dtype=dtype,
        hidden=6,
    )
    images = [Image.new("RGB", (9, 5), colour) for colour in ("red", "blue")]
    items = [{"mean": spec.prepare(spec.config(), image)["mean"].to(dtype)} for image in images]
    rows = part.encode(items, [spec.measure(image) for image in images])
    assert (rows.shape, rows.dtype) == ((2, 6), dtype)
    rows.sum().backward()
    assert all(gradient_of(parameter) is not None for parameter in part.parameters.values())
    assert part.encode([], []).shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_readme_encoder(run_ranks: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    """What an author copies gives one row for each image, learns, and takes no image too."""
    run_ranks(1, _check_readme, dtype)


def test_readme_program(capsys: pytest.CaptureFixture[str]) -> None:
    """Images of two sizes become the rows that it says."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (program, _) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102 - the README is ours
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*  # (.*)$", program, re.MULTILINE)

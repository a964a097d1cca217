"""Which kernel attention runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.model.attention.kernels import Kernel, kernel_of

README = Path(__file__).parents[2] / "README.md"
ASKED: dict[str, dict[str, Any]] = {
    "heads up to 256 wide": {"width": 256, "scored": False, "items": False},
    "wider heads": {"width": 264, "scored": False, "items": False},
    "rows of an item see each other": {"width": 64, "scored": False, "items": True},
    "capped scores, sinks": {"width": 64, "scored": True, "items": False},
}
WHERE = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    ("cuda", torch.float32),
    ("cuda", torch.bfloat16),
    ("cuda", torch.float16),
]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def test_the_table_of_kernels_is_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """The README shows for each device, kind of numbers and demand which kernel serves it."""
    rows = [_row("where", "numbers", *ASKED), "|" + "---|" * (2 + len(ASKED))]
    for device, dtype in WHERE:
        chosen = [kernel_of(torch.device(device), dtype, **asked).name.lower() for asked in ASKED.values()]
        rows.append(_row(device, str(dtype).removeprefix("torch."), *chosen))
    table = "\n".join(rows)
    with capsys.disabled():
        print(f"\n{table}")
    assert table in README.read_text(encoding="utf-8")
    assert all(f"- *{kernel.name.lower()}*" in README.read_text(encoding="utf-8") for kernel in Kernel)

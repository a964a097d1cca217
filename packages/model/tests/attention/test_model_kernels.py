"""Which kernel attention runs on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from mimo.model.attention import padded
from mimo.model.attention.kernels import Kernel, kernel_of
from mimo.model.attention.padded import _kernels
from mimo.model.runtime import Segments, attend

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
    ("cuda", torch.float64),
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


def test_the_kernel_that_writes_down_all_scores_is_taken_only_where_all_others_are_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then somebody has asked for it; where others don't fit, the call fails."""
    enabled = {"flash_sdp_enabled": True, "mem_efficient_sdp_enabled": True}
    for name in enabled:
        monkeypatch.setattr(torch.backends.cuda, name, partial(enabled.__getitem__, name))
    assert _kernels() == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    enabled["flash_sdp_enabled"] = False
    assert _kernels() == [SDPBackend.EFFICIENT_ATTENTION]
    enabled["mem_efficient_sdp_enabled"] = False
    assert _kernels() == []

    monkeypatch.setattr(padded, "needs_alignment", lambda _query: True)
    allowed: list[bool] = []
    attention = functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.math_sdp_enabled())
        return attention(query, key, value, **how)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    rows = torch.randn(3, 2, 8)
    for is_enabled in (True, False):
        enabled["flash_sdp_enabled"] = is_enabled
        attend(rows, rows, rows, Segments.of((3,), causal=True))
    assert allowed == [False, True]

"""Which kernel attention runs on."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.model.attention import kernels, padded, varlen
from mimo.model.attention.kernels import Kernel, kernel_of
from mimo.model.attention.padded import _kernels
from mimo.model.runtime import Segments, attend
from mimo.model.testing.varlen import varlen_attention

README = Path(__file__).parents[2] / "README.md"
ASKED: dict[str, dict[str, Any]] = {
    "heads up to 256 wide": {"widths": (256, 256), "scored": False, "items": False},
    "wider heads": {"widths": (264, 264), "scored": False, "items": False},
    "keys wider or narrower than values": {"widths": (96, 64), "scored": False, "items": False},
    "rows of an item see each other": {"widths": (64, 64), "scored": False, "items": True},
    "capped scores, sinks": {"widths": (64, 64), "scored": True, "items": False},
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


@pytest.mark.filterwarnings("ignore:Flash attention")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("dtype", [dtype for where, dtype in WHERE if where == "cpu"], ids=str)
def test_the_cpu_runs_what_the_table_says(dtype: torch.dtype, asked: str) -> None:
    """Where its flash kernel alone may run, attention runs as before, but for what the table leaves to another."""
    wide, narrow = ASKED[asked]["widths"]
    query, key = (torch.randn(9, heads, wide, dtype=dtype, requires_grad=True) for heads in (4, 2))
    value = torch.randn(9, 2, narrow, dtype=dtype, requires_grad=True)
    items = [[(1, 4)], []] if ASKED[asked]["items"] else ()
    segments = Segments.of((6, 3), causal=True, items=items)
    run = partial(attend, query, key, value, segments, soft_cap=5.0 if ASKED[asked]["scored"] else None)
    rows = run()
    kernel = kernel_of(torch.device("cpu"), dtype, **ASKED[asked])
    expected = pytest.raises(RuntimeError, match="No available kernel") if kernel is Kernel.MATH else nullcontext()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), expected:
        found = run()
        assert torch.equal(found, rows)
        found.sum().backward()


class _ReadersOfLogSumExp(TorchDispatchMode):
    """Notes which operators of attention return a log-sum-exp, and which operators read one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, torch.Tensor] = {}  # held, so that no other tensor comes to lie there
        self.makers: set[str] = set()
        self.readers: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        if any(x.data_ptr() in self.made for x in given):
            self.readers.add(func.overloadpacket.__name__)
        found = func(*args, **(kwargs or {}))
        if any(one.name in {"logsumexp", "log_sumexp"} for one in func._schema.returns):
            self.makers.add(func.overloadpacket.__name__)
            self.made[found[1].data_ptr()] = found[1]
        return found


def test_no_log_sum_exp_is_read_whose_gradient_a_kernel_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards of the kernels take it for a constant: only they read it; the kernel without padding returns none."""
    query, key = torch.randn(9, 4, 8, requires_grad=True), torch.randn(9, 2, 8, requires_grad=True)
    with _ReadersOfLogSumExp() as mode:
        for causal, items in ((True, ()), (False, ()), (True, [[(1, 4)], []])):
            attend(query, key, key, Segments.of((6, 3), causal=causal, items=items)).square().sum().backward()
    assert mode.makers == {"_scaled_dot_product_flash_attention_for_cpu"}
    assert mode.readers == {f"{name}_backward" for name in mode.makers}

    asked: set[str] = set()

    def noted(*rows: Any, **how: Any) -> torch.Tensor:
        asked.update(how)
        return varlen_attention(*rows, **how)

    monkeypatch.setattr(kernels, "takes_varlen", lambda _device, _dtype: True)
    monkeypatch.setattr(varlen, "varlen_attn", noted)
    attend(query, key, key, Segments.of((6, 3), causal=True))
    assert asked == {"scale", "window_size", "enable_gqa"}


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

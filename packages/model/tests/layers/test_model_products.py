"""Products without gradients are those with gradients, by whatever library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.model.layers import Linear
from mimo.model.layers.products import _suits_kernel


@pytest.mark.parametrize("rows", [0, 1, 8, 40])
@pytest.mark.parametrize(("outputs", "bias"), [(300, True), (300, False), (20, True)])
def test_a_layer_gives_the_same_with_gradients_and_without(rows: int, outputs: int, bias: bool) -> None:
    """Of large weights and small ones, with a bias and without, of rows that lie apart too."""
    torch.manual_seed(rows)
    layer, x = Linear(512, outputs, bias=bias), torch.randn(rows, 1024)[:, ::2]
    given = layer(x)
    with torch.no_grad():
        found = layer(x)
    assert given.requires_grad
    torch.testing.assert_close(found, given.detach(), rtol=0, atol=1e-5)


class _Products(TorchDispatchMode):
    """Notes by what products are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in ("addmm", "mm", "bmm", "_linear_pointwise"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("general", "rows", "outputs", "name"),
    [
        (False, 2, 300, "addmm"),
        (False, 3, 300, "_linear_pointwise"),
        (False, 8, 300, "_linear_pointwise"),
        (False, 8, 20, "addmm"),
        (True, 1, 300, "bmm"),
        (True, 1, 301, "mm"),
        (True, 1, 20, "addmm"),
        (True, 6, 300, "mm"),
        (True, 7, 300, "_linear_pointwise"),
        (True, 9, 300, "_linear_pointwise"),
        (True, 0, 300, "addmm"),
        (False, 0, 300, "addmm"),
    ],
)
def test_products_without_gradients_are_computed_by_what_reads_the_weight_fastest(
    general: bool, rows: int, outputs: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By oneDNN with large weights, and with few rows where MKL is slow; never where a gradient is asked for."""
    monkeypatch.setattr("mimo.model.layers.cpu_linear.mkl_is_general", lambda: general)
    layer, x = Linear(512, outputs), torch.randn(rows, 512)
    with _Products() as products:
        given = layer(x)
        assert products.names == ["addmm"]
        with torch.no_grad():
            found = layer(x)
    assert products.names[1:] == [name]
    assert found.is_contiguous()
    torch.testing.assert_close(found, given.detach(), rtol=0, atol=1e-5)


def test_one_row_of_many_inputs_goes_to_onednn_where_mkl_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight is not read as the left factor any more."""
    monkeypatch.setattr("mimo.model.layers.cpu_linear.mkl_is_general", lambda: True)
    for inputs, name in ((3072, "bmm"), (3076, "_linear_pointwise")):
        with torch.no_grad(), _Products() as products:
            Linear(inputs, 64)(torch.randn(1, inputs))
        assert products.names == [name]


def test_rows_of_a_batch_keep_their_shape_where_mkl_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """[2, 3, I], cut from wider rows, with and without a bias."""
    monkeypatch.setattr("mimo.model.layers.cpu_linear.mkl_is_general", lambda: True)
    for bias in (True, False):
        layer, x = Linear(256, 130, bias=bias), torch.randn(2, 3, 512)[..., 100:356]
        with torch.no_grad():
            torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_one_row_without_a_batch_keeps_its_shape_where_mkl_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """[I], which becomes [O]."""
    monkeypatch.setattr("mimo.model.layers.cpu_linear.mkl_is_general", lambda: True)
    layer, x = Linear(256, 130), torch.randn(256)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_a_compiled_graph_chooses_products_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has PyTorch's own, whatever the CPU."""
    monkeypatch.setattr("mimo.model.layers.cpu_linear.mkl_is_general", lambda: True)
    layer, x = Linear(512, 300), torch.randn(1, 512)
    targets: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert targets == [torch._C._nn.linear]  # what graphs call `functional.linear`


def test_other_dtypes_stay_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Double precision and bfloat16, one row."""
    monkeypatch.setattr("mimo.model.layers.cpu_linear.mkl_is_general", lambda: True)
    for dtype in (torch.float64, torch.bfloat16):
        layer, x = Linear(512, 300).to(dtype), torch.randn(1, 512, dtype=dtype)
        with torch.no_grad(), _Products() as products:
            layer(x)
        assert products.names == ["addmm"]


@pytest.mark.parametrize(
    ("device", "dtype", "major", "expected"),
    [
        ("cuda", torch.bfloat16, 9, True),
        ("cuda", torch.bfloat16, 10, True),
        ("cuda", torch.bfloat16, 8, False),
        ("cuda", torch.float16, 9, False),
        ("cuda", torch.float32, 9, False),
        ("cpu", torch.float32, 0, True),
    ],
)
def test_grouped_products_are_one_kernel_where_a_device_has_one(
    device: str, dtype: torch.dtype, major: int, expected: bool
) -> None:
    """Elsewhere on GPUs PyTorch would read the counts back, for which the host waits until the device has caught up."""
    rows: Any = SimpleNamespace(
        device=torch.device(device), dtype=dtype, element_size=lambda: dtype.itemsize, numel=lambda: 64
    )
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(major=major)):
        assert _suits_kernel(rows, 4, 16, 16) == expected

"""Products of rows with a weight, whose weight gradient can be deferred.

Without a queue they are PyTorch's own. Shapes: R rows, I inputs, O outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, cast

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from mimo.model.graphs import content_of
from mimo.model.layers.cpu_linear import linear_without_gradient
from mimo.model.layers.deferred_weights import WeightGradQueue
from mimo.topology.device_copies import to_device

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes
_CAPABLE = (9, 10)


class Form(Protocol):
    """A kind of product of rows with this rank's piece of a weight, and its two adjoints."""

    def forth(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product."""

    def for_input(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the rows, of that of the product."""

    def for_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight."""

    def add_for_weight(self, total: Tensor, gradient: Tensor, x: Tensor) -> None:
        """Add it to ``total``."""


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


class Dense:
    """``x @ weight.T + bias``: x [..., I], weight [O, I]."""

    def forth(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return [..., O]."""
        return functional.linear(x, weight, bias)

    def for_input(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return [..., I] of ``gradient`` [..., O]."""
        return gradient @ weight

    def for_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return [O, I]."""
        return _rows(gradient).t() @ _rows(x)

    def add_for_weight(self, total: Tensor, gradient: Tensor, x: Tensor) -> None:
        """Add it in the same pass over memory."""
        total.addmm_(_rows(gradient).t(), _rows(x))


@attrs.frozen
class Grouped:
    """``x @ weight[e].T`` for the rows of each expert e, which lie one expert after the other: weight [E, O, I].

    Args:
        counts: rows of each expert, 0 included.
    """

    counts: Sequence[int]

    def forth(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [R, O] of ``x`` [R, I]."""
        assert bias is None
        if _suits_kernel(x, *weight.shape):
            found = functional.grouped_mm(x, weight.transpose(1, 2), offs=self._ends(x))
            if found.requires_grad:
                found.register_hook(Tensor.contiguous)  # its backward takes no other gradient
            return found
        parts = zip(x.split(list(self.counts)), weight.unbind(0), strict=True)
        return torch.cat([functional.linear(part, each) for part, each in parts])

    def for_input(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return [R, I] of ``gradient`` [R, O]."""
        return self.forth(gradient.contiguous(), weight.transpose(1, 2))

    def for_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return [E, O, I]."""
        gradient = gradient.contiguous()
        if _suits_kernel(x, len(self.counts), gradient.shape[1], x.shape[1]):
            return functional.grouped_mm(gradient.t(), x, offs=self._ends(x))
        counts = list(self.counts)
        parts = zip(gradient.split(counts), x.split(counts), strict=True)
        return torch.stack([each.t() @ part for each, part in parts])

    def add_for_weight(self, total: Tensor, gradient: Tensor, x: Tensor) -> None:
        """Add it."""
        total += self.for_weight(gradient, x)

    def _ends(self, x: Tensor) -> Tensor:
        return to_device(torch.tensor(self.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), x.device)


def _suits_kernel(x: Tensor, experts: int, outputs: int, inputs: int) -> bool:
    """Tell whether torch's grouped product takes these: no double precision, nothing empty, aligned rows.

    Where a device has no kernel for it, it would have the host wait to read the counts, and multiply one by one.
    """
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in (outputs, inputs))
    takes = x.dtype in _DTYPES and aligned and x.numel() > 0 and experts * outputs * inputs > 0
    return takes and (x.device.type == "cpu" or _has_kernel(x.device, x.dtype))


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether an accelerator has a kernel of grouped products: of CUDA, those of compute capability 9 and 10."""
    if dtype != torch.bfloat16:
        return False
    return device.type != "cuda" or torch.cuda.get_device_properties(device).major in _CAPABLE


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    form: Form | None = None,
    outputs: slice | None = None,
    weight_grad_queue: WeightGradQueue | None = None,
) -> Tensor:
    """Return the product of ``x`` with ``weight``, this rank's piece.

    Args:
        x: rows.
        weight: a parameter.
        bias: another, where the form has one.
        form: of the product, `Dense` if left out.
        outputs: which outputs of the piece are computed, None for all.
        weight_grad_queue: where the gradients of weight and bias are deferred.
    """
    if form is None and outputs is None and not torch.is_grad_enabled():
        return linear_without_gradient(x, weight, bias)
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    if weight_grad_queue is None or not (trains and torch.is_grad_enabled()):
        if outputs is not None:
            weight, bias = weight[outputs], None if bias is None else bias[outputs]
        return functional.linear(x, weight, bias) if form is None else form.forth(x, weight, bias)
    if torch.compiler.is_compiling():
        assert form is None, "other products are left out of graphs"
        span = None if outputs is None else [outputs.start, outputs.stop]
        return cast("Tensor", _product_of_graph(x, weight, bias, weight_grad_queue.carrier, span))
    form, saved = form or Dense(), None
    if x.requires_grad:
        x = cast("Tensor", _SaveInputs.apply(x, _cut(weight, outputs), weight.requires_grad))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        saved = x.grad_fn
    return cast("Tensor", _Multiply.apply(x, weight, bias, _Product(form, outputs, weight_grad_queue), saved))  # type: ignore[no-untyped-call]  # torch leaves it untyped


@attrs.frozen
class _Product:
    form: Form
    outputs: slice | None
    weight_grad_queue: WeightGradQueue


class _SaveInputs(torch.autograd.Function):
    """``x``; saves for backward what the product's backward reads, before the product is computed, as PyTorch's own do.

    Recomputation stops at the last saved tensor, so it skips a product that nothing follows, and it begins at the same
    node of the graph as with PyTorch's own, even on a rank without rows, which may save nothing else.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, trains: bool) -> Tensor:  # noqa: FBT001 - autograd passes by position
        ctx.save_for_backward(x if trains else None, weight)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Multiply(torch.autograd.Function):
    """A product of which autograd gets no gradient of the parameters where it is deferred."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product, saved: Any | None
    ) -> Tensor:
        ctx.weight, ctx.bias, ctx.product, ctx.saved = weight, bias, product, saved
        piece = _cut(weight, product.outputs)
        if saved is None:
            ctx.save_for_backward(x, piece)
        return product.form.forth(x, piece, None if bias is None else _cut(bias, product.outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, product = gradients[0], ctx.product
        x, piece = (ctx if ctx.saved is None else ctx.saved).saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        for_x = product.form.for_input(gradient, piece) if of_x else None
        gradients_of_parameters: list[Tensor | None] = []
        for needed, parameter, compute, add in (
            (of_weight, ctx.weight, product.form.for_weight, product.form.add_for_weight),
            (of_bias, ctx.bias, _for_bias, _add_for_bias),
        ):
            if needed and product.weight_grad_queue.is_collecting:
                # By argument: a deferred gradient then holds these tensors, and neither the context nor the graph.
                product.weight_grad_queue.defer(
                    parameter, partial(_added, parameter, product.outputs, compute, add, gradient, x)
                )
            now = needed and not product.weight_grad_queue.is_collecting
            gradients_of_parameters.append(_placed(parameter, compute(gradient, x), product.outputs) if now else None)
        return for_x, *gradients_of_parameters, None, None


def _cut(parameter: Tensor, outputs: slice | None) -> Tensor:
    return parameter.detach() if outputs is None else parameter.detach()[outputs]


def _placed(parameter: Tensor, gradient: Tensor, outputs: slice | None) -> Tensor:
    """Return the gradient of a parameter of that of some of its outputs; it is zero elsewhere."""
    if outputs is None:
        return gradient
    whole = torch.zeros_like(parameter)
    whole[outputs] = gradient
    return whole


def _for_bias(gradient: Tensor, _x: Tensor) -> Tensor:
    return _rows(gradient).sum(0)


def _add_for_bias(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    total += _for_bias(gradient, x)


def _added(
    parameter: Tensor,
    outputs: slice | None,
    compute: Callable[[Tensor, Tensor], Tensor],
    add: Callable[[Tensor, Tensor, Tensor], None],
    gradient: Tensor,
    x: Tensor,
    total: Tensor | None,
) -> Tensor:
    """Return ``total`` with the deferred weight gradient of one product."""
    if total is None:
        return _placed(parameter, compute(gradient, x), outputs)
    add(_cut(total, outputs), gradient, x)
    return total


@torch.library.custom_op("mimo::product", mutates_args=())
def _product_of_graph(
    x: Tensor, weight: Tensor, bias: Tensor | None, _queue: Tensor, outputs: Sequence[int] | None
) -> Tensor:
    """Return a dense product in a compiled graph, whose backward defers the gradients of its parameters.

    Args:
        x: rows.
        weight: memory of a parameter that the queue knows.
        bias: likewise.
        _queue: its `WeightGradQueue.carrier`.
        outputs: start and stop of those that are computed, None for all.
    """
    span = None if outputs is None else slice(*outputs)
    return functional.linear(x, _cut(weight, span), None if bias is None else _cut(bias, span))


@_product_of_graph.register_fake
def _(x: Tensor, weight: Tensor, _bias: Tensor | None, _queue: Tensor, outputs: Sequence[int] | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] if outputs is None else outputs[1] - outputs[0])


@torch.library.custom_op("mimo::product_backward", mutates_args=())
def _product_of_graph_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    queue: Tensor,
    outputs: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and, none, of the queue; defer those of the parameters."""
    own, span, form = content_of(queue)(), None if outputs is None else slice(*outputs), Dense()
    gradient = gradient.contiguous()
    with nullcontext() if own.is_collecting else own.collect() as whole:
        for tensor, compute, add in ((weight, form.for_weight, form.add_for_weight), (bias, _for_bias, _add_for_bias)):
            if tensor is not None and (parameter := own.parameter_of(tensor)).requires_grad:
                # Copies, as the graph writes to what it needs no more.
                own.defer(parameter, partial(_added, parameter, span, compute, add, gradient.clone(), x.clone()))
    if whole is not None:
        whole()
    return form.for_input(gradient, _cut(weight, span)), torch.zeros(1)


@_product_of_graph_backward.register_fake
def _(
    _gradient: Tensor, x: Tensor, _weight: Tensor, _bias: Tensor | None, _queue: Tensor, _outputs: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.zeros(1, device="cpu")


def _save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - given by name
    ctx.save_for_backward(*inputs[:4])
    ctx.outputs = inputs[4]


def _differentiate_product(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    for_x, for_queue = _product_of_graph_backward(gradient, *ctx.saved_tensors, ctx.outputs)
    return for_x, None, None, for_queue, None


_product_of_graph.register_autograd(_differentiate_product, setup_context=_save_product)

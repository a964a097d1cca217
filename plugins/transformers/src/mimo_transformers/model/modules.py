"""What takes the place of the library's modules inside of its models: parallel ones, which draw their own values.

Shapes: T rows, H hidden, I inputs, O outputs; the library puts a dim of 1 before T.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import PluginError
from mimo.model.runtime import Embedding, Linear, TensorAxis

_DRAWING = "_mimo_drawing"
"""Attribute of a module of the library: what draws its initial values."""
Draw = Callable[[nn.Module], None]
"""Draws the initial values of the parameters that a module of the library itself holds."""


@attrs.frozen(kw_only=True)
class Published:
    """A parameter of the library's model, or what is ours of it.

    Args:
        name: of the library's parameter.
        half: which half of its outputs, dim 1 of those of experts, is ours; None for all.
        transposed: whether inputs lie before outputs there, in the last two dims.
    """

    name: str
    half: int | None = None
    transposed: bool = False

    def view(self, published: Tensor) -> Tensor:
        """Return what is ours of the library's tensor: to read, and to write into."""
        found = published.mT if self.transposed else published
        return found if self.half is None else found.chunk(2, dim=1)[self.half]


@attrs.frozen(kw_only=True)
class Way:
    """How rows go in and out of a linear over tensor ranks.

    Args:
        entering: over which its outputs are cut.
        leaving: over which its inputs are cut.
        collected_outputs: how many outputs there are, where all are brought together again on every rank.
        takes_its_inputs: whether every rank has all inputs, and takes its own of them.
        sharing: which the last outputs go to the cut work of, where the linear itself isn't cut.
        shared_outputs: how many these are.
    """

    entering: TensorAxis = attrs.field(factory=TensorAxis.single)
    leaving: TensorAxis = attrs.field(factory=TensorAxis.single)
    collected_outputs: int = 0
    takes_its_inputs: bool = False
    sharing: TensorAxis = attrs.field(factory=TensorAxis.single)
    shared_outputs: int = 0


class BridgedLinear(Linear):
    """A linear layer in the place of an ``nn.Linear`` of the library.

    Attributes:
        way: how rows go in and out of it over tensor ranks; set by a tensor plan.
    """

    def __init__(self, replaced: nn.Linear, draw: Draw) -> None:
        self._draw = draw
        super().__init__(replaced.in_features, replaced.out_features, bias=replaced.bias is not None)
        self.way = Way()

    def reset_parameters(self) -> None:
        """Draw weight and bias as the library does."""
        plain = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=self.bias is not None, device="meta")
        vars(plain)["_parameters"] = {"weight": self.weight, "bias": self.bias}
        draw_all(plain, self._draw)

    def forward(self, x: Tensor, *, leave: TensorAxis | None = None) -> Tensor:
        """Return [..., O] of ``x`` [..., I]."""
        assert leave is None, "a tensor plan says where its sums leave"
        way = self.way
        if way.takes_its_inputs:
            x = _columns(x, way.leaving.share_out)
        y = super().forward(way.entering.enter(x), leave=way.leaving)
        if way.collected_outputs:
            y = _columns(y, lambda mine: way.entering.collect(mine, way.collected_outputs))
        if way.shared_outputs:
            own, shared = y.split([y.shape[-1] - way.shared_outputs, way.shared_outputs], dim=-1)
            y = torch.cat((own, way.sharing.enter(shared)), -1)
        return y


def _columns(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what ``change``, which works on the first dim, makes of the last one."""
    return change(x.movedim(-1, 0)).movedim(0, -1)


class BridgedEmbedding(Embedding):
    """The input embedding, its rows looked up here, and finished by the library's class: scaled, for example."""

    def __init__(self, replaced: nn.Embedding, draw: Draw) -> None:
        self._draw, self._replaced = draw, (without_contents(replaced),)
        super().__init__(replaced.num_embeddings, replaced.embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the rows as the library does."""
        plain = copy.copy(self._replaced[0])
        vars(plain)["_parameters"] = {"weight": self.weight}
        draw_all(plain, self._draw)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [T, H] of ``ids`` [T]."""
        found, (replaced,) = super().forward(ids), self._replaced
        if replaced.padding_idx is not None:  # whose row takes no gradient in the library
            found = torch.where((ids == replaced.padding_idx).unsqueeze(1), found.detach(), found)
        if type(replaced).forward is nn.Embedding.forward:
            return found
        finishing = copy.copy(replaced)
        vars(finishing)["_parameters"] = {"weight": found}  # read like a parameter
        finishing.padding_idx = None
        return cast("Tensor", finishing(torch.arange(len(ids), device=ids.device)))


def without_contents(module: nn.Module) -> Any:
    """Return a copy of a module that has its plain attributes, and neither parameters nor buffers nor parts."""
    shell = copy.copy(module)
    buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if not buffer.is_meta}
    vars(shell).update(_parameters={}, _modules={}, _buffers=buffers)
    return shell


def turns_by_grids(network: Any) -> bool:
    """Tell whether rows of a model turn by three positions, in time, down and across."""
    return any(getattr(part, "mrope_section", None) for part in network.modules())


Constant = Callable[[str], "float | None"]
"""Of what the library leaves as it was constructed, the number that it holds everywhere; None if there is none."""


def _no_constant(_leaf: str) -> None:
    return None


def draw_all(module: nn.Module, draw: Draw, constant: Constant = _no_constant) -> None:
    """Draw the parameters that a module itself holds.

    Raises:
        PluginError: the library leaves some of them as they are, and they aren't constant.
    """
    _fill(module, dict(module.named_parameters(recurse=False, remove_duplicate=False)), draw, constant)


def fill_buffers(module: nn.Module, draw: Draw, constant: Constant = _no_constant) -> None:
    """Give the buffers that a module itself holds their values, where it was built without storage.

    Raises:
        PluginError: the library leaves some of them as they are, and they aren't constant.
    """
    empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
    for name in empty:
        persistent = name not in module._non_persistent_buffers_set  # noqa: SLF001 - PyTorch says it nowhere else
        module.register_buffer(name, torch.zeros_like(module.get_buffer(name), device="cpu"), persistent=persistent)
    if empty:
        with torch.device("cpu"):
            _fill(module, {name: module.get_buffer(name) for name in empty}, draw, constant)


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], draw: Draw, constant: Constant) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    draw(module)
    left = []
    for name in tensors:
        tensor = getattr(module, name)
        if tensor.is_meta or not bool(tensor.isnan().any()):
            continue
        if (value := constant(name)) is None:
            left.append(name)
        else:
            nn.init.constant_(tensor, value)
    if left:
        raise PluginError(
            "modules.language.config.model_type",
            expected="initial values of every parameter from transformers",
            got=f"none for {', '.join(left)} of {type(module).__name__}",
            fix="plugins/transformers/README.md lists the families that can be trained.",
        )


def draws_by_itself(part: nn.Module, draw: Draw, constant: Constant) -> None:
    """Have a module of the library draw its own initial values, as `build_part` wants it."""
    vars(part)[_DRAWING] = partial(draw_all, draw=draw, constant=constant)
    part.__class__ = _drawing(cast("Any", type(part)))


@cache
def _drawing(original: type[Any]) -> type[nn.Module]:
    """Return one class for all layers, as compiled ones share their graph by it."""

    def reset_parameters(self: nn.Module) -> None:
        vars(self)[_DRAWING](self)

    return type(original.__name__, (original,), {"reset_parameters": reset_parameters})

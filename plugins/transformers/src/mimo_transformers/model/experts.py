"""Experts in the place of the library's: the same function of each, their rows sent to the ranks that hold them.

Shapes: T rows, n of them routed here, R that this rank's experts take, H hidden, I inner width, E experts, k chosen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mimo.model.runtime import Dispatch, DrawKeys, Drawn, ExpertAxis, GroupedLinear, Moe, TensorAxis
from mimo_transformers.model.attention import held_rows
from mimo_transformers.model.modules import Draw, Published, draw_all, without_contents

_FORM = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What the library's classes of experts say of themselves."""


def is_experts(module: nn.Module) -> bool:
    """Tell whether a module of the library holds experts in the form that `BridgedExperts` knows."""
    return all(hasattr(module, name) for name in _FORM) and not getattr(module, "has_post_expert_norm", False)


class BridgedExperts(nn.Module):
    """The experts of one layer, in the place of a module of the library.

    Attributes:
        axis: over which they are spread, and the width inside each is cut; set by an expert plan.
        tensor: over which rows are shared out before they are sent, set by a tensor plan.
        layer: number of the layer, where what its router decides is taken down.
        draw_keys: by which what is added to its linears draws at random.
    """

    stays_eager = Moe.stays_eager

    def __init__(self, replaced: Any, draw: Draw) -> None:
        super().__init__()
        self.count = int(replaced.num_experts)
        if not replaced.has_gate:
            self.up = BridgedGroupedLinear(replaced, "up_proj", draw)
        elif replaced.is_concatenated:
            self.gate = BridgedGroupedLinear(replaced, "gate_up_proj", draw, half=0)
            self.up = BridgedGroupedLinear(replaced, "gate_up_proj", draw, half=1)
        else:  # each gate beside what it is the gate of, so that they stay together when the width is cut
            self.gate_up = BridgedGroupedLinear(replaced, "gate_up_proj", draw)
        self.down = BridgedGroupedLinear(replaced, "down_proj", draw)
        self.axis, self.tensor = ExpertAxis.single(), TensorAxis.single()
        self.layer: int | None = None
        self.draw_keys = DrawKeys()
        self._replaced = (_without_parameters(replaced),)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, H] of ``hidden_states`` [T, H]: the sum of what the chosen [T, k] make of it, weighted [T, k]."""
        rows = held_rows(self)
        if rows is not None and rows.record is not None:
            rows.record.chosen[self] = top_k_index.shape[1]
            return torch.zeros_like(hidden_states)
        if rows is not None and rows.routed is not None and self.layer is not None:
            rows.routed[self.layer].chosen = (top_k_index, top_k_weights.detach())
        total, share = len(hidden_states), self.tensor.share_out
        span = self.tensor.span(total)
        x, weights = share(hidden_states), share(top_k_weights)
        chosen = top_k_index[span.start : span.stop]
        dispatch = Dispatch.of(chosen, experts=self.count, axis=self.axis)
        sent, counts = dispatch.send(x), dispatch.counts
        with self.draw_keys.at(self.draw_keys.some(slice(span.start, span.stop))):
            drawn = self._sent_keys(dispatch, chosen)
        with self.draw_keys.at(drawn):
            finished = cast("Tensor", self.down(self._activated(sent, counts), counts))
        made = dispatch.bring(finished)  # [n, k, H]
        return self.tensor.collect((made * weights.unsqueeze(2)).sum(1).to(x.dtype), total)

    def _sent_keys(self, dispatch: Dispatch, chosen: Tensor) -> Drawn:
        """Return the keys of the rows that this rank's experts take, if something draws by them."""
        keys, linears = self.draw_keys, (part for part in self.children() if isinstance(part, GroupedLinear))
        return keys.sent(dispatch, chosen) if any(part.draws for part in linears) else keys.on(None)

    def _activated(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return [R, I] of ``rows`` [R, H], as the library's class makes it of its first product."""
        (replaced,) = self._replaced
        if not replaced.has_gate:
            return cast("Tensor", replaced.act_fn(self.up(rows, counts)))
        if replaced.is_concatenated:
            both = torch.cat((self.gate(rows, counts), self.up(rows, counts)), 1)
        else:
            both = self.gate_up(rows, counts)
        return cast("Tensor", replaced._apply_gate(both))  # noqa: SLF001 - what the library's own products go through


class BridgedGroupedLinear(GroupedLinear):
    """One linear of each expert, in the place of a parameter of the library, or of half of one.

    Attributes:
        published: where each parameter lies in the library's.
    """

    def __init__(self, replaced: Any, name: str, draw: Draw, *, half: int | None = None) -> None:
        self._draw = draw
        self._replaced = (_without_parameters(replaced),)
        self._shapes = {path: parameter.shape for path, parameter in replaced.named_parameters(recurse=False)}
        self.published = {
            "weight": Published(name=name, half=half, transposed=replaced.is_transposed),
            "bias": Published(name=f"{name}_bias", half=half),
        }
        outputs, inputs = self.published["weight"].view(replaced.get_parameter(name)).shape[1:]
        super().__init__(int(replaced.num_experts), inputs, outputs, bias=bool(replaced.has_bias))

    def reset_parameters(self) -> None:
        """Draw as the library does."""
        whole = copy.copy(self._replaced[0])
        device, dtype = self.weight.device, self.weight.dtype
        drawn = {
            name: nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for name, shape in self._shapes.items()
        }
        vars(whole)["_parameters"] = drawn
        draw_all(whole, self._draw)
        with torch.no_grad():
            for leaf, parameter in self.named_parameters(recurse=False):
                published = self.published[leaf]
                parameter.copy_(published.view(drawn[published.name]))


def _without_parameters(module: nn.Module) -> Any:
    """Return a copy of a module that keeps its functions, such as activations, and nothing that is learnt."""
    shell = without_contents(module)
    vars(shell)["_modules"] = dict(vars(module)["_modules"])
    return shell

"""What the library's layers are here: each hands the packed rows on to all of its parts, whatever its forward passes.

A part that mixes rows by itself runs on one sample after the other. Shapes: T rows, H hidden; the library puts a dim of
1 before rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mimo_transformers.model.attention import CarriedRows, PackedRows, hold_rows, hold_together
from mimo_transformers.model.per_sample import mix_in, run_per_sample

_NEXT = "_mimo_next_rows"
"""Attribute of a layer: the rows of the forward that is about to call it."""
LAYER_ROWS = "mimo_rows"
"""Keyword argument of a layer's forward that carries them; recomputing gives it again."""


class BridgedLayer(nn.Module):
    """Mixed into the class of a layer of the library: its parts know the packed rows while it runs."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Run it on the rows of the forward that calls it."""
        return super().__call__(*given, **{LAYER_ROWS: vars(self)[_NEXT], **named})

    def forward(self, *given: Any, mimo_rows: PackedRows | CarriedRows, **named: Any) -> Any:
        """Return what the library's layer does."""
        with hold_rows(self, mimo_rows):
            return super().forward(*given, **named)


class Reading(nn.Module):
    """Mixed into the class of a part of a layer that reads numbers of tensors, which no graph does."""

    stays_eager = "it reads numbers, on which its steps depend"


class LayerStandIn(BridgedLayer):
    """Mixed into the class of a layer that another stage holds: it keeps its plain attributes, and computes nothing.

    Attributes:
        resumes: whether the rows of the stage before take the place of its input: it is the last layer before ours.
        finishes: whether its input is the result of this stage: it is the first layer after ours.
        returns: how long a tuple the library's layer returns, 0 for none.
    """

    resumes: bool
    finishes: bool
    returns: int

    def forward(self, *given: Any, mimo_rows: PackedRows | CarriedRows, **named: Any) -> Any:
        """Return the rows [1, T, H] that come in, or those of the stage before."""
        assert isinstance(mimo_rows, PackedRows), "nobody compiles it"
        hidden: Tensor = given[0] if given else next(one for one in named.values() if isinstance(one, Tensor))
        if self.resumes:
            assert mimo_rows.resumed is not None
            hidden = mimo_rows.resumed
        if self.finishes:
            mimo_rows.result = hidden.squeeze(0)
        return (hidden, *[None] * (self.returns - 1)) if self.returns else hidden


class Passing(nn.Module):
    """In the place of a module that another stage holds: returns rows as they come, and zeros where there are none."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, x: Tensor, *_given: Any, **_named: Any) -> Tensor:
        """Return ``x`` [1, T, H]; zeros for ids [1, T]."""
        return x if x.is_floating_point() else torch.zeros(*x.shape, self.hidden, device=x.device)


def bridge_layers(
    layers: Iterable[nn.Module],
    mixers: Mapping[type[nn.Module], str],
    reading: Collection[type[nn.Module]] = (),
) -> None:
    """Make layers of the library `BridgedLayer`, what mixes rows in them `PerSample`, and what reads numbers `Reading`.

    Args:
        layers: in order.
        mixers: by class of what does, the argument that is given its states, or nothing.
        reading: classes of what does.
    """
    for index, layer in enumerate(layers):
        for path, part in layer.named_modules():
            if type(part) in mixers:
                run_per_sample(part, path=f"{index}.{path}", takes_states=mixers[type(part)])
            elif type(part) in reading:
                mix_in(part, Reading)
        mix_in(layer, BridgedLayer)
        hold_together(layer)


def stand_in(layer: nn.Module, *, resumes: bool, finishes: bool, returns: int) -> None:
    """Make a layer of the library a `LayerStandIn`, without parameters or parts."""
    mix_in(layer, LayerStandIn)
    vars(layer).update(_parameters={}, _buffers={}, _modules={}, resumes=resumes, finishes=finishes, returns=returns)


@contextmanager
def about_to_run(layers: Iterable[nn.Module], rows: PackedRows) -> Iterator[None]:
    """Have layers run on these rows if they are called within."""
    for layer in layers:
        vars(layer)[_NEXT] = rows
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)[_NEXT] = None

"""What a plugin registers for an encoder of the shared layers: `mimo.model.runtime.PackedEncoder`. Free of torch.

Five of `EncoderSpec`'s optional supports are the same for all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from mimo.model.spec import ContextSupport, EncoderSeam, EncoderStages, Methods, Side, Stage, TensorSupport

if TYPE_CHECKING:
    from torch import nn

    from mimo.model.parallel import ContextAxis, Split, TensorAxis


def packed_tensor(divisible: Callable[[Any], Mapping[str, int]]) -> TensorSupport:
    """Return the support for tensor ranks; ``divisible`` as for `TensorSupport`."""
    return TensorSupport(divisible=divisible, plan=_plan, splits_rows=True)


def packed_context() -> ContextSupport:
    """Return the support for context ranks."""
    return ContextSupport(attach=_attach)


def packed_stages(message_rows: Callable[[Any, tuple[int, ...]], int]) -> EncoderStages:
    """Return the support for pipeline stages of an encoder whose settings have ``layers`` and ``width``.

    Its parts are ``encoder`` and, on the last stage, ``projector``; ``message_rows`` as for `EncoderStages`.
    """
    return EncoderStages(
        layers=lambda config: int(config.layers),
        message_rows=message_rows,
        width=lambda config: int(config.width),
        cut=_cut,
        parts=lambda _config, stage: frozenset({"encoder", "projector"} if stage.is_last else {"encoder"}),
    )


def packed_seam(rows: Callable[[Any, tuple[int, ...]], int]) -> EncoderSeam:
    """Return the seam behind the layers, and the norm that follows them, of an encoder with settings as there.

    What it sends are the rows of its stages: ``rows`` is the ``message_rows`` of `packed_stages`.
    """
    return EncoderSeam(rows=rows, width=lambda config: int(config.width), cut=_divide)


def packed_recompute() -> Mapping[str, Methods]:
    """Return the support for recomputation: of each layer, or of what is cheap between its products."""
    return {"full": _layers, "selective": _middles}


def _plan(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo.model.encoder.layers import split_encoder

    return split_encoder(module, axis)


def _attach(module: nn.Module, context: ContextAxis) -> None:
    from mimo.model.encoder.layers import PackedEncoder

    assert isinstance(module, PackedEncoder)
    module.rows = attrs.evolve(module.rows, context=context)


def _cut(module: nn.Module, stage: Stage) -> nn.Module:
    from mimo.model.encoder.layers import PackedEncoder

    assert isinstance(module, PackedEncoder)
    module.cut(stage)
    return module


def _divide(module: nn.Module, side: Side) -> nn.Module:
    from mimo.model.encoder.layers import PackedEncoder

    assert isinstance(module, PackedEncoder)
    module.divide(side)
    return module


def _layers(module: nn.Module) -> list[Callable[..., Any]]:
    from mimo.model.encoder.layers import EncoderLayer

    return [part.forward for part in module.modules() if isinstance(part, EncoderLayer)]


def _middles(module: nn.Module) -> list[Callable[..., Any]]:
    """Return what of the layers saves much and is cheap to compute again: what lies between their products."""
    from mimo.model.encoder.layers import EncoderLayer

    layers = (part for part in module.modules() if isinstance(part, EncoderLayer))
    return [middle.finish for layer in layers for middle in (layer.attention, layer.mlp)]

"""The generator ``flow`` and how it registers. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mimo.hooks import hookimpl
from mimo.model import ContextSupport, GeneratorSpec, GeneratorStages, Stage, TensorSupport
from mimo_generator_flow._config import FlowConfig, message_rows
from mimo_generator_flow._work import flow_work

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from mimo.model.runtime import ContextAxis, Split, TensorAxis


def _prepare(config: FlowConfig, raw: Any) -> Mapping[str, Tensor]:
    from mimo_generator_flow._pictures import to_pixels

    return {"pixels": to_pixels(config, raw)}


def _build(config: FlowConfig, hidden: int) -> nn.Module:
    from mimo_generator_flow._model import FlowTransformer

    return FlowTransformer(config, hidden)


def _generate(
    module: nn.Module, config: FlowConfig, rows: Tensor, spans: Sequence[tuple[int, int]], keys: Tensor
) -> Sequence[Any]:
    from mimo_generator_flow._generate import generate

    return generate(module, config, rows, spans, keys)


def _save(raw: Any, path: Path) -> Path:
    from mimo_generator_flow._pictures import save_image

    return save_image(raw, path)


def _plan(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo.model.runtime import split_blocks
    from mimo_generator_flow._model import FlowTransformer

    assert isinstance(module, FlowTransformer)
    module.rows = attrs.evolve(module.rows, axis=axis)
    return split_blocks(module, axis)


def _attach(module: nn.Module, context: ContextAxis) -> None:
    from mimo_generator_flow._model import FlowTransformer

    assert isinstance(module, FlowTransformer)
    module.rows = attrs.evolve(module.rows, context=context)


def _cut(module: nn.Module, stage: Stage) -> nn.Module:
    from mimo_generator_flow._model import FlowTransformer

    assert isinstance(module, FlowTransformer)
    module.cut(stage)
    return module


def _parts(_config: FlowConfig, stage: Stage) -> frozenset[str]:
    return frozenset({"connector", "generator"} if stage.is_first else {"generator"})


def _layers(module: nn.Module) -> list[Callable[..., Any]]:
    from mimo_generator_flow._model import FlowLayer

    return [part.forward for part in module.modules() if isinstance(part, FlowLayer)]


def _blank(size: tuple[int, ...]) -> Any:
    """Return a black picture of so many pixels down and across."""
    from PIL import Image

    height, width = size
    return Image.new("L", (width, height))


def _examples(_config: FlowConfig) -> list[Any]:
    """Return pictures of unlike sizes, one of them grey: a slope of brightness, a disc of light, one colour."""
    from PIL import Image

    return [
        Image.linear_gradient("L").resize((24, 16)),
        Image.merge("RGB", [Image.radial_gradient("L").resize((20, 20))] * 3),
        Image.new("RGB", (9, 15), "teal"),
    ]


FLOW = GeneratorSpec(
    name="flow",
    config=FlowConfig,
    measure=lambda raw: (raw.height, raw.width),
    targets=lambda config, _size: config.targets,
    prepare=_prepare,
    build=_build,
    reads=lambda config: config.reads,
    rows=lambda config: config.queries,
    generate=_generate,
    save=_save,
    parts={"connector": ("connector",), "generator": ("patch", "time", "layers", "modulation", "output")},
    tensor=TensorSupport(divisible=lambda config: {"heads": config.heads}, plan=_plan, splits_rows=True),
    context=ContextSupport(attach=_attach),
    stages=GeneratorStages(
        layers=lambda config: config.layers,
        message_rows=lambda config, _size, rows: message_rows(config, rows),
        width=lambda config: config.hidden,
        cut=_cut,
        parts=_parts,
    ),
    recompute={"full": _layers},
    flops=flow_work,
    examples=_examples,
    blank=_blank,
)


@hookimpl
def mimo_register_generators() -> list[GeneratorSpec]:
    """Register ``flow``."""
    return [FLOW]

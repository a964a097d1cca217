"""What a plugin registers for a language model of the shared parts, a `mimo.model.runtime.LanguageStage`.

How its stages lie over tensor, context and expert ranks, and what recomputation repeats. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mimo.model.spec import ContextSupport, ExpertSupport, Methods, TensorSupport

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mimo.model.parallel import ContextAxis, ExpertAxis, Split, TensorAxis


def stage_tensor(divisible: Callable[[Any], Mapping[str, int]]) -> TensorSupport:
    """Return the support for tensor ranks; ``divisible`` as for `TensorSupport`."""
    return TensorSupport(divisible=divisible, plan=_split, splits_rows=True)


def stage_context() -> ContextSupport:
    """Return the support for context ranks."""
    return ContextSupport(attach=_attach)


def stage_experts(count: Callable[[Any], int]) -> ExpertSupport:
    """Return the support for expert ranks; ``count`` as for `ExpertSupport`."""
    return ExpertSupport(count=count, plan=_split_experts, after_step=_after_step)


def stage_recompute() -> Mapping[str, Methods]:
    """Return the support for recomputation: of each layer, or of what is cheap between its products."""
    return {"full": _layers, "selective": _cheap}


def _split(module: nn.Module, axis: TensorAxis) -> Mapping[str, Split]:
    from mimo.model.language import split_stage

    return split_stage(module, axis)


def _attach(module: nn.Module, context: ContextAxis) -> None:
    from mimo.model.language import LanguageStage

    assert isinstance(module, LanguageStage)
    module.context = context


def _split_experts(module: nn.Module, axis: ExpertAxis) -> Mapping[str, Split]:
    from mimo.model.language import split_experts

    return split_experts(module, axis)


def _after_step(module: nn.Module, counts: Mapping[str, Tensor]) -> None:
    from mimo.model.language import follow_loads

    follow_loads(module, counts)


def _layers(module: nn.Module) -> list[Callable[..., Any]]:
    from mimo.model.language import LanguageStage, MtpModule

    assert isinstance(module, LanguageStage)
    heads = [head for head in module.next_tokens.values() if isinstance(head, MtpModule)]
    mtp_layers = [layer for head in heads for layer in head.layers.values()]
    return [layer.forward for layer in (*module.layers.values(), *mtp_layers)]


def _cheap(module: nn.Module) -> list[Callable[..., Any]]:
    """Return what saves much and is cheap to compute again (Korthikanti et al. 2022, arXiv:2205.05198, section 5).

    Attention between its products (as there), and likewise the feed-forward parts between theirs, those of experts
    too. No product is repeated; neither is routing, nor a message of experts.
    """
    from mimo.model.language import Attention, Experts, Mlp

    return [part.finish for part in module.modules() if isinstance(part, Attention | Experts | Mlp)]

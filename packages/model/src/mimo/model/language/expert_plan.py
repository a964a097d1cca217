"""How a language model's experts lie on the expert view of a grid, and how its routers follow their load.

Experts are spread over ``ep``; over ``etp`` the width inside each is cut, as tensor ranks cut that of a dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mimo.model.language.moe import Experts, Moe
from mimo.model.language.stage import LanguageStage
from mimo.model.parallel import ExpertAxis, Split
from mimo.model.spec import load_name

OUTPUTS = 1
"""Dim of a weight [E, O, I] that is cut where the outputs are the inner width."""
INPUTS = 2
"""The same where the inputs are."""


def split_experts(module: nn.Module, axis: ExpertAxis) -> dict[str, Split]:
    """Hand ``axis`` to the parts of a stage that use it, and return how its experts are split."""
    assert isinstance(module, LanguageStage)
    module.expert_axis = axis
    splits: dict[str, Split] = {}
    for path, part in module.named_modules():
        if isinstance(part, Experts):
            part.axis = axis
            made = ("up",) if part.gate is None else ("gate", "up")
            splits |= {f"{path}.{name}.weight": Split(OUTPUTS, experts=True) for name in made}
            splits[f"{path}.down.weight"] = Split(INPUTS, experts=True)
    return splits


def follow_loads(module: nn.Module, counts: Mapping[str, Tensor]) -> None:
    """Move the biases of a stage's routers by the loads of the step, summed over all ranks; frozen routers stay."""
    assert isinstance(module, LanguageStage)
    for path, part in module.named_modules() if counts else ():
        if isinstance(part, Moe) and part.bias_rate and part.router.weight.requires_grad:
            layer, _, _ = path.rpartition(".")
            part.router.follow(counts[load_name(layer)], part.bias_rate)

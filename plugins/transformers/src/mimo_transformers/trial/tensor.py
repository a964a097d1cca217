"""How a stage of a language model lies over tensor and expert ranks, by what was tried on a small model of it."""

from __future__ import annotations

from functools import cache

import attrs
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo.model import Stage
from mimo.model.runtime import AuxLosses, ExpertAxis, Split, TensorAxis
from mimo_transformers.family import HfDecoderConfig
from mimo_transformers.model.experts import BridgedExperts
from mimo_transformers.model.mixing import mixing
from mimo_transformers.model.per_sample import PerSample
from mimo_transformers.model.small import batch_of, described, draw_ids, small_config, stirred, trying
from mimo_transformers.model.stage import HfStage
from mimo_transformers.trial.packed import draw_in
from mimo_transformers.trial.record import recall
from mimo_transformers.trial.tensor_plan import Heads, TensorPlan, plans, split_experts, split_layers
from mimo_transformers.trial.threads import ThreadExpertAxis
from mimo_transformers.trial.two_ranks import PLAN, find_plan, right_plan, try_plan


def tensor_splits(stage: HfStage, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to a stage, and return how its parameters lie by `plan_of` its family."""
    if axis.size == 1:
        return {}
    heads = _heads(stage.config)
    try:
        plan = plan_of(stage.config, shared=heads.are_shared(axis))
    except ConfigError as error:
        where = f"modules.language.{error.where}"
        raise ConfigError(where, expected=error.expected, got=error.got, fix=error.fix) from error
    return split_layers(stage, axis, plan, heads=heads)


def plan_of(config: HfDecoderConfig, *, shared: bool) -> TensorPlan:
    """Return the plan that was found right for a family.

    Args:
        config: of it.
        shared: whether there are too few heads of keys and values to be cut.

    Raises:
        ConfigError: there is none.
    """
    plan = _plan_of(described(config, **({"num_key_value_heads": 1} if shared else {})))
    return right_plan(plan, config.model_type)


def expert_splits(stage: HfStage, axis: ExpertAxis) -> dict[str, Split]:
    """Hand ``axis`` to a stage, and return how its experts lie.

    Raises:
        ConfigError: it has several ranks, and the family's experts are of a form of their own.
    """
    if axis.size > 1 and not _has_known_experts(described(stage.config)):
        raise ConfigError(
            "modules.language." + ("ep" if axis.ep > 1 else "etp"),
            expected="1, since the experts of this model are of a form that isn't known here",
            got=f"{axis.ep if axis.ep > 1 else axis.etp} and {stage.config.model_type!r}",
            fix="Leave ep and etp out; any number of lanes (dp), stages (pp) and context ranks (cp) works.",
        )
    return split_experts(stage, axis)


@cache
def _has_known_experts(description: str) -> bool:
    with trying():
        stage = HfStage(small_config(description), Stage())
    inside = {one for part in stage.modules() if isinstance(part, PerSample) for one in part.modules()}
    return any(isinstance(part, BridgedExperts) and part not in inside for part in stage.modules())


@cache
def _plan_of(description: str) -> TensorPlan | str:
    """Return the first plan that is right for a small model, or what is wrong with the first."""
    return recall("packed rows plan", description, lambda: try_plan(lambda: _find_plan(description)), PLAN)


def _find_plan(description: str) -> TensorPlan | str:
    config = small_config(description)
    network, batch = stirred(config), batch_of(draw_ids(config))

    def filled() -> HfStage:
        stage = HfStage(config, Stage())
        stage.read(network)
        return stage

    def run(stage: nn.Module) -> Tensor:
        assert isinstance(stage, HfStage)
        given = attrs.evolve(batch, aux_losses=AuxLosses())
        with draw_in(stage, given):  # where features are cut that are dropped, the loss is another
            loss = stage.losses(stage(given, {}, None), given.labels).sum()
        for part in given.aux_losses.losses.values():  # of which each rank has its own, and learns from that
            loss = loss + part + stage.axis.total(part.detach()) - part.detach()
        return loss

    def split(stage: nn.Module, axis: TensorAxis, plan: TensorPlan) -> dict[str, Split]:
        assert isinstance(stage, HfStage)
        splits = split_layers(stage, axis, plan, heads=_heads(config))
        return splits | split_experts(stage, ThreadExpertAxis(tensor=axis))

    found = plans(config.library(), filled().layers_path)
    if mixing(description).parts:
        found = (each for plan in found for each in (plan, attrs.evolve(plan, cuts_mixers=False)))
    return find_plan(filled, run, split, found)


def _heads(config: HfDecoderConfig) -> Heads:
    library = config.library()
    count, key_value = getattr(library, "num_attention_heads", 0), getattr(library, "num_key_value_heads", None)
    turned = getattr(library, "qk_rope_head_dim", None) or 0
    if turned or not key_value or key_value == count:  # latent attention makes as many keys as there are queries
        return Heads(turned=int(turned))
    return Heads(count=int(count), key_value=int(key_value))


def has_few_keys(config: HfDecoderConfig) -> bool:
    """Tell whether no two ranks can share out the heads of keys and values."""
    heads = _heads(config)
    return bool(heads.count and heads.key_value % 2)

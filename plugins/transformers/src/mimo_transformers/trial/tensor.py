"""Which tensor plan of a family is right, tried on a small model of it: two ranks against one, gradients included."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo.model import Stage
from mimo.model.runtime import ExpertAxis, LanguageBatch, Split, TensorAxis
from mimo_transformers.family import HfDecoderConfig
from mimo_transformers.model.experts import BridgedExperts
from mimo_transformers.model.small import batch_of, described, draw_ids, general, small_config, stirred, trying
from mimo_transformers.model.stage import HfStage
from mimo_transformers.trial.tensor_plan import TensorPlan, plans, split_experts, split_layers
from mimo_transformers.trial.threads import ThreadAxis, on_threads

_RANKS = 2
_TOLERANCE = 1e-5
_SMALL_GRADIENT = 1e-3
"""Share of the whole gradient's norm below which a parameter's is compared with that share instead of itself."""


def tensor_splits(stage: HfStage, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to a stage, and return how its parameters lie by the plan that was found right for its family.

    Raises:
        ConfigError: there is none.
    """
    if axis.size == 1:
        return {}
    plan = _plan_of(described(stage.config))
    if isinstance(plan, str):
        raise ConfigError(
            "modules.language.tp",
            expected="1, since no tensor plan of this model computes what one process does",
            got=f"{axis.size} and {stage.config.model_type!r}, of which {plan}",
            fix="Leave tp out; any number of lanes (dp), stages (pp) and context ranks (cp) works.",
        )
    return split_layers(stage, axis, plan, shared_outputs=_shared_outputs(stage.config))


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
    return any(isinstance(part, BridgedExperts) for part in stage.modules())


@attrs.frozen(kw_only=True)
class _Gradients:
    """Those of one rank by path, pieces where parameters are cut, and how they are cut."""

    loss: float
    found: dict[str, Tensor]
    splits: dict[str, Split]


@cache
def _plan_of(description: str) -> TensorPlan | str:
    """Return the first plan that is right for a small model, or what is wrong with the first."""
    with trying():
        config = small_config(description)
        network, batch = stirred(config), batch_of(draw_ids(config))

        def filled() -> HfStage:
            stage = HfStage(config, Stage())
            stage.read(network)
            return stage

        whole, problem = _gradients(filled(), batch, {}), ""
        for plan in plans(config.library(), filled().layers_path):
            acts = [partial(_on_rank, filled(), batch, plan) for _ in range(_RANKS)]
            try:
                return attrs.evolve(plan, summed=frozenset(_summed(whole, on_threads(acts))))
            except _WrongError as error:
                problem = problem or str(error)
            except Exception as error:  # noqa: BLE001 - whatever a model of the library does when it is cut
                problem = problem or f"a small one fails with {type(error).__name__}: {error}"
        return problem


class _WrongError(Exception):
    """A plan computes something else than one process."""


def _on_rank(stage: HfStage, batch: LanguageBatch, plan: TensorPlan, axis: ThreadAxis) -> _Gradients:
    splits = split_layers(stage, axis, plan, shared_outputs=_shared_outputs(stage.config))
    splits |= split_experts(stage, ExpertAxis.single())
    for path, parameter in list(stage.named_parameters()):
        owner, _, leaf = path.rpartition(".")
        split = splits.get(path, Split())
        piece = split.piece(parameter.detach(), stage.expert_axis if split.experts else axis)
        stage.get_submodule(owner).register_parameter(
            leaf, nn.Parameter(piece.clone(), requires_grad=parameter.requires_grad)
        )
    return _gradients(stage, batch, splits)


def _gradients(stage: HfStage, batch: LanguageBatch, splits: dict[str, Split]) -> _Gradients:
    with torch.enable_grad():
        loss = stage.losses(stage(batch, {}, None), batch.labels).sum()
        loss.backward()
    found = {
        path: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for path, parameter in stage.named_parameters()
    }
    return _Gradients(loss=loss.item(), found=found, splits=splits)


def _summed(whole: _Gradients, ranks: list[_Gradients]) -> Iterator[str]:
    """Yield the paths of copied parameters whose gradient is the sum of the ranks'.

    Raises:
        _WrongError: a gradient isn't that of one process, whether taken as it is or summed.
    """
    if any(abs(rank.loss - whole.loss) > _TOLERANCE * abs(whole.loss) for rank in ranks):
        raise _WrongError(f"the loss of a small one on {len(ranks)} ranks is {ranks[0].loss}, and {whole.loss} on one")
    floor = _SMALL_GRADIENT * float(torch.stack([one.norm() for one in whole.found.values()]).norm())
    for path, wanted in whole.found.items():
        split, pieces = ranks[0].splits.get(path, Split()), [rank.found[path] for rank in ranks]
        bound = _TOLERANCE * max(float(wanted.norm()), floor)

        def fits(*found: Tensor, wanted: Tensor = wanted, bound: float = bound) -> bool:
            return all(one.shape == wanted.shape and float((one - wanted).norm()) <= bound for one in found)

        if split.experts:  # each rank routes rows of its own
            right = fits(sum(pieces[1:], pieces[0]))
        elif split.dim is not None:
            right = fits(torch.cat(pieces, split.dim))
        elif fits(*pieces):
            right = True
        elif right := fits(sum(pieces[1:], pieces[0])):
            yield general(path.split(".", 2)[2])
        if not right:
            raise _WrongError(f"the gradient of {path} in a small one on {len(ranks)} ranks isn't that on one")


def _shared_outputs(config: HfDecoderConfig) -> int:
    """Return how many outputs of latent attention's first product all heads read: those that positions turn."""
    return int(getattr(config.library(), "qk_rope_head_dim", None) or 0)

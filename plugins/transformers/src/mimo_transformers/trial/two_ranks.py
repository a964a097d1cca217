"""Which tensor plan is right: two ranks against one, gradients included."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, partial

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError, JsonNode
from mimo.model.runtime import ExpertAxis, Split, TensorAxis
from mimo_transformers.model.small import general, trying
from mimo_transformers.trial.record import Form
from mimo_transformers.trial.tensor_plan import TensorPlan
from mimo_transformers.trial.threads import ThreadAxis, on_threads

_RANKS = 2
_TOLERANCE = 1e-5
_STYLE = re.compile("[a-z_]+")
_SMALL_GRADIENT = 1e-3
"""Share of the whole gradient's norm below which a parameter's is compared with that share instead of itself."""
_ROUNDING = 5
"""Two ranks round otherwise than one: by so many times what changes where each parameter begins as the next number."""
_MOST_ROUNDING = 1e-3
"""What is further off is wrong, however much of a model rounding changes."""


def find_plan(
    make: Callable[[], nn.Module],
    run: Callable[[nn.Module], Tensor],
    split: Callable[[nn.Module, TensorAxis, TensorPlan], Mapping[str, Split]],
    plans: Iterable[TensorPlan],
) -> TensorPlan | str:
    """Return the first plan that is right, with the copies whose gradients are summed; or what is wrong with the first.

    Args:
        make: makes the module, at full shapes, always with the same values.
        run: computes a loss with it.
        split: hands an axis to a module, and returns how its parameters lie by a plan.
        plans: to try.
    """
    whole, problem = _gradients(make(), run, {}), ""
    truth = _Truth(whole=whole, rounding=cache(partial(_rounding, whole, make, run)))
    for plan in plans:
        acts = [partial(_on_rank, make(), run, split, plan) for _ in range(_RANKS)]
        try:
            return attrs.evolve(plan, summed=frozenset(_summed(truth, on_threads(acts))))
        except _WrongError as error:
            problem = problem or str(error)
        except Exception as error:  # noqa: BLE001 - whatever a model of the library does when it is cut
            problem = problem or f"a small one fails with {type(error).__name__}: {error}"
    return problem


def try_plan(find: Callable[[], TensorPlan | str]) -> TensorPlan | str:
    """Return what a trial of plans finds, made on small models alone."""
    with trying():
        return find()


def right_plan(found: TensorPlan | str, model_type: str) -> TensorPlan:
    """Return what `find_plan` has found of a model.

    Raises:
        ConfigError: no plan, by the key ``tp`` of the module.
    """
    if isinstance(found, str):
        raise ConfigError(
            "tp",
            expected="1, since no tensor plan of this model computes what one process does",
            got=f"more for {model_type!r}, of which {found}",
            fix="Leave tp out; any number of lanes (dp) works.",
        )
    return found


@attrs.frozen(kw_only=True)
class _Gradients:
    """Those of one rank by path, pieces where parameters are cut, and how they are cut."""

    loss: float
    found: Mapping[str, Tensor]
    splits: Mapping[str, Split]


class _WrongError(Exception):
    """A plan computes something else than one process."""


def _on_rank(
    module: nn.Module,
    run: Callable[[nn.Module], Tensor],
    split: Callable[[nn.Module, TensorAxis, TensorPlan], Mapping[str, Split]],
    plan: TensorPlan,
    axis: ThreadAxis,
) -> _Gradients:
    splits = split(module, axis, plan)
    for path, parameter in list(module.named_parameters()):
        owner, _, leaf = path.rpartition(".")
        one = splits.get(path, Split())
        piece = one.piece(parameter.detach(), ExpertAxis.single() if one.experts else axis)
        mine = nn.Parameter(piece.clone(), requires_grad=parameter.requires_grad)
        module.get_submodule(owner).register_parameter(leaf, mine)
    return _gradients(module, run, splits)


def _gradients(module: nn.Module, run: Callable[[nn.Module], Tensor], splits: Mapping[str, Split]) -> _Gradients:
    with torch.enable_grad():
        loss = run(module)
        loss.backward()
    found = {
        path: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for path, parameter in module.named_parameters()
    }
    return _Gradients(loss=loss.item(), found=found, splits=splits)


@attrs.frozen(kw_only=True)
class _Truth:
    """What one process finds, and how far from it two ranks may be.

    Args:
        whole: its gradients.
        rounding: returns by path how far these move where each parameter begins as the next number.
    """

    whole: _Gradients
    rounding: Callable[[], Mapping[str, float]]

    @cached_property
    def floor(self) -> float:
        """What a gradient's norm counts as at least."""
        return _SMALL_GRADIENT * float(torch.stack([one.norm() for one in self.whole.found.values()]).norm())

    def fits(self, path: str, *found: Tensor) -> bool:
        """Whether each of these is the gradient of a parameter."""
        wanted = self.whole.found[path]
        if any(one.shape != wanted.shape for one in found):
            return False
        off, size = max(float((one - wanted).norm()) for one in found), max(float(wanted.norm()), self.floor)
        if off <= _TOLERANCE * size:
            return True
        return off <= _MOST_ROUNDING * size and off <= _ROUNDING * self.rounding()[path]


def _rounding(
    whole: _Gradients, make: Callable[[], nn.Module], run: Callable[[nn.Module], Tensor]
) -> Mapping[str, float]:
    """Return by path how far a gradient moves where each parameter begins as the next number, up or down."""
    module = make()
    for parameter in module.parameters():
        up = torch.randint(2, parameter.shape).bool()
        parameter.copy_(torch.nextafter(parameter, torch.where(up, math.inf, -math.inf).to(parameter)))
    moved = _gradients(module, run, {})
    return {path: float((moved.found[path] - one).norm()) for path, one in whole.found.items()}


def _summed(truth: _Truth, ranks: list[_Gradients]) -> Iterator[str]:
    """Yield the general paths of copied parameters whose gradient is the sum of the ranks'.

    Raises:
        _WrongError: a gradient isn't that of one process, whether taken as it is or summed.
    """
    loss = truth.whole.loss
    if all(split.dim is None or split.experts for split in ranks[0].splits.values()):
        raise _WrongError("nothing is cut")
    if any(abs(rank.loss - loss) > _TOLERANCE * abs(loss) for rank in ranks):
        raise _WrongError(f"the loss of a small one on {len(ranks)} ranks is {ranks[0].loss}, and {loss} on one")
    for path in truth.whole.found:
        split, pieces = ranks[0].splits.get(path, Split()), [rank.found[path] for rank in ranks]
        if split.experts:  # each rank routes rows of its own
            right = truth.fits(path, sum(pieces[1:], pieces[0]))
        elif split.dim is not None:
            right = truth.fits(path, torch.cat(pieces, split.dim))
        elif truth.fits(path, *pieces):
            right = True
        elif right := truth.fits(path, sum(pieces[1:], pieces[0])):
            yield general(path)
        if not right:
            raise _WrongError(f"the gradient of {path} in a small one on {len(ranks)} ranks isn't that on one")


def _write(found: TensorPlan | str) -> dict[str, object] | None:
    if isinstance(found, str):
        return None
    return {"styles": dict(found.styles), "cuts_mixers": found.cuts_mixers, "summed": sorted(found.summed)}


def _read(node: JsonNode) -> TensorPlan:
    said = node.fields(("styles", "cuts_mixers", "summed"))
    styles = {path: one.text() for path, one in said["styles"].items()}
    for path, style in styles.items():
        if not _STYLE.fullmatch(style):
            raise said["styles"][path].fail("the name of a style")
    if type(said["cuts_mixers"].value) is not bool:
        raise said["cuts_mixers"].fail("true or false")
    summed = frozenset(one.text() for one in said["summed"].list())
    return TensorPlan(styles=styles, cuts_mixers=said["cuts_mixers"].value, summed=summed)


PLAN: Form[TensorPlan | str] = Form(write=_write, read=_read)

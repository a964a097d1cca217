"""One optimizer over modules with different grids: one norm, one clip, one decision to skip, one set of state names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mimo.hooks import Common, StateTree
from mimo.optimizer._learning_rate import LearningRate
from mimo.optimizer._specs import ModuleParameters, OptimizerSpec, Prepared
from mimo.optimizer.runtime._agreement import Agreed, Tally, agree
from mimo.optimizer.runtime._replicate import local_gradient, reduce_tied
from mimo.topology import Coordinates
from mimo.topology.meshes import Meshes


@attrs.frozen(kw_only=True)
class ModuleOptimizer:
    """One module's parameters on this rank with the plugin that steps them.

    Args:
        part: the parameters of all its stages here.
        learning_rate: the module's.
        prepared: how gradients are reduced, by the stages that hold the parameters: each stage's own, and those that
            several share.
        optimizer: None where nothing trains.
    """

    part: ModuleParameters
    learning_rate: LearningRate
    prepared: Mapping[frozenset[int], Prepared]
    optimizer: torch.optim.Optimizer | None

    @classmethod
    def build(
        cls,
        stages: Mapping[int, ModuleParameters],
        *,
        spec: OptimizerSpec,
        config: object,
        learning_rate: LearningRate,
        meshes: Meshes,
    ) -> ModuleOptimizer:
        """Prepare and build ``spec`` for a module; a module in which nothing trains gets no optimizer.

        Args:
            stages: the parameters of each stage of the module that this rank holds; one that two stages share stands
                in both.
            spec: the plugin.
            config: its settings.
            learning_rate: the module's.
            meshes: the groups of this rank.
        """
        holders: dict[str, frozenset[int]] = {}
        for stage, part in stages.items():
            for name in part.parameters:
                holders[name] = holders.get(name, frozenset()) | {stage}
        shared = {name for name, held_by in holders.items() if len(held_by) > 1}
        whole = ModuleParameters(
            grid=next(iter(stages.values())).grid,
            rank=next(iter(stages.values())).rank,
            parameters={name: value for part in stages.values() for name, value in part.parameters.items()},
            summed=frozenset[str]().union(*(part.summed for part in stages.values())),
            tied=frozenset[str]().union(*(part.tied for part in stages.values())) - shared,
            experts=frozenset[str]().union(*(part.experts for part in stages.values())),
        )
        groups = {
            held_by: whole.only(name for name, other in holders.items() if other == held_by)
            for held_by in dict.fromkeys(holders.values())
        }
        return cls(
            part=whole,
            learning_rate=learning_rate,
            prepared={held_by: spec.prepare(group, meshes, config) for held_by, group in groups.items()},
            optimizer=spec.build(whole.parameters, config, meshes) if whole.parameters else None,
        )

    def counted_square(self) -> float:
        """Return this rank's share of the squared gradient norm: each shard counts on one rank only.

        A gradient that is not finite on any rank makes it so too, whoever counts the parameter.
        """
        if not self.part.parameters:
            return 0.0
        gradients = [local_gradient(parameter) for parameter in self.part.parameters.values()]
        norms = torch._foreach_norm(gradients)  # noqa: SLF001  # what torch.nn.utils calls too
        squares = torch.stack(norms).double().square()
        counted = torch.tensor(
            [
                self.part.is_counted(name) and _is_first_copy(parameter, self.part.place)
                for name, parameter in self.part.parameters.items()
            ],
            device=squares.device,
        )
        # What is counted elsewhere adds nothing, unless it is not finite: zero times that is not a number.
        return float((squares * counted).sum())


@attrs.frozen(kw_only=True)
class Stepped:
    """What one optimizer step did, equal on all ranks; ``norm`` is that of the mean gradient, before clipping."""

    agreed: Agreed
    loss: float
    norm: float
    norms: Mapping[str, float]
    lr: float
    skipped: bool


class MimoOptimizer:
    """Steps all modules of this rank together with all other ranks.

    Args:
        modules: this rank's modules.
        names: names of all modules of the run, in one order on every rank.
        learning_rate: the global schedule, which is reported; each module has its own.
        clip: largest global gradient norm; 0 for none.
        counts: names of further sums that a `Tally` may carry.
        told: names of its sums of several values, and how many each has.
        meshes: the groups of this rank.
        device: where the process group works.
    """

    def __init__(
        self,
        modules: Sequence[ModuleOptimizer],
        *,
        names: Sequence[str],
        learning_rate: LearningRate,
        clip: float,
        counts: Sequence[str] = (),
        told: Mapping[str, int] | None = None,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        self.name = "optimizer"
        self.modules = {module.part.grid.name: module for module in modules}
        self._names = tuple(names)
        self._learning_rate = learning_rate
        self._clip = clip
        self._counts = tuple(counts)
        self._told = dict(told or {})
        self._meshes = meshes
        self._device = device
        self._reduced: dict[tuple[str, frozenset[int]], set[int]] = {}

    def zero_gradients(self) -> None:
        """Forget all gradients, so that none of an earlier step is ever applied again."""
        for module in self.modules.values():
            for parameter in module.part.parameters.values():
                parameter.grad = None
        self._reduced.clear()

    def reduce(self, module: str, stage: int) -> None:
        """Sum the gradients of one stage of a module over the ranks that share its parameters.

        What it shares with another stage here is summed with the one that comes last, as both have then added to it.
        """
        for stages, prepared in self.modules[module].prepared.items():
            if stage in stages:
                done = self._reduced.setdefault((module, stages), set())
                done.add(stage)
                if done == stages:
                    prepared.reduce()
                    done.clear()

    def reduce_tied(self, module: str) -> None:
        """Add up the two gradients of a parameter tied over stages, on both stages."""
        part = self.modules[module].part
        for name in sorted(part.tied):
            reduce_tied(part.parameters[name], part, self._meshes)

    @torch.no_grad()
    def step(self, step: int, tally: Tally) -> Stepped:
        """Agree with all ranks, then scale, clip and step every module, or skip on all ranks alike.

        The gradient is divided by the label tokens of the whole step. A step without any, or with a loss or gradient
        that is not finite, is skipped; a module that saw no rows is left untouched.
        """
        squares = {name: module.counted_square() for name, module in self.modules.items()}
        agreed = agree(
            tally, squares=squares, modules=self._names, counts=self._counts, told=self._told, device=self._device
        )
        tokens = max(agreed.label_tokens, 1)
        norm = math.sqrt(sum(agreed.squares.values())) / tokens if agreed.finite else math.nan
        skipped = agreed.label_tokens == 0 or not math.isfinite(norm)
        if not skipped:
            scale = 1 / tokens
            if self._clip and norm > self._clip:
                scale *= self._clip / norm
            for name, module in self.modules.items():
                if module.optimizer is not None and agreed.rows[name]:
                    gradients = [local_gradient(parameter) for parameter in module.part.parameters.values()]
                    torch._foreach_mul_(gradients, scale)
                    for group in module.optimizer.param_groups:
                        group["lr"] = module.learning_rate.at(step)
                    module.optimizer.step()
        return Stepped(
            agreed=agreed,
            loss=agreed.loss / tokens,
            norm=norm,
            norms={name: math.sqrt(square) / tokens for name, square in agreed.squares.items()},
            lr=self._learning_rate.at(step),
            skipped=skipped,
        )

    def state(self) -> StateTree:
        """Return ``{module: {"<parameter>.<state>": value}}``; both stages give a tied parameter's, bitwise alike."""
        return {
            name: {
                f"{parameter.removeprefix(f'{name}.')}.{key}": value if isinstance(value, Tensor) else Common(value)
                for parameter, key, value in _states(module)
            }
            for name, module in self.modules.items()
        }

    @torch.no_grad()
    def load(self, tree: StateTree) -> None:
        """Take back what `state` gave; tensors that were filled in place are there already."""
        for name, module in self.modules.items():
            for parameter, key, value in _states(module):
                loaded: Any = tree[name][f"{parameter.removeprefix(f'{name}.')}.{key}"]
                if not isinstance(value, Tensor):
                    assert module.optimizer is not None
                    module.optimizer.state[module.part.parameters[parameter]][key] = loaded
                elif loaded is not value:
                    value.copy_(loaded)


def _is_first_copy(parameter: nn.Parameter, place: Coordinates) -> bool:
    """Tell whether this rank is the first of those of the parameter's mesh that hold the same piece."""
    if not isinstance(parameter, DTensor):
        return place.tp == 0
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(isinstance(one, Shard) or at == 0 for one, at in zip(parameter.placements, coordinate, strict=True))


def _states(module: ModuleOptimizer) -> list[tuple[str, str, object]]:
    """List (parameter, state name, value) of a module."""
    if module.optimizer is None:
        return []
    return [
        (name, key, value)
        for name, parameter in module.part.parameters.items()
        for key, value in module.optimizer.state[parameter].items()
    ]

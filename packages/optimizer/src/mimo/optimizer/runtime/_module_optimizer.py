"""One module's parameters on a rank, with the plugins that lay them out and step them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from mimo.hooks import Common, StateTree
from mimo.optimizer._learning_rate import LearningRate
from mimo.optimizer._rules import Pattern, Rule, Rules
from mimo.optimizer._specs import GRADIENT_SCALE, ModuleParameters, OptimizerSpec, Prepared, Share
from mimo.optimizer.runtime._agreement import NormBucket
from mimo.topology.meshes import Meshes


@attrs.frozen(kw_only=True)
class Stepper:
    """Parameters of a module that follow one rule, and the optimizer that steps them.

    Args:
        rule: theirs.
        names: their full names.
        optimizer: made by the rule's plugin.
    """

    rule: Rule
    names: tuple[str, ...]
    optimizer: torch.optim.Optimizer

    def step(self, lr: float, gradients: Mapping[str, Tensor], factor: float) -> None:
        """Take an update with the gradients times ``factor``.

        Args:
            lr: the learning rate.
            gradients: this rank's pieces by full name, those of other parameters among them; changed in place.
            factor: what divides the gradients by the step's labels, and clips them.
        """
        given = {"lr": lr}
        if GRADIENT_SCALE in self.optimizer.defaults:
            given[GRADIENT_SCALE] = factor
        else:
            torch._foreach_mul_([gradients[name] for name in self.names], factor)
        for group in self.optimizer.param_groups:
            group.update(given)
        self.optimizer.step()


@attrs.frozen(kw_only=True)
class LaidOut:
    """One module's parameters on this rank as they lie, before anything steps them.

    Args:
        part: the parameters of all its stages here.
        rules: by which they are stepped.
        prepared: how gradients are reduced, by the stages that hold the parameters: each stage's own, and those that
            several share.
    """

    part: ModuleParameters
    rules: Rules
    prepared: Mapping[frozenset[int], Prepared]

    @classmethod
    def of(cls, stages: Mapping[int, ModuleParameters], rules: Rules, meshes: Meshes) -> LaidOut:
        """Lay out the parameters of each stage of a module that this rank holds; two stages may share some."""
        part, prepared = _prepare(stages, rules.base, meshes)
        return cls(part=part, rules=rules, prepared=prepared)

    @property
    def shares(self) -> list[tuple[Rule, Share]]:
        """What each rule that any of the parameters follows is to step; nothing where nothing trains."""
        prepared = tuple(self.prepared.values())
        return [
            (rule, Share(part=self.part.only(names), config=rule.config, prepared=prepared))
            for rule, names in self.rules.split(self.part.parameters)
        ]


def build_together(modules: Iterable[LaidOut], specs: Iterable[OptimizerSpec], meshes: Meshes) -> list[ModuleOptimizer]:
    """Build the optimizers of all modules of this rank, which every rank of the world does at once.

    Args:
        modules: those of this rank.
        specs: the plugins of the whole run, in one order on every rank.
        meshes: the groups of this rank.
    """
    modules = list(modules)
    shares = [(module, rule, share) for module in modules for rule, share in module.shares]
    given = [rule.config for _, rule, _ in shares]
    for spec in specs:
        own = [at for at, (_, rule, _) in enumerate(shares) if rule.spec.name == spec.name]
        if spec.agree is not None:
            for at, agreed in zip(own, spec.agree([shares[at][2] for at in own], meshes), strict=True):
                given[at] = agreed
    steppers: dict[str, list[Stepper]] = {module.part.grid.name: [] for module in modules}
    for (module, rule, share), config in zip(shares, given, strict=True):
        parameters = share.part.parameters
        optimizer = rule.spec.build(parameters, config, meshes)
        steppers[module.part.grid.name].append(Stepper(rule=rule, names=tuple(parameters), optimizer=optimizer))
    return [
        ModuleOptimizer(
            part=module.part,
            rules=module.rules,
            prepared=module.prepared,
            steppers=tuple(steppers[module.part.grid.name]),
        )
        for module in modules
    ]


@attrs.frozen(kw_only=True)
class ModuleOptimizer(LaidOut):
    """One module's parameters on this rank as they lie, and how they are stepped.

    Args:
        steppers: one for each rule that any of the parameters follows; none where nothing trains.
    """

    steppers: tuple[Stepper, ...]

    @classmethod
    def build(
        cls,
        stages: Mapping[int, ModuleParameters],
        *,
        spec: OptimizerSpec,
        config: object,
        learning_rate: LearningRate,
        meshes: Meshes,
        clip_group: str = "",
        patterns: Sequence[Pattern] = (),
    ) -> ModuleOptimizer:
        """Lay out and build the optimizers of a module that is alone; one in which nothing trains gets none.

        Args:
            stages: the parameters of each stage of the module that this rank holds; one that two stages share stands
                in both.
            spec: the plugin, which says how all parameters lie, and steps those that no pattern matches.
            config: its settings.
            learning_rate: of those that no pattern matches.
            meshes: the groups of this rank.
            clip_group: likewise.
            patterns: what other parameters follow; the first that matches counts.
        """
        base = Rule(spec=spec, config=config, learning_rate=learning_rate, clip_group=clip_group)
        rules = Rules(base=base, patterns=tuple(patterns))
        (module,) = build_together([LaidOut.of(stages, rules, meshes)], rules.specs, meshes)
        return module

    @property
    def name(self) -> str:
        """The module's name."""
        return self.part.grid.name

    @property
    def buckets(self) -> dict[str, NormBucket]:
        """The module and clip group of each parameter, by full name."""
        return {name: (self.name, stepper.rule.clip_group) for stepper in self.steppers for name in stepper.names}

    def state(self) -> StateTree:
        """Return ``{"<path>.<state>": value}``; numbers that are no tensors are the same on all ranks."""
        return {
            self._key(parameter, key): value if isinstance(value, Tensor) else Common(value)
            for parameter, key, value, _ in self._states()
        }

    def load(self, tree: StateTree) -> None:
        """Take back what `state` gave; tensors that were filled in place are there already."""
        for parameter, key, value, states in list(self._states()):
            loaded: Any = tree[self._key(parameter, key)]
            if not isinstance(value, Tensor):
                states[key] = loaded.value
            elif loaded is not value:
                value.copy_(loaded)

    def _key(self, parameter: str, key: str) -> str:
        return f"{parameter.removeprefix(f'{self.name}.')}.{key}"

    def _states(self) -> Iterator[tuple[str, str, object, dict[str, Any]]]:
        """Yield (parameter, state name, value, all states of the parameter), in the order of the parameters."""
        optimizers = {name: stepper.optimizer for stepper in self.steppers for name in stepper.names}
        for name, parameter in self.part.parameters.items():
            states = optimizers[name].state[parameter]
            for key, value in states.items():
                yield name, key, value, states


def _prepare(
    stages: Mapping[int, ModuleParameters], rule: Rule, meshes: Meshes
) -> tuple[ModuleParameters, dict[frozenset[int], Prepared]]:
    """Lay out what each stage holds for itself, and what several share; return all of it, and how by stages."""
    holders: dict[str, frozenset[int]] = {}
    for stage, part in stages.items():
        for name in (*part.parameters, *part.frozen):
            holders[name] = holders.get(name, frozenset()) | {stage}
    shared = {name for name, held_by in holders.items() if len(held_by) > 1}
    parts = list(stages.values())
    whole = attrs.evolve(
        parts[0],
        parameters={name: value for part in parts for name, value in part.parameters.items()},
        frozen={name: value for part in parts for name, value in part.frozen.items()},
        modules=(),
        summed=frozenset[str]().union(*(part.summed for part in parts)),
        tied=frozenset[str]().union(*(part.tied for part in parts)) - shared,
        experts=frozenset[str]().union(*(part.experts for part in parts)),
        whole=frozenset[str]().union(*(part.whole for part in parts)),
    )
    prepared = {}
    for held_by in dict.fromkeys(holders.values()):
        own = whole.only(name for name, other in holders.items() if other == held_by)
        own = attrs.evolve(
            own,
            modules=tuple(module for stage in sorted(held_by) for module in stages[stage].modules),
            stages=tuple(sorted(held_by)),
        )
        prepared[held_by] = rule.spec.prepare(own, meshes, rule.config)
    for laid in prepared.values():
        whole = attrs.evolve(
            whole,
            parameters={**whole.parameters, **(laid.parameters or {})},
            frozen={**whole.frozen, **(laid.frozen or {})},
        )
    return whole, prepared

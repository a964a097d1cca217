"""One optimizer over modules with different grids: one agreement, one decision to skip, one set of state names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import StateTree
from mimo.optimizer._learning_rate import LearningRate
from mimo.optimizer._specs import Access, Phase, Prepared, PutOff
from mimo.optimizer.runtime._agreement import Agreed, Bin, Tally, agree
from mimo.optimizer.runtime._gradients import Gradients
from mimo.optimizer.runtime._module_optimizer import ModuleOptimizer
from mimo.optimizer.runtime._replicate import local_gradient, reduce_tied
from mimo.optimizer.runtime._scaling import SCALING, LossScale
from mimo.topology.meshes import Meshes


@attrs.frozen(kw_only=True)
class Proposed:
    """What a step comes to, equal on all ranks, while nothing has been changed by it yet.

    Args:
        agreed: what all ranks added up.
        loss: a label token.
        norm: of the mean gradient, before clipping; not a number where the loss or any gradient is not finite.
        norms: the same of each module, as they are.
        group_norms: the same of each clip group.
        skips: whether nothing is to be stepped.
    """

    agreed: Agreed
    loss: float
    norm: float
    norms: Mapping[str, float]
    group_norms: Mapping[str, float]
    skips: bool


@attrs.frozen(kw_only=True)
class Stepped:
    """What one optimizer step did, equal on all ranks.

    Args:
        agreed: what all ranks added up.
        loss: a label token.
        norm: of the mean gradient, before clipping.
        norms: the same of each module.
        group_norms: the same of each clip group, of which there may be one alone.
        lr: of the run.
        skipped: whether nothing was stepped.
        loss_scale: what the loss had been multiplied by, None where nothing scales it.
    """

    agreed: Agreed
    loss: float
    norm: float
    norms: Mapping[str, float]
    group_norms: Mapping[str, float]
    lr: float
    skipped: bool
    loss_scale: float | None = None


class MimoOptimizer:
    """Steps all modules of this rank together with all other ranks.

    Args:
        modules: this rank's modules.
        names: names of all modules of the run, in one order on every rank.
        learning_rate: the global schedule, which is reported; each module has its own.
        clip: largest gradient norm of a clip group; 0 for none.
        clips: the same of clip groups that have their own, by name.
        clip_groups: those of each module of the run, alike on every rank; one for all by default.
        counts: names of further sums that a `Tally` may carry.
        told: names of its sums of several values, and how many each has.
        counts_zeros: whether to count the numbers of gradients that are exactly zero.
        scaling: of the loss that gradients are of; None for none.
        meshes: the groups of this rank.
        device: where the process group works.

    Attributes:
        schedule_begun: steps of the run before the learning rates' schedules began.
    """

    def __init__(
        self,
        modules: Sequence[ModuleOptimizer],
        *,
        names: Sequence[str],
        learning_rate: LearningRate,
        clip: float,
        clips: Mapping[str, float] | None = None,
        clip_groups: Mapping[str, Sequence[str]] | None = None,
        counts: Sequence[str] = (),
        told: Mapping[str, int] | None = None,
        counts_zeros: bool = False,
        scaling: LossScale | None = None,
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        self.name = "optimizer"
        self.schedule_begun = 0
        self.modules = {module.name: module for module in modules}
        self._names = tuple(names)
        self._learning_rate = learning_rate
        self._clip = clip
        self._clips = dict(clips or {})
        groups = clip_groups or dict.fromkeys(names, ("",))
        self._bins: tuple[Bin, ...] = tuple((name, group) for name in names for group in groups[name])
        self._counts = tuple(counts)
        self._told = dict(told or {})
        self._counts_zeros = counts_zeros
        self._scaling = scaling
        self._meshes = meshes
        self._device = device
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gather")  # it starts with the first thing to do
        self._reduced: dict[tuple[str, frozenset[int]], set[int]] = {}
        self._added: dict[tuple[str, frozenset[int]], set[int]] = {}
        self._proposed: dict[str, Tensor] = {}
        """The gradients of what was proposed last."""
        self._gradients = Gradients(
            [module.part for module in modules],
            {name: one for module in modules for name, one in module.bins.items()},
        )

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by before its backward."""
        return 1.0 if self._scaling is None else self._scaling.scale

    def zero_gradients(self) -> None:
        """Forget all gradients, so that none of an earlier step is ever applied again."""
        for module in self.modules.values():
            for parameter in module.part.parameters.values():
                parameter.grad = None
        self._reduced.clear()
        self._added.clear()
        self._proposed = {}

    def reduce(self, module: str, stage: int) -> None:
        """Sum the gradients of one stage of a module over the ranks that share its parameters.

        What it shares with another stage here is summed with the one that comes last, as both have then added to it.
        """
        for stages, prepared in self._of(module, stage):
            done = self._reduced.setdefault((module, stages), set())
            done.add(stage)
            if done == stages:
                prepared.reduce()
                done.clear()

    def gather(self) -> None:
        """Begin to gather what the stages compute with; on all ranks alike, before any of them computes."""
        for module in self.modules.values():
            for prepared in module.prepared.values():
                prepared.gather(self._executor)

    @contextmanager
    def computing(self, module: str, stage: int, phase: Phase) -> Iterator[None]:
        """Be told of the beginning and the end of a forward or backward of a stage."""
        with ExitStack() as bounds:
            for _, prepared in self._of(module, stage):
                bounds.enter_context(prepared.computing(phase))
            yield

    @contextmanager
    def adding(self, module: str, stage: int, put_off: PutOff | None, *, last: bool) -> Iterator[None]:
        """Be told of the beginning and the end of what adds to the gradients of a stage.

        Args:
            module: the stage's.
            stage: which.
            put_off: weight gradients that a backward has put off and that are now computed; None for a backward.
            last: whether nothing is added to the stage's gradients in this step after it.
        """
        with ExitStack() as bounds:
            for stages, prepared in self._of(module, stage):
                done = self._added.setdefault((module, stages), set())
                if last:
                    done.add(stage)
                bounds.enter_context(prepared.adding(put_off, done == stages))
            yield

    def _of(self, module: str, stage: int) -> Iterator[tuple[frozenset[int], Prepared]]:
        """Yield how the parameters of a stage lie, with all stages that hold them."""
        for stages, prepared in self.modules[module].prepared.items():
            if stage in stages:
                yield stages, prepared

    def settle(self, access: Access = "any") -> None:
        """Make the parameters what a reader or writer of their values takes them for."""
        for module in self.modules.values():
            for prepared in module.prepared.values():
                prepared.settle(access)

    def weights(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return all parameters of each module, frozen ones too, by full name, as they lie on this rank."""
        self.settle()
        return {name: {**module.part.parameters, **module.part.frozen} for name, module in self.modules.items()}

    def reduce_tied(self, module: str) -> None:
        """Add up the two gradients of a parameter tied over stages, on both stages."""
        part = self.modules[module].part
        for prepared in self.modules[module].prepared.values():
            prepared.before_tied()
        part.observe("stages", part.stages, [local_gradient(part.parameters[name]) for name in sorted(part.tied)])
        for name in sorted(part.tied):
            reduce_tied(part.parameters[name], part, self._meshes)

    def step(self, step: int, tally: Tally) -> Stepped:
        """Agree with all ranks, then scale, clip and step every module, or skip on all ranks alike."""
        return self.apply(step, self.propose(tally))

    @torch.no_grad()
    def propose(self, tally: Tally) -> Proposed:
        """Agree with all ranks on what a step comes to, and change nothing.

        The gradient is divided by the label tokens of the whole step, and by the loss scale. A step without any, or
        with a loss or gradient that is not finite, is to be skipped.
        """
        gradients = self._proposed = self._gradients.read()
        agreed = self._agree(tally, gradients)
        tokens = max(agreed.label_tokens, 1)
        divisor = tokens * self.loss_scale
        norm = math.sqrt(sum(agreed.squares.values())) / divisor if agreed.finite else math.nan
        return Proposed(
            agreed=agreed,
            loss=agreed.loss / tokens,
            norm=norm,
            norms={name: _norm(agreed, module=name) / divisor for name in self._names},
            group_norms={group: _norm(agreed, group=group) / divisor for _, group in self._bins},
            skips=agreed.label_tokens == 0 or not math.isfinite(norm),
        )

    @torch.no_grad()
    def apply(self, step: int, proposed: Proposed) -> Stepped:
        """Scale, clip and step every module as was last proposed, or skip; a module that saw no rows is left untouched.

        All ranks are given the same, but for whether it skips what was proposed to be stepped, which they decide alike.
        """
        gradients, self._proposed = self._proposed, {}
        agreed = proposed.agreed
        loss_scale = self.loss_scale
        divisor = max(agreed.label_tokens, 1) * loss_scale
        self.settle("step")
        if not proposed.skips:
            factors = {group: self._clipping(group, norm) / divisor for group, norm in proposed.group_norms.items()}
            for name, module in self.modules.items():
                if agreed.rows[name]:
                    for stepper in module.steppers:
                        lr = stepper.rule.learning_rate.at(step, begun=self.schedule_begun)
                        stepper.step(lr, gradients, factors[stepper.rule.clip_group])
        if self._scaling is not None and agreed.label_tokens:
            self._scaling.update(finite=agreed.finite)
        return Stepped(
            agreed=agreed,
            loss=proposed.loss,
            norm=proposed.norm,
            norms=proposed.norms,
            group_norms=proposed.group_norms,
            lr=self._learning_rate.at(step, begun=self.schedule_begun),
            skipped=proposed.skips,
            loss_scale=None if self._scaling is None else loss_scale,
        )

    def _agree(self, tally: Tally, gradients: Mapping[str, Tensor]) -> Agreed:
        """Add up over all ranks what they found in their steps and gradients."""
        if self._counts_zeros:
            tally = attrs.evolve(tally, zeros=self._gradients.zeros(gradients))
        return agree(
            tally,
            squares=self._gradients.squares(gradients),
            bins=self._bins,
            modules=self._names,
            counts=self._counts,
            told=self._told,
            device=self._device,
        )

    def _clipping(self, group: str, norm: float) -> float:
        """Return what gradients of a clip group of this norm are multiplied by to be no longer than they may."""
        clip = self._clips.get(group, self._clip)
        return clip / norm if clip and norm > clip else 1.0

    def state(self) -> StateTree:
        """Return ``{module: {"<parameter>.<state>": value}}``; both stages give a tied parameter's, bitwise alike.

        The loss scale, if there is one, stands beside the modules.
        """
        scaling = {} if self._scaling is None else {SCALING: self._scaling.state()}
        return scaling | {name: module.state() for name, module in self.modules.items()}

    @torch.no_grad()
    def load(self, tree: StateTree) -> None:
        """Take back what `state` gave; tensors that were filled in place are there already.

        A loss scale that ``tree`` lacks, that of a run without one, stays as it is.
        """
        if self._scaling is not None and SCALING in tree:
            self._scaling.load(tree[SCALING])
        for name, module in self.modules.items():
            module.load(tree[name])


def _norm(agreed: Agreed, *, module: str | None = None, group: str | None = None) -> float:
    """Return the norm of the summed gradients of a module, or of a clip group."""
    return math.sqrt(sum(square for bin_, square in agreed.squares.items() if module == bin_[0] or group == bin_[1]))

"""One optimizer over modules with different grids: one all-reduce, one decision to skip, one set of state names."""

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
from mimo.optimizer._specs import Access, DeferredGrads, Phase, Prepared
from mimo.optimizer.runtime._agreement import LocalStats, NormBucket, ReducedStats, agree
from mimo.optimizer.runtime._gradients import Gradients
from mimo.optimizer.runtime._module_optimizer import ModuleOptimizer
from mimo.optimizer.runtime._replicate import local_gradient, reduce_tied
from mimo.optimizer.runtime._scaling import SCALING, LossScale
from mimo.topology.meshes import Meshes, local


@attrs.frozen(kw_only=True)
class StepDecision:
    """The decision on a step, equal on all ranks, before anything is changed.

    Args:
        agreed: sums over all ranks.
        loss: mean over label tokens.
        norm: of the mean gradient, before clipping; nan if the loss or any gradient is not finite.
        norms: of each module, even if not finite.
        group_norms: of each clip group.
        learns: whether the step has anything to learn from.
        skips: whether the step is skipped.
    """

    agreed: ReducedStats
    loss: float
    norm: float
    norms: Mapping[str, float]
    group_norms: Mapping[str, float]
    learns: bool
    skips: bool


@attrs.frozen(kw_only=True)
class StepResult:
    """The result of one optimizer step, equal on all ranks.

    Args:
        agreed: sums over all ranks.
        loss: mean over label tokens.
        norm: of the mean gradient, before clipping.
        norms: of each module.
        group_norms: of each clip group; there may be only one.
        lr: of the run.
        skipped: whether the step was skipped.
        loss_scale: by which the loss was multiplied; None without scaling.
    """

    agreed: ReducedStats
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
        clips: of clip groups with their own limit, by name.
        clip_groups: of each module of the run, equal on all ranks; one for all by default.
        counts: names of further sums of `LocalStats`.
        extra_sums: names of its sums of several values, with their numbers of values.
        learns_from_labels: whether a step with labels has something to learn from.
        targets: names of those extra sums that count targets of losses beside the labels.
        counts_zeros: whether to count gradient elements that are exactly zero.
        scaling: of the loss; None for none.
        meshes: the groups of this rank.
        device: of the process group.

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
        extra_sums: Mapping[str, int] | None = None,
        learns_from_labels: bool = True,
        targets: Sequence[str] = (),
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
        self._buckets: tuple[NormBucket, ...] = tuple((name, group) for name in names for group in groups[name])
        self._counts = tuple(counts)
        self._extra_sums = dict(extra_sums or {})
        self._learns_from_labels = learns_from_labels
        self._targets = tuple(targets)
        self._counts_zeros = counts_zeros
        self._scaling = scaling
        self._meshes = meshes
        self._device = device
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gather")  # the thread starts with the first task
        self._reduced: dict[tuple[str, frozenset[int]], set[int]] = {}
        self._added: dict[tuple[str, frozenset[int]], set[int]] = {}
        self._proposed: dict[str, Tensor] = {}
        """The gradients of the last proposed step."""
        self._gradients = Gradients(
            [module.part for module in modules],
            {name: bucket for module in modules for name, bucket in module.buckets.items()},
        )

    @property
    def loss_scale(self) -> float:
        """The factor of the loss before its backward."""
        return 1.0 if self._scaling is None else self._scaling.scale

    def zero_gradients(self) -> None:
        """Drop all gradients, so that no gradient is applied twice."""
        for module in self.modules.values():
            for parameter in module.part.parameters.values():
                parameter.grad = local(parameter).grad = None
        self._reduced.clear()
        self._added.clear()
        self._proposed = {}

    def reduce(self, module: str, stage: int) -> None:
        """Sum the gradients of one stage of a module over the ranks that share its parameters.

        Parameters shared by two stages here are summed with the last of them, when both have contributed.
        """
        for stages, prepared in self._of(module, stage):
            done = self._reduced.setdefault((module, stages), set())
            done.add(stage)
            if done == stages:
                prepared.reduce()
                done.clear()

    def gather(self) -> None:
        """Begin to gather the weights that stages compute with; on all ranks, before any of them computes."""
        for module in self.modules.values():
            for prepared in module.prepared.values():
                prepared.gather(self._executor)

    @contextmanager
    def on_compute(self, module: str, stage: int, phase: Phase) -> Iterator[None]:
        """Run a forward or backward of a stage within the contexts of its optimizer plugins."""
        with ExitStack() as bounds:
            for _, prepared in self._of(module, stage):
                bounds.enter_context(prepared.on_compute(phase))
            yield

    @contextmanager
    def on_grad_accumulation(
        self, module: str, stage: int, deferred: DeferredGrads | None, *, last: bool
    ) -> Iterator[None]:
        """Add to the gradients of a stage within the contexts of its optimizer plugins.

        Args:
            module: the stage's.
            stage: which.
            deferred: weight gradients that a backward deferred and that are computed now; None for a backward.
            last: whether it is the last in this step to add to the stage's gradients.
        """
        with ExitStack() as bounds:
            for stages, prepared in self._of(module, stage):
                done = self._added.setdefault((module, stages), set())
                if last:
                    done.add(stage)
                bounds.enter_context(prepared.on_grad_accumulation(deferred, done == stages))
            yield

    def _of(self, module: str, stage: int) -> Iterator[tuple[frozenset[int], Prepared]]:
        """Yield the prepared parameters of a stage, with all stages that hold them."""
        for stages, prepared in self.modules[module].prepared.items():
            if stage in stages:
                yield stages, prepared

    def synchronize(self, access: Access = "any") -> None:
        """Make the parameters valid for a reader or writer of their values."""
        for module in self.modules.values():
            for prepared in module.prepared.values():
                prepared.synchronize(access)

    def weights(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return all parameters of each module, frozen ones too, by full name, as laid out on this rank."""
        self.synchronize()
        return {name: {**module.part.parameters, **module.part.frozen} for name, module in self.modules.items()}

    def reduce_tied(self, module: str) -> None:
        """Sum the two gradients of a parameter tied over stages, on both stages."""
        part = self.modules[module].part
        for prepared in self.modules[module].prepared.values():
            prepared.before_tied()
        part.observe("stages", part.stages, [local_gradient(part.parameters[name]) for name in sorted(part.tied)])
        for name in sorted(part.tied):
            reduce_tied(part.parameters[name], part, self._meshes)

    def step(self, step: int, stats: LocalStats) -> StepResult:
        """Reduce the statistics, then scale, clip and step every module, or skip the step on all ranks."""
        return self.apply(step, self.propose(stats))

    @torch.no_grad()
    def propose(self, stats: LocalStats) -> StepDecision:
        """Reduce the statistics of all ranks to a decision on the step; change nothing.

        The gradient is divided by the weight of the label tokens of the whole step, if it has some, and by the loss
        scale. A step without any, and without other targets, or with a loss or gradient that is not finite, is skipped.
        """
        gradients = self._proposed = self._gradients.read()
        agreed = self._agree(stats, gradients)
        learns = self._learns(agreed)
        divisor = agreed.divisor * self.loss_scale
        norm = math.sqrt(sum(agreed.squares.values())) / divisor if agreed.finite else math.nan
        return StepDecision(
            agreed=agreed,
            loss=agreed.loss / agreed.divisor,
            norm=norm,
            norms={name: _norm(agreed, module=name) / divisor for name in self._names},
            group_norms={group: _norm(agreed, group=group) / divisor for _, group in self._buckets},
            learns=learns,
            skips=not learns or not math.isfinite(norm),
        )

    @torch.no_grad()
    def apply(self, step: int, proposed: StepDecision) -> StepResult:
        """Scale, clip and step every module by the last decision, or skip; a module without rows is unchanged.

        ``proposed`` is equal on all ranks; whoever makes it skip must do so on all of them.
        """
        gradients, self._proposed = self._proposed, {}
        agreed = proposed.agreed
        loss_scale = self.loss_scale
        divisor = agreed.divisor * loss_scale
        self.synchronize("step")
        if not proposed.skips:
            factors = {group: self._clipping(group, norm) / divisor for group, norm in proposed.group_norms.items()}
            for name, module in self.modules.items():
                if agreed.rows[name]:
                    for stepper in module.steppers:
                        lr = stepper.rule.learning_rate.at(step, begun=self.schedule_begun)
                        stepper.step(lr, gradients, factors[stepper.rule.clip_group])
        if self._scaling is not None and proposed.learns:
            self._scaling.update(finite=agreed.finite)
        return StepResult(
            agreed=agreed,
            loss=proposed.loss,
            norm=proposed.norm,
            norms=proposed.norms,
            group_norms=proposed.group_norms,
            lr=self._learning_rate.at(step, begun=self.schedule_begun),
            skipped=proposed.skips,
            loss_scale=None if self._scaling is None else loss_scale,
        )

    def _learns(self, agreed: ReducedStats) -> bool:
        """Tell whether a step has anything to learn from."""
        by_labels = self._learns_from_labels and agreed.label_weight != 0
        return by_labels or any(float(agreed.extra_sums[name]) for name in self._targets)

    def _agree(self, stats: LocalStats, gradients: Mapping[str, Tensor]) -> ReducedStats:
        """Sum the statistics and the squared gradients over all ranks."""
        if self._counts_zeros:
            stats = attrs.evolve(stats, zeros=self._gradients.zeros(gradients))
        return agree(
            stats,
            squares=self._gradients.squares(gradients),
            buckets=self._buckets,
            modules=self._names,
            counts=self._counts,
            extra_sums=self._extra_sums,
            device=self._device,
        )

    def _clipping(self, group: str, norm: float) -> float:
        """Return the factor that clips gradients of this norm in a clip group."""
        clip = self._clips.get(group, self._clip)
        return clip / norm if clip and norm > clip else 1.0

    def state(self) -> StateTree:
        """Return ``{module: {"<parameter>.<state>": value}}``; both stages return a tied parameter's, bitwise equal.

        The loss scale, if any, is an entry beside the modules.
        """
        scaling = {} if self._scaling is None else {SCALING: self._scaling.state()}
        return scaling | {name: module.state() for name, module in self.modules.items()}

    @torch.no_grad()
    def load(self, tree: StateTree) -> None:
        """Load what `state` returned; tensors that were filled in place are there already.

        If ``tree`` has no loss scale, as from a run without one, the present one stays.
        """
        if self._scaling is not None and SCALING in tree:
            self._scaling.load(tree[SCALING])
        for name, module in self.modules.items():
            module.load(tree[name])


def _norm(agreed: ReducedStats, *, module: str | None = None, group: str | None = None) -> float:
    """Return the norm of the summed gradients of a module, or of a clip group."""
    return math.sqrt(
        sum(square for bucket, square in agreed.squares.items() if module == bucket[0] or group == bucket[1])
    )

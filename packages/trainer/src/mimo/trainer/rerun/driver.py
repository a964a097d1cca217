"""Runs steps again: what the rerun machine decides, done on one rank. Call it on every rank of the world.

A healthy step costs it notes of what may have to be restored, and no message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.distributed as dist

from mimo.hooks import DataError, RestartNeededError, ResultRejectedError
from mimo.optimizer.runtime import StepDecision
from mimo.schedule.runtime import Record
from mimo.topology.collectives import all_gather_json
from mimo.trainer.batch.digest import digest_of
from mimo.trainer.batch.saved_samples import KeptSamples
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.rerun.before import Before
from mimo.trainer.rerun.comparison import Order, StepRun, Where, difference, differences, relative_differences, wrong
from mimo.trainer.rerun.machine import RerunStateMachine, facts_of, words_of
from mimo.trainer.rerun.passes import Anomaly
from mimo.trainer.rerun.pending import PendingStep
from mimo.trainer.rerun.record import RankRecord
from mimo.trainer.rerun.recorder import Bounds
from mimo.trainer.step.probe import Computation
from mimo.trainer.step.trainer import StepOutcome, Trainer

_NOISE = 0.1
"""Relative difference above which two runs that are both wrong are not taken for the same up to rounding."""


class RerunDriver:
    """Drives a trainer so that steps are run as often as the machine decides.

    Args:
        machine: decides; its recorder must be the trainer's probe.
        trainer: runs plans.
    """

    def __init__(self, machine: RerunStateMachine, trainer: Trainer) -> None:
        self._machine = machine
        self._trainer = trainer
        self._recorder = machine.recorder
        self._bounds = Bounds(machine.settings.spike_steps)
        self._order = Order(trainer.job, trainer.rank, trainer.objects)

    def train(self, step: int) -> StepOutcome:
        """Do one step on every rank, as `Trainer.train` does, and run it again where it can't be right.

        Raises:
            RestartNeededError: it can't be right, and is so again; the state before it has been saved.
            ResultRejectedError: it can't be right, and is so on all devices.
        """
        return self._trainer.take(step, self.decide)

    def decide(self, step: int, record: Record | None) -> StepDecision:
        """Run forward and backward of a step as often as needed, and return what it is updated by."""
        trainer, machine = self._trainer, self._machine
        if machine.settings.mode == "disabled" and step not in machine.settings.skip_steps:
            return trainer.decide(step, record)
        before = Before.of(trainer.model, trainer.device)
        if machine.waiting is not None and machine.waiting.step == step:
            return self._replay(step, machine.waiting)
        first = trainer.decide(step, record)
        if step in machine.settings.skip_steps:
            before.restore_buffers(trainer.model)
            machine.add_event(step, "skipped", "left out, as rerun.skip_steps says")
            return attrs.evolve(first, skips=True)
        if machine.settings.mode == "report_determinism":
            return self._report(step, before, first)
        verdict = machine.assess(first)
        if verdict:
            return self._reject(step, before, self._run(first, verdict))
        return self._accept(first)

    def _accept(self, proposed: StepDecision) -> StepDecision:
        assert self._recorder is not None
        self._machine.accept(proposed)
        if not proposed.skips and self._machine.settings.spike_factor:
            self._bounds.add(self._recorder)
        return proposed

    def _run(self, proposed: StepDecision, verdict: str | Anomaly) -> StepRun:
        assert self._recorder is not None
        return StepRun.of(proposed, self._recorder.values(), verdict)

    def _again(self, before: Before, data: StepData | None) -> tuple[StepDecision, StepRun]:
        """Run the step once more, of samples that were kept, or of those at hand."""
        trainer = self._trainer
        before.restore(trainer.model, trainer.device)
        proposed = trainer.optimizer.propose(trainer.repeat(data))
        return proposed, self._run(proposed, self._machine.assess(proposed))

    def _report(self, step: int, before: Before, first: StepDecision) -> StepDecision:
        """Run a step again, whatever it came to, and tell how far the two are apart."""
        device = self._trainer.device
        run = self._run(first, "")
        proposed, other = self._again(before, None)
        found = differences(run, other, [module.name for module in self._trainer.job.modules])
        largest = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        agreed = dict(zip(found, largest.tolist(), strict=True))
        self._machine.measure(max(agreed.values()))
        self._machine.add_event(step, "determinism", "", runs=(run, other), differences=agreed)
        return proposed

    def _reject(self, step: int, before: Before, first: StepRun, kept: KeptSamples | None = None) -> StepDecision:
        """Run a step that can't be right again, and find out whether that was a fault that passed."""
        machine, device = self._machine, self._trainer.device
        if kept is None:
            kept, data = self._keep(step)
        else:
            data = self._trainer.cut(kept)
        proposed, second = self._again(before, data)
        runs = [first, second]
        tolerance, off = machine.tolerance, difference(first, second, device)
        last_off = off
        if off > tolerance and not (machine.settings.tolerance and not second.reason):
            # Which of the two was wrong, and what of the difference is this machine's own, a third one tells.
            proposed, third = self._again(before, data)
            runs.append(third)
            if third.reason and not second.reason:
                proposed, third = self._again(before, data)
                runs.append(third)
            noise = last_off = difference(runs[-2], third, device)
            if not machine.settings.tolerance and (noise < _NOISE or not (runs[-2].reason or third.reason)):
                tolerance = max(tolerance, noise)
            off = min(off, difference(first, third, device))
        differs = off > tolerance
        stays = runs[-1].passes is not None and last_off <= max(tolerance, _NOISE)
        if not runs[-1].reason or (stays and (differs or first.passes is None)):
            where = self._first_divergence(first, runs[-1], tolerance) if differs else Where(computation=None, ranks=())
            devices = all_gather_json(machine.device, self._trainer.objects)
            text = f"{first.reason}, and not so when run again: " + (
                f"a fault that has passed, of {words_of(where, devices)}; the run goes on"
                if differs
                else "no more than two runs of a step differ here; the run goes on"
            )
            machine.add_event(
                step,
                "transient" if differs else "noise",
                text,
                runs=runs,
                reason=first.reason,
                difference=off,
                tolerance=tolerance,
                **facts_of(where, devices),
            )
        if stays:
            self._tell_passes(step, runs, off=last_off, tolerance=tolerance)
        if stays or not runs[-1].reason:
            return self._accept(proposed)
        where = self._first_divergence(first, runs[-1], tolerance) if differs else self._wrong(runs[-1])
        raise self._stop(step, before, runs, where, tolerance, kept)

    def _tell_passes(self, step: int, runs: Sequence[StepRun], *, off: float, tolerance: float) -> None:
        """Say that passes come to the same once more, as the data or the model make them, which ends no run."""
        assert self._recorder is not None
        last = runs[-1]
        assert last.passes is not None
        sizes = self._recorder.sizes(loss_scale=self._trainer.optimizer.loss_scale)
        where = self._order.first(last.passes.shared_by(sizes))
        where = attrs.evolve(where, computation=where.computation or last.passes.computation)
        devices = all_gather_json(self._machine.device, self._trainer.objects)
        self._machine.add_event(
            step,
            "accepted",
            f"{last.reason}, also when run again: the data or the model make them so; the run goes on",
            runs=runs,
            reason=last.reason,
            difference=off,
            tolerance=tolerance,
            **facts_of(where, devices),
        )

    def _keep(self, step: int) -> tuple[KeptSamples, StepData]:
        """Return the samples of a step, read again and kept, and cut as they were.

        Raises:
            DataError: they are others now.
        """
        trainer = self._trainer
        assert trainer.job.train is not None
        kept = KeptSamples(numbers=trainer.samples.numbers(step), broken=trainer.data.broken, base=trainer.job.train)
        data = trainer.cut(kept)
        if trainer.holds_modules and digest_of(data) != digest_of(trainer.data):
            raise DataError(
                f"step {step}",
                expected="the same samples when they are read again, as the step is to be run again",
                got="others",
                fix="A dataset must give the same for a number each time, and its files must not change.",
            )
        return kept, data

    def _stop(
        self,
        step: int,
        before: Before,
        runs: Sequence[StepRun],
        where: Where,
        tolerance: float,
        kept: KeptSamples,
    ) -> RestartNeededError:
        """Save what a restart must know, and return what ends this attempt."""
        machine, job, last = self._machine, self._trainer.job, runs[-1]
        devices = all_gather_json(machine.device, self._trainer.objects)
        waiting = PendingStep(
            step=step,
            layout=machine.layout,
            reason=last.reason,
            tolerance=tolerance,
            ranks=where.ranks or job.graph.ranks,
            computation=where.computation,
            devices=tuple((device,) for device in devices),
            values={name: repr(value) for name, value in last.values.items()},
        )
        machine.add_event(
            step,
            "reproduced",
            "",
            runs=runs,
            reason=last.reason,
            tolerance=tolerance,
            **facts_of(attrs.evolve(where, ranks=waiting.ranks), devices),
        )
        self._wait(waiting, before, last.norms, kept)
        return _restart_needed(waiting, devices)

    def _wait(
        self, waiting: PendingStep, before: Before, norms: Mapping[Computation, float], kept: KeptSamples
    ) -> None:
        before.restore(self._trainer.model, self._trainer.device)  # what is saved is the state before the step
        record = RankRecord(samples=kept, norms=norms, generators=before.generators, buffers=before.buffers)
        self._machine.wait(waiting, record)

    def _replay(self, step: int, waiting: PendingStep) -> StepDecision:
        """Run the step that waited from what was read then, and find out whether the device was at fault."""
        machine, trainer = self._machine, self._trainer
        record = machine.record()
        before = Before(generators=record.generators, buffers=record.buffers)
        before.restore(trainer.model, trainer.device)
        proposed = trainer.optimizer.propose(trainer.replay(step, trainer.cut(record.samples)))
        run = self._run(proposed, machine.assess(proposed))
        then = StepRun(
            values={name: float(value) for name, value in waiting.values.items()},
            norms=record.norms,
            reason=waiting.reason,
        )
        devices = all_gather_json(machine.device, trainer.objects)
        off = difference(then, run, trainer.device)
        facts = {"reason": waiting.reason, "difference": off, "tolerance": waiting.tolerance}
        if off > waiting.tolerance:
            return self._tell_persistent(step, before, waiting, record, (then, run), proposed, devices, facts)
        if run.passes is not None:
            machine.clear()
            self._tell_passes(step, (then, run), off=off, tolerance=waiting.tolerance)
            return self._accept(proposed)
        now, settled = waiting.on(devices), waiting.is_settled_on(devices)
        where = Where(computation=waiting.computation, ranks=waiting.ranks)
        machine.add_event(
            step, "correct" if settled else "undecided", "", runs=(then, run), **facts, **facts_of(where, devices)
        )
        self._wait(now, before, record.norms, record.samples)
        if not settled:
            raise _restart_needed(now, devices)
        raise ResultRejectedError(
            f"step {step}",
            expected="a result that can be right",
            got=f"{waiting.reason}, first seen in {words_of(where, waiting.first_devices)}, and so on other devices: "
            "the model or the data make it so",
            fix=f"Leave the step out with rerun.skip_steps=[{step}] and checkpoint.load=latest, or change the model.",
        )

    def _tell_persistent(
        self,
        step: int,
        before: Before,
        waiting: PendingStep,
        record: RankRecord,
        runs: tuple[StepRun, StepRun],
        proposed: StepDecision,
        devices: Sequence[str],
        facts: Mapping[str, object],
    ) -> StepDecision:
        """Say whose device was at fault, and go on with what this one came to, if that can be right."""
        machine = self._machine
        then, run = runs
        where = self._first_divergence(then, run, waiting.tolerance)
        first = waiting.first_devices
        moved = any(devices[rank] not in waiting.devices[rank] for rank in where.ranks)
        text = f"{waiting.reason}, and another result after the restart: " + (
            f"the device was at fault in {words_of(where, first)}"
            if moved
            else f"a fault that has passed, of {words_of(where, first)}"
        )
        machine.clear()
        machine.add_event(
            step, "persistent" if moved else "transient", text, runs=runs, **facts, **facts_of(where, first)
        )
        if run.reason:
            return self._reject(step, before, run, record.samples)
        return self._accept(proposed)

    def _first_divergence(self, one: StepRun, other: StepRun, tolerance: float) -> Where:
        """Return where two runs part first."""
        return self._order.first(
            computation for computation, off in relative_differences(one, other).items() if off > tolerance
        )

    def _wrong(self, run: StepRun) -> Where:
        """Return where a run goes wrong first; nowhere, if no rank sees anything in its own computations."""
        factor, largest = self._machine.settings.spike_factor, self._bounds.values()

        def bound(computation: Computation) -> float:
            return factor * largest[computation] if factor and computation in largest else math.inf

        return self._order.first(wrong(run, bound))


def _restart_needed(waiting: PendingStep, devices: Sequence[str]) -> RestartNeededError:
    where = Where(computation=waiting.computation, ranks=waiting.ranks)
    suspects = words_of(where, devices) if waiting.computation else "all ranks alike, as none of them stands out"
    return RestartNeededError(
        f"step {waiting.step}",
        expected="a result that can be right",
        got=f"{waiting.reason}, also when run again; suspected: {suspects}",
        fix="The state before the step is saved. Restart with checkpoint.load=latest and these ranks on other devices: "
        "another result means that a device was at fault, the same that the model or the data make it so.",
    )

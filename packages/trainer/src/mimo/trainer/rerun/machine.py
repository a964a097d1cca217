"""The rerun machine: assesses the result of a step, keeps what a restart must know, and reports what it found.

It decides by what all ranks agree on, so that all decide the same; `mimo.trainer.rerun.driver` carries it out.
"""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint import Manifest
from mimo.hooks import CheckpointError, Common, RunInfo, Stateful, StateTree, StepInfo, hookimpl
from mimo.launch import ProcessInfo
from mimo.launch.runtime import device_identity
from mimo.optimizer.runtime import StepDecision
from mimo.trainer.config.names import RERUN, RERUN_FILE
from mimo.trainer.job.job import Job
from mimo.trainer.rerun.comparison import StepRun, Where
from mimo.trainer.rerun.passes import Anomaly, PassHistory, read_past
from mimo.trainer.rerun.pending import PendingStep, layout_of
from mimo.trainer.rerun.record import RankRecord
from mimo.trainer.rerun.recorder import Injector, NormRecorder
from mimo.trainer.rerun.state import check_devices, check_state, record_bytes
from mimo.trainer.step.probe import PASSES


class RerunStateMachine:
    """What one rank knows of steps that can't be right; a lifecycle plugin that adds its state to checkpoints.

    The state has the same entries in every checkpoint: ``rerun.state``, the same on all ranks, and for each rank
    ``rerun.rank_<rank>``, the bytes of a `RankRecord`, none while no step waits for a restart.

    Args:
        job: the same on every rank.
        process: this process.

    Attributes:
        settings: those of ``[rerun]``.
        device: identity of what this rank computes on.
        injector: makes the fault that settings ask for.
        recorder: the probe of this rank's trainer; None in mode ``disabled``, which looks at nothing.
        waiting: the step that was to be run again after a restart; None for none.
        save: saves the run as it is, as the checkpoint of a step; set by whoever can.
    """

    name = RERUN

    def __init__(self, job: Job, process: ProcessInfo) -> None:
        self.settings = job.settings.rerun
        self.device = device_identity(process, self.settings.device)
        self.injector = Injector(self.settings.inject, rank=process.rank, device=self.device)
        is_disabled = self.settings.mode == "disabled"
        most = job.plans[-1].microbatches  # as many as each step has where some of the next one is made in it
        self.recorder = None if is_disabled else NormRecorder(microbatches=most, injector=self.injector)
        self.waiting: PendingStep | None = None
        self.save: Callable[[int], object] = _cannot_save
        self.layout = layout_of(job)
        self._job = job
        self._rank = process.rank
        self._scales = job.settings.run.precision == "fp16"
        self._losses: deque[float] = deque(maxlen=self.settings.spike_steps)
        self._norms: deque[float] = deque(maxlen=self.settings.spike_steps)
        self._passes = PassHistory(job.model_graph, self.settings)
        self._measured = 0.0
        self._step = 0
        self._record = _no_record()

    @property
    def tolerance(self) -> float:
        """Relative difference of two runs of a step that is no fault, as far as is known."""
        return self.settings.tolerance or self._measured

    def assess(self, proposed: StepDecision) -> str | Anomaly:
        """Return why the result of a step can't be right; empty if it can, or if the step is skipped anyway.

        Returns:
            What is wrong with loss or gradient norm, or if nothing is, with what passes come to.
        """
        agreed = proposed.agreed
        if not proposed.learns or (self._scales and not agreed.finite):
            return ""
        return self._assess_values(proposed) or self._passes.assess(agreed.extra_sums[PASSES].tolist()) or ""

    def _assess_values(self, proposed: StepDecision) -> str:
        agreed = proposed.agreed
        if not agreed.finite:
            return f"a {'gradient' if math.isfinite(agreed.loss) else 'loss'} that is not finite"
        for what, value, known in (
            ("a loss", proposed.loss, self._losses),
            ("a gradient norm", proposed.norm, self._norms),
        ):
            if self.settings.spike_factor and len(known) == known.maxlen:
                bound = self.settings.spike_factor * max(known)
                if value > bound:
                    times = f"{self.settings.spike_factor:g} times the largest of the last {known.maxlen} steps"
                    return f"{what} of {value:.6g}, above {bound:.6g}, {times}"
        return ""

    def accept(self, proposed: StepDecision) -> None:
        """Take in a step that was found right."""
        if proposed.learns and proposed.agreed.finite:
            self._losses.append(proposed.loss)
            self._norms.append(proposed.norm)
            self._passes.accept(proposed.agreed.extra_sums[PASSES].tolist())

    def measure(self, difference: float) -> None:
        """Take in a difference of two runs of a step that is no fault."""
        if math.isfinite(difference):
            self._measured = max(self._measured, difference)

    def wait(self, waiting: PendingStep, record: RankRecord) -> None:
        """Keep what a restart must know of a step, and save the state before it."""
        self.waiting, self._record = waiting, record.to_bytes()
        self.save(waiting.step - 1)

    def record(self) -> RankRecord:
        """Return this rank's part of the step that waits."""
        return RankRecord.from_bytes(self._record, self._entry)

    def clear(self) -> None:
        """Forget the step that waited."""
        self.waiting, self._record = None, _no_record()

    def add_event(self, step: int, verdict: str, text: str, *, runs: Sequence[StepRun] = (), **facts: Any) -> None:
        """Write an event into the run directory, and say it in words; on rank 0.

        A file that can't be written ends no run; it is said, and the event is lost.
        """
        if self._rank != 0:
            return
        event = {"step": step, "verdict": verdict, **facts, "runs": [dict(run.values) for run in runs]}
        line = f"{json.dumps(_finite(event), allow_nan=False)}\n"
        try:
            self._job.directory.mkdir(parents=True, exist_ok=True)
            with (self._job.directory / RERUN_FILE).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            sys.stderr.write(f"mimo: step {step}: {verdict} is not in {RERUN_FILE}, which can't be written: {error}\n")
        if text:
            sys.stderr.write(f"mimo: step {step}: {text}\n")
        sys.stderr.flush()

    def state(self) -> StateTree:
        """Return what a checkpoint holds of it."""
        known = {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "passes": self._passes.state(),
            "measured": self._measured,
            "waiting": None if self.waiting is None else self.waiting.plain(),
        }
        return {"state": Common(known), f"rank_{self._rank:05}": self._record}

    def expect(self, manifest: Manifest, step_folder: Path) -> None:
        """Make room for what a checkpoint holds of it, before it is loaded.

        Raises:
            CheckpointError: a step waits there that was run in another layout, or what is there is something else.
        """
        known = manifest.common.get(f"{self.name}.state")
        if known is not None:
            check_state(known, step_folder)
            read_past(known.get("passes"), f"{step_folder}: {self.name}.state.passes")
        plain = known["waiting"] if isinstance(known, Mapping) else None
        if plain is not None and self._gives_up(plain["step"]):
            plain = None
        if plain is not None and plain["layout"] != self.layout:
            raise CheckpointError(
                str(step_folder),
                expected=f"the layout, batch and precision in which step {plain['step']} was run, as it is to be run "
                "again from what each rank had read",
                got="another one",
                fix=f"Restart with the settings of the run, or give the step up: rerun.skip_steps=[{plain['step']}].",
            )
        if plain is not None:
            check_devices(plain, step_folder, world=self._job.world)
        size = record_bytes(manifest, self._entry, step_folder)
        if size is not None:
            self._record = torch.empty(size, dtype=torch.uint8)

    def load(self, tree: StateTree) -> None:
        """Take back what `state` gave; a step that waits and is to be left out is forgotten."""
        state = tree["state"]
        assert isinstance(state, Common)
        known = state.value
        self._losses.extend(known["losses"])
        self._norms.extend(known["norms"])
        self._passes.load(read_past(known.get("passes"), f"{self.name}.state.passes"))
        self._measured = float(known["measured"])
        if known["waiting"] is None or self._gives_up(known["waiting"]["step"]):
            self.clear()
        else:
            self.waiting = PendingStep.read(known["waiting"])

    def _gives_up(self, step: int) -> bool:
        """Tell whether settings say that a step that waits is not run again."""
        return self.settings.mode != "validate" or step in self.settings.skip_steps

    @hookimpl
    def mimo_state(self, run: RunInfo) -> list[Stateful]:
        """Return itself."""
        del run
        return [self]

    @hookimpl
    def mimo_step_end(self, run: RunInfo, info: StepInfo) -> None:
        """Remember the last step."""
        del run
        self._step = info.step

    @hookimpl
    def mimo_run_end(self, run: RunInfo) -> None:
        """Tell how far runs of a step were apart, where that was measured."""
        if self.settings.mode == "report_determinism":
            text = f"two runs of a step were {self._measured:.3g} apart at most, relative to their size"
            self.add_event(self._step or run.first_step - 1, "determinism_of_the_run", text, largest=self._measured)

    @property
    def _entry(self) -> str:
        return f"{self.name}.rank_{self._rank:05}"


def facts_of(where: Where, devices: Sequence[str]) -> dict[str, Any]:
    """Return who and what an event names.

    Args:
        where: what went wrong first.
        devices: identities by rank.
    """
    computation = where.computation
    return {
        "ranks": list(where.ranks),
        "devices": [devices[rank] for rank in where.ranks],
        "module": None if computation is None else computation.module,
        "stage": None if computation is None else computation.stage,
        "microbatches": None if computation is None else list(computation.microbatches),
        "what": None if computation is None else computation.kind,
    }


def words_of(where: Where, devices: Sequence[str]) -> str:
    """Return the same in words."""
    if where.computation is None:
        return "no computation that ranks can tell of alone"
    ranks = " and ".join(f"rank {rank} ({devices[rank]})" for rank in where.ranks)
    computation = where.computation
    what = {
        "forward": "the forward",
        "loss": "the loss",
        "backward": "the backward",
        "tied": "the gradients of tied parameters",
        "gradients": "the gradients of parameters",
    }[computation.kind]
    served = f" for microbatch {', '.join(map(str, computation.microbatches))}" if computation.microbatches else ""
    return f"{what} of {computation.module} stage {computation.stage}{served} on {ranks}"


def _finite(value: Any) -> Any:
    """Return plain data with texts in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _no_record() -> Tensor:
    return torch.zeros(0, dtype=torch.uint8)


def _cannot_save(_step: int) -> None:
    msg = "nobody has said how this run is saved"
    raise AssertionError(msg)

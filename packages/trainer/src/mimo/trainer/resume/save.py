"""Saving a run: what a checkpoint holds of it, where it goes, and what becomes of one that can't be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mimo.checkpoint import Saver, WriteError, save
from mimo.hooks import CheckpointError, SaveSkippedError, Stateful
from mimo.topology import AXES, Grid
from mimo.trainer.config.names import BASE, CHECKPOINTS
from mimo.trainer.resume.run_state import RunState, other_state
from mimo.trainer.step.trainer import Trainer


class Saving:
    """Saves the steps of one run as ``[checkpoint]`` says; collective, like the `Saver` inside.

    A disk that is full must not end a run: files that can't be written are reported, and the run continues.
    Only where nothing comes after, with ``now``, the error is raised. Any other failure of saving is a mistake, and
    raised by whatever is called next.

    Args:
        trainer: what is trained.
        state: what the run began with.
        parts: what plugins add.
        on_failure: called with the last step trained and what could not be written, or was left out.
    """

    def __init__(
        self,
        trainer: Trainer,
        state: RunState,
        parts: Iterable[Stateful],
        on_failure: Callable[[int, CheckpointError], None],
    ) -> None:
        settings = trainer.job.settings.checkpoint
        self._trainer = trainer
        self._state = state
        self._parts = list(parts)
        self._on_failure = on_failure
        self._saver = Saver(
            trainer.job.directory / CHECKPOINTS,
            asynchronous=settings.asynchronous,
            when_busy=settings.when_busy,
            assume_constant_structure=settings.assume_constant_structure,
            keep=settings.keep or None,
            keep_every=settings.keep_every or None,
            on_progress=trainer.heartbeat,
            group=trainer.objects,
        )

    def save(self, step: int, *, now: bool = False, resumes_exactly: bool = False) -> None:
        """Save model, optimizer, progress and the plugins' state after ``step``.

        Args:
            step: the last one trained.
            now: return when it is committed, for whoever is about to leave; waits for the one before.
            resumes_exactly: hold optimizer states also where settings leave them out, for a run that must go through
                its next step again as it was.

        Raises:
            WriteError: with ``now``, its files could not be written.
            CheckpointError: something can't be saved, or ranks disagree on it.
        """
        if now:
            self._saver.wait()
            self.report(step)
        contents = _contents(self._trainer, self._state, self._parts, step, resumes_exactly=resumes_exactly)
        try:
            saved = self._saver.save(step, now=now, **contents)
        except WriteError as error:
            if now:
                raise
            self._on_failure(step, error)
        else:
            if saved is None:
                self._on_failure(step, _skipped(step))

    def report(self, step: int) -> None:
        """Tell what has failed in the background up to now; ``step`` is the last one trained.

        Raises:
            CheckpointError: it is not that files could not be written.
            RuntimeError: the other ranks were lost while a step was written.
        """
        while (failure := self._saver.take_failure()) is not None:
            if not isinstance(failure, WriteError):
                raise failure
            self._on_failure(step, failure)

    def close(self) -> None:
        """Wait for what is still being written; afterwards nothing can be saved."""
        self._saver.close()


def save_step(trainer: Trainer, state: RunState, parts: Iterable[Stateful], step: int) -> Path:
    """Save one step of a run that saves no other, as `Saving` does it, and return its folder."""
    return save(trainer.job.directory / CHECKPOINTS, step, **_contents(trainer, state, parts, step))


def _skipped(step: int) -> SaveSkippedError:
    return SaveSkippedError(
        f"step {step}",
        expected="the checkpoint before it to be written",
        got='one that is still being written, and checkpoint.when_busy = "skip"',
        fix="A longer checkpoint.interval leaves it the time.",
    )


def _contents(
    trainer: Trainer, state: RunState, parts: Iterable[Stateful], step: int, *, resumes_exactly: bool = False
) -> dict[str, Any]:
    job = trainer.job
    tree = trainer.state() if job.settings.checkpoint.optimizer or resumes_exactly else trainer.model_state()
    if state.left_out is not None:
        left = trainer.parts.constants()
        for module in job.modules:
            held = tree.get(module.name, {})
            tree[module.name] = {path: one for path, one in held.items() if f"{module.name}.{path}" not in left}
        tree[BASE] = state.left_out.state(job.directory / CHECKPOINTS)
    return {
        "tree": {**tree, **other_state(trainer, state, parts, step)},
        "config": job.plain,
        "topology": {module.name: _grid(module.grid) for module in job.modules},
    }


def _grid(grid: Grid) -> dict[str, Any]:
    return {"ranks": list(grid.ranks), **dict(zip(AXES, grid.shape, strict=True))}

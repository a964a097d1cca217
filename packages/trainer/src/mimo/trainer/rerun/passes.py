"""What passes have come to of late, by module, stage and direction: a step with one far above that is run again.

A pass comes to the root mean square of its rows. Each rank adds up what its own passes come to, and the sums of all
ranks travel in the step's one message, so that all ranks decide from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from mimo.hooks import CheckpointError
from mimo.topology import ModuleGraph
from mimo.trainer.config.rerun_settings import RerunSettings
from mimo.trainer.rerun.recorder import POWER
from mimo.trainer.step.probe import Computation, computations

WARM_UP = 5
"""Steps of which passes must have been accepted before the bound counts, unless settings ask for fewer."""

_SHARE = 4
"""What all passes come to is at most as many times the largest, for 65,536 passes."""

_PHRASES = {
    "forward": "rows that {} makes",
    "backward": "gradients that {} sends back",
    "gradients": "gradients of the parameters of {}",
}


@attrs.frozen(kw_only=True)
class Anomaly:
    """What of a step is far above its past, or not finite.

    Args:
        computation: module, stage and direction, without microbatches.
        value: what its passes come to.
        reason: the same in words.
    """

    computation: Computation
    value: float
    reason: str

    def shared_by(self, sizes: Mapping[Computation, float]) -> list[Computation]:
        """Return the passes of one rank that make it so, by what each came to, the scale of gradients included."""
        own = {
            computation: size
            for computation, size in sizes.items()
            if attrs.evolve(computation, microbatches=()) == self.computation
        }
        if not math.isfinite(self.value):
            return [computation for computation, size in own.items() if not math.isfinite(size)]
        return [computation for computation, size in own.items() if size >= self.value / _SHARE]


@attrs.frozen(kw_only=True)
class Past:
    """What passes of one module, stage and direction have come to of late.

    Args:
        now: the largest of this window of `RerunSettings.spike_steps` accepted steps; infinite after a step that was
            accepted with what is not finite.
        before: the largest of the window before.
        steps: how many were accepted.
    """

    now: float = 0.0
    before: float = 0.0
    steps: int = 0

    @property
    def largest(self) -> float:
        """The largest of late; what is two windows old is forgotten, however large it was."""
        return max(self.now, self.before)

    def then(self, value: float, window: int) -> Past:
        """Return it with one more step."""
        is_finite = math.isfinite(self.now)
        begins = self.steps % window == 0
        return Past(
            now=max(value, 0.0 if begins or not is_finite else self.now) if math.isfinite(value) else math.inf,
            before=self.now if begins and is_finite else self.before,
            steps=self.steps + 1,
        )


class PassHistory:
    """Judges what the passes of a step come to by what they have come to of late.

    Args:
        graph: modules as they are built.
        settings: those of ``[rerun]``.
    """

    def __init__(self, graph: ModuleGraph, settings: RerunSettings) -> None:
        self._computations = computations(graph)
        self._names = [
            f"{one.kind} of {one.module}, stage {one.stage} of {graph.by_name[one.module].stages}"
            for one in self._computations
        ]
        self._factor = settings.pass_factor
        self._window = settings.spike_steps
        self._warm_up = min(WARM_UP, settings.spike_steps)
        self._past: dict[str, Past] = {}

    def assess(self, sums: Sequence[float]) -> Anomaly | None:
        """Return what can't be right and comes first in a step; None if all can.

        Args:
            sums: of `NormRecorder.sums`, over all ranks.
        """
        for name, computation, value in self._values(sums):
            past, what = (
                self._past.get(name),
                _PHRASES[computation.kind].format(f"{computation.module} stage {computation.stage}"),
            )
            if not math.isfinite(value) and (past is None or math.isfinite(past.largest)):
                return Anomaly(computation=computation, value=value, reason=f"{what} that are not finite")
            if past is None or past.steps < self._warm_up or not self._factor:
                continue
            bound = self._factor * past.largest
            if value > bound:
                reason = (
                    f"{what} of a root mean square of {value:.6g}, above {bound:.6g}, {self._factor:g} times the "
                    "largest of late"
                )
                return Anomaly(computation=computation, value=value, reason=reason)
        return None

    def accept(self, sums: Sequence[float]) -> None:
        """Take in a step that was accepted."""
        for name, _, value in self._values(sums):
            self._past[name] = self._past.get(name, Past()).then(value, self._window)

    def state(self) -> dict[str, list[float]]:
        """Return what a checkpoint holds of it, the fields of `Past` by name; what isn't finite begins anew."""
        return {name: [*attrs.astuple(past)] for name, past in self._past.items() if math.isfinite(past.now)}

    def load(self, past: Mapping[str, Past]) -> None:
        """Take back what `state` gave, as `read_past` returned it.

        Names hold the stages of their module: stages of a pipeline of another length begin anew.
        """
        self._past = {name: past[name] for name in self._names if name in past}

    def _values(self, sums: Sequence[float]) -> Iterator[tuple[str, Computation, float]]:
        """Yield what passes come to, those that were empty or only zeros left out."""
        for name, computation, total in zip(self._names, self._computations, sums, strict=True):
            if total != 0.0:
                yield name, computation, total ** (1 / POWER)


def read_past(plain: object, where: str) -> dict[str, Past]:
    """Return the past of a checkpoint.

    Args:
        plain: what `PassHistory.state` gave; None in a checkpoint of before it was kept.
        where: names it in errors: file and key.

    Raises:
        CheckpointError: it is something else.
    """
    if plain is None:
        return {}
    if not isinstance(plain, Mapping):
        raise _damaged(where, plain)
    return {str(name): _past(value, f"{where}.{name}") for name, value in plain.items()}


def _past(value: Any, where: str) -> Past:
    if not isinstance(value, list) or [type(one) for one in value] != [float, float, int]:
        raise _damaged(where, value)
    now, before, steps = value
    if not (0 <= now < math.inf and 0 <= before < math.inf) or steps < 0:
        raise _damaged(where, value)
    return Past(now=now, before=before, steps=steps)


def _damaged(where: str, value: object) -> CheckpointError:
    return CheckpointError(
        where,
        expected="the two largest of late of each kind of passes, finite numbers of 0 or more, and a count of steps",
        got=repr(value)[:80],
        fix="Load another checkpoint.",
    )

"""What `mimo check` says of the time in which a rank reads a step's samples, measured on some of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np

from mimo.data import SampleLayout, origin_of, sources_of
from mimo.hooks import DataError
from mimo.schedule import simulate
from mimo.trainer.commands.tables.simulation import show_seconds
from mimo.trainer.cost.step_cost import job_costs
from mimo.trainer.job.job import Job
from mimo.trainer.job.measured_dataset import encodes

_SAMPLES = 64
_MAX_SECONDS = 1.0
"""After which no further sample is begun."""
_CONSIDERABLE = 0.25
"""Share of a step from which on it matters: the thread that reads takes turns with the one that steps."""


@attrs.frozen(kw_only=True)
class ReadingTime:
    """What it takes to lay out samples, as each rank does with all those of a step.

    Args:
        samples: that were measured, without those that are left out as too long.
        tokens: of these.
        labels: of these tokens, those that are learned.
        cut: samples that are cut.
        seconds: for all that were read.
        encoded: whether any text was encoded, as no index keeps its ids.
        failures: what is wrong with those that can't be read.
    """

    samples: int
    tokens: int
    labels: int
    cut: int
    seconds: float
    encoded: bool
    failures: Sequence[str] = ()

    @classmethod
    def of(cls, job: Job, clock: Callable[[], float] = time.perf_counter) -> ReadingTime:
        """Measure samples that come after those of the first step."""
        assert job.train is not None, "this job was resolved without training data"
        layouts, seconds, encoded, failures = list[SampleLayout](), 0.0, False, list[str]()
        for sample in job.sample_order().read(job.settings.most_samples, _SAMPLES).tolist():
            begun = clock()
            try:
                layout = job.lay_out(job.train, sample)
            except DataError as error:  # the step that needs it raises
                failures.append(str(error))
                continue
            seconds += clock() - begun
            if not (layout.truncated and job.settings.data.longer == "drop"):
                layouts.append(layout)
                encoded = encoded or encodes(job.train, sample)
            if seconds > _MAX_SECONDS:
                break
        return cls(
            samples=len(layouts),
            tokens=sum(len(layout.tokens) for layout in layouts),
            labels=sum(int(np.count_nonzero(layout.targets)) for layout in layouts),
            cut=sum(layout.truncated for layout in layouts),
            seconds=seconds,
            encoded=encoded,
            failures=failures,
        )


def show_reading(job: Job, reading: ReadingTime) -> Iterator[str]:
    """Yield what a rank takes to read a step's samples, to what that bounds a run, and what to do where it is long.

    Also which samples can't be trained on.
    """
    assert job.train is not None, "samples of it were measured"
    if reading.failures:
        count = len(reading.failures)
        yield f"{count} of {count + reading.samples} samples that were looked at can't be read: {reading.failures[0]}"
    if not reading.samples:
        if not reading.failures:
            yield "no sample that was looked at is trained on: data.longer drops all, longer than data.max_tokens"
        return
    if not reading.labels and not job.generators:
        cut = f"; data.max_tokens cuts {reading.cut} of them" if reading.cut else ""
        yield (
            f"no token of the {reading.samples} samples that were looked at is learned{cut}: steps of such samples "
            "are skipped. `mimo data show FILE` shows what of a sample is learned"
        )
    run = job.settings.run
    samples = run.global_batch or run.batch_tokens * reading.samples / reading.tokens
    seconds = samples * reading.seconds / reading.samples
    texts = "whose texts it encodes" if reading.encoded else "whose ids are kept"
    rates = [_rounded(count / reading.seconds) for count in (reading.samples, reading.tokens)]
    yield (
        f"each rank reads all {_rounded(samples)} samples of a step, {texts}, in {show_seconds(seconds)}, as measured "
        f"on {reading.samples} samples here: a run reads at most {rates[0]} samples or {rates[1]} tokens a second"
    )
    matters, profile = True, job.settings.schedule.profile
    if profile:
        step = simulate(job.plan, job.graph, job_costs(job)).seconds
        matters = seconds >= _CONSIDERABLE * step
        yield f"that is {seconds / step:.3g} of the {show_seconds(step)} of a step, simulated by the profile {profile}"
    could_keep = any(origin_of(source) is not None for _, source in sources_of(job.train))
    if matters and could_keep and reading.encoded:
        yield "`mimo data index FILE --tokens` keeps the ids, so that no text is encoded in a run"


def _rounded(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.12g}"

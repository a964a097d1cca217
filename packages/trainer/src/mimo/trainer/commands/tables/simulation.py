"""The simulation of `mimo simulate`: a step of a job as files and as a summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mimo.hooks import ConfigError, DataError, PlanError
from mimo.schedule import Costs, Simulation, check, plans_from_json, simulate, write_page, write_trace
from mimo.topology import show_ranks
from mimo.trainer.batch.balance import step_balance, step_seconds
from mimo.trainer.commands.tables.memory import show_bytes
from mimo.trainer.config.settings import Balance
from mimo.trainer.cost.step_cost import job_costs
from mimo.trainer.job.job import Job

TRACE_FILE = "trace.json"
PAGE_FILE = "timeline.html"
_FIRST = ("warm-up",)
_LAST = ("transfer", "peers", "drain")


@attrs.frozen(kw_only=True)
class Simulated:
    """A step of a job, played through.

    Args:
        job: whose.
        simulation: what came of it.
        origin: where the costs come from, in words.
        files: what was written.
        placed: seconds of the first step as its slowest lanes take it, by how its samples are placed; none where that
            makes no difference, or they can't be read.
    """

    job: Job
    simulation: Simulation
    origin: str
    files: tuple[Path, ...]
    placed: Mapping[Balance, float]


def read_plan(job: Job, path: Path) -> Job:
    """Return the job with the plan of a file, proved for the job's modules.

    Raises:
        ConfigError: the file cannot be read.
        PlanError: it holds no plan, or one that does not fit the job or could deadlock.
    """
    try:
        plans = plans_from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--plan", expected="a plan that can be read", got=f"{str(path)!r}: {error}") from error
    numbers = [[plan.microbatches for plan in one] for one in (plans, job.plans)]
    if numbers[0] != numbers[1]:
        got, expected = (", ".join(map(str, one)) for one in numbers)
        raise PlanError(
            str(path),
            expected=f"a plan of {expected} microbatches, as these settings have in a step",
            got=got,
        )
    for plan in plans:
        check(plan, job.graph)
    return attrs.evolve(job, plans=plans)


def simulate_job(job: Job, folder: Path) -> Simulated:
    """Play the plan of a step through, and write its trace and its page into ``folder``.

    Raises:
        ConfigError: the folder cannot be written, or the costs cannot be read.
    """
    origin = origin_of(job)
    costs = job_costs(job)
    simulation = simulate(job.plan, job.graph, costs)
    timeline = attrs.evolve(simulation.timeline, name=f"{job.plan.schedule}, simulated {origin}")
    files = (folder / TRACE_FILE, folder / PAGE_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_trace(files[0], [timeline])
        write_page(files[1], [timeline], title=f"{job.settings.run.name}: one step")
    except OSError as error:
        raise ConfigError(
            "--out", expected="a folder that can be written", got=f"{str(folder)!r}: {error.strerror}"
        ) from error
    return Simulated(job=job, simulation=simulation, origin=origin, files=files, placed=placed_seconds(job, costs))


def placed_seconds(job: Job, costs: Costs) -> Mapping[Balance, float]:
    """Return how long the first step takes as its slowest lanes do, by how its samples are placed.

    Nothing, where there is one place for them, or they can't be read: the step that needs them raises.
    """
    if job.train is None or (job.plans[-1].microbatches == 1 and all(module.grid.dp == 1 for module in job.modules)):
        return {}
    try:
        found = step_balance(job, 1)
    except DataError:
        return {}
    return {how: step_seconds(job, costs, balance) for how, balance in found.items()}


def origin_of(job: Job) -> str:
    """Return where a job's costs come from, in words."""
    profile = job.settings.schedule.profile
    return f"by the profile {profile}" if profile else "by formula"


def show_simulated(console: Console, simulated: Simulated) -> None:
    """Print step time, bubbles by cause, and what ranks keep at most."""
    job, simulation = simulated.job, simulated.simulation
    console.print(
        f"{job.plan.schedule}, {job.microbatches} microbatches: a step takes {show_seconds(simulation.seconds)}, "
        f"simulated {simulated.origin}",
        markup=False,
    )
    if len(job.plans) > 1:
        others = ", ".join(str(plan.microbatches) for plan in job.plans[1:])
        console.print(f"That is a step that is filled to the last token; others have {others} microbatches.")
    if not job.settings.schedule.profile:
        console.print("A formula tells how parts relate rather than how long they take: measure with `mimo profile`.")
    if simulated.placed:
        times = ", ".join(f"{show_seconds(one)} placed by {how}" for how, one in simulated.placed.items())
        console.print(f"as the slowest lanes of the first step take it: {times} (here by {job.balance})")
    console.print()
    console.print("share of the step")
    console.print(_bubbles(job, simulation))
    console.print()
    console.print("activations kept at most")
    console.print(_peaks(job, simulation))
    console.print()
    for path in simulated.files:
        console.print(Text(str(path)), soft_wrap=True)


def show_seconds(seconds: float) -> str:
    """Return seconds in a unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            return f"{seconds / size:.4g} {unit}"
    raise AssertionError


def _bubbles(job: Job, simulation: Simulation) -> Table:
    found = {cause for idle in simulation.bubbles.values() for cause in idle}
    modules = [module.name for module in job.modules]
    causes = [cause for cause in (*_FIRST, *modules, *_LAST) if cause in found]
    table = Table(box=None, pad_edge=False)
    table.add_column("ranks")
    for heading in ("work", *(f"for {cause}" if cause in modules else cause for cause in causes)):
        table.add_column(heading, justify="right")
    for ranks, rank in _actors(job):
        idle: Mapping[str, float] = simulation.bubbles[rank]
        shares = (simulation.work[rank], *(idle.get(cause, 0) for cause in causes))
        table.add_row(ranks, *(_share(seconds, simulation.seconds) for seconds in shares))
    return table


def _peaks(job: Job, simulation: Simulation) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ranks")
    for module in job.modules:
        table.add_column(module.name, justify="right")
    table.add_column("together", justify="right")
    for ranks, rank in _actors(job):
        peaks = simulation.peak_bytes[rank]
        cells = (show_bytes(peaks[module.name]) if module.name in peaks else "-" for module in job.modules)
        table.add_row(ranks, *cells, show_bytes(simulation.peak_total[rank]))
    return table


def _actors(job: Job) -> list[tuple[str, int]]:
    """Return the ranks of each actor, and the first of them."""
    return [(show_ranks(actor.ranks), actor.ranks[0]) for actor in job.plan.actors]


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if seconds and whole else "-"

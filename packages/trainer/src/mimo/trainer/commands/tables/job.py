"""What `mimo check` prints: settings, grids, memory and plan as tables and text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mimo.schedule import Action, ActorPlan, Plan
from mimo.topology import AXES, EXPERT_AXES, Module, show_ranks
from mimo.trainer.commands.tables.data_index import show_index
from mimo.trainer.commands.tables.memory import show_memory, show_on_device
from mimo.trainer.commands.tables.module_stats import show_module_stats
from mimo.trainer.cost.sample_stats import SampleStats, step_samples
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.resume.directory import holds_run, left_nothing

if TYPE_CHECKING:
    from mimo.model.runtime import Compilation
    from mimo.trainer.batch.balance import StepBalance
    from mimo.trainer.config.settings import Balance
    from mimo.trainer.cost.memory import RankMemory
    from mimo.trainer.cost.module_stats import ModuleStats
    from mimo.trainer.cost.parameter_names import Followers
    from mimo.trainer.step.traffic import ExpectedTraffic

_LETTERS: Mapping[str, str] = {
    "forward": "F",
    "backward": "B",
    "input-gradient": "I",
    "weight-gradient": "W",
    "send": "s",
    "receive": "r",
    "reduce": "R",
}
LEGEND = (
    "F forward, B backward, I input gradient, W weight gradient, s send, r receive, each with its microbatch; "
    "R reduce gradients"
)
_PASSING: Mapping[str, object] = {"chunks": 1, "batch_factor": 1, "prefetch": False, "recompute": "none"}
"""Settings of modules that are shown where one differs from the default."""


def show_job(
    console: Console,
    job: Job,
    memory: Mapping[int, RankMemory],
    traffic: Iterable[ExpectedTraffic] = (),
    *,
    followers: Mapping[str, Mapping[str, Followers]] = MappingProxyType({}),
    stats: Sequence[ModuleStats] = (),
    machine: int = 0,
    changes: Iterable[str] = (),
    compiled: Iterable[tuple[str, Compilation]] = (),
    reading: Sequence[str] = (),
    balance: Callable[[], Mapping[Balance, StepBalance]] | None = None,
) -> None:
    """Print what a job will be: a summary, each rank's place and memory, the plan, and what its first step sends.

    Args:
        console: where to.
        job: which.
        memory: what each rank will hold.
        traffic: what ranks send; taken last, as it needs data, which may be unreadable, and the rest does not.
        followers: what follows which pattern of the optimizer, of each module that has any.
        stats: parameters and operations of each part of the model.
        machine: ranks of a machine; 0 for all.
        changes: in what the order of samples differs from what the checkpoint has that it resumes.
        compiled: what of each module is compiled, if anything is to be.
        reading: lines on what it takes to read the samples of a step.
        balance: returns how evenly lanes share the first step; called last, likewise.
    """
    run = job.settings.run
    held = " (it holds a run)" if holds_run(job.directory) and not left_nothing(job.directory) else ""
    samples = "none" if job.train is None else f"{len(job.train)}"
    held_out = "none" if job.evaluation is None else f"{len(job.evaluation)}"
    rows = [
        ("run", f"{run.name}, {run.steps} steps, seed {run.seed}, {run.precision}, in {job.directory}{held}"),
        ("processes", str(job.world)),
        ("batch", _batch(job)),
        ("data", f"{job.settings.data.plugin}, {samples} samples to train on, {held_out} held out"),
        *(() if job.train is None else _sources(job)),
        *(("resumes with", change) for change in changes),
        *(("index", line) for split in (job.train, job.evaluation) if split is not None for line in show_index(split)),
        ("tokenizer", f"{job.settings.tokenizer.plugin}, {job.tokenizer.vocabulary} ids"),
        ("schedule", job.plan.schedule),
        *(("compiled", _compilation(name, one, run.compile_backend)) for name, one in compiled),
    ]
    summary = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        summary.add_row(*map(Text, row))
    console.print(summary)
    console.print()
    console.print(_modules(job))
    console.print()
    if stats:
        size = f"{run.global_batch} samples" if run.global_batch else f"{run.batch_tokens} tokens, of samples"
        console.print(f"parameters, and 10^12 operations of a step of {size} like the first ones")
        console.print(show_module_stats(stats))
        console.print()
    for line in reading:
        console.print(Text(line), soft_wrap=True)
    if reading:
        console.print()
    if followers:
        console.print(_patterns(job, followers))
        console.print()
    console.print(_ranks(job, memory))
    console.print()
    for part in show_memory(memory, job.world, machine or job.world):
        console.print(part)
        console.print()
    filled = "" if len(job.plans) == 1 else f" of {job.microbatches} microbatches"
    console.print(f"plan of a step{filled} ({LEGEND})", markup=False)
    for line in show_plan(job.plan):
        console.print(Text(line, overflow="fold"))
    if edges := list(traffic):
        console.print()
        console.print("rows that ranks send on edges in the first step, and their gradients on the way back")
        console.print(_traffic(edges))
    if balance is not None and any(module.grid.dp > 1 for module in job.modules):
        console.print()
        console.print("time of the slowest lanes in the first step, over that of lanes that all have the same to do")
        console.print(_balance(job, balance()))


def _compilation(name: str, compilation: Compilation, backend: str) -> str:
    """Return what of a module is compiled, and what stays eager and why."""
    if not compilation.layers:
        return f"{name}: nothing, as {compilation.eager['']}"
    layers = " and ".join(f"{count} {kind}" for kind, count in compilation.layers.items())
    eager = "".join(f"; {part} in them stays eager, as {why}" for part, why in compilation.eager.items())
    return f"{name}: {layers} by {backend}{eager}"


def _balance(job: Job, balance: Mapping[Balance, StepBalance]) -> Table:
    """Return for each module how much its slowest lanes take, as samples are placed and as they could be."""
    table = Table(box=None, pad_edge=False)
    table.add_column("module")
    for how in balance:
        table.add_column(f"by {how}{' (here)' if how == job.balance else ''}", justify="right")
    for module in job.modules:
        table.add_row(module.name, *(f"{one.slowest(module.name):.2f}" for one in balance.values()))
    return table


def show_plan(plan: Plan) -> Iterator[str]:
    """Yield each actor's actions as one line of short words."""
    for actor in plan.actors:
        yield f"ranks {show_ranks(actor.ranks)}: {' '.join(_words(actor))}"


def _batch(job: Job) -> str:
    """Return what a step is made of."""
    run, lanes = job.settings.run, job.language.grid.dp
    if run.global_batch:
        return f"{run.global_batch} samples = {job.microbatches} microbatches x {run.micro_batch} x {lanes} lanes"
    numbers = ", ".join(str(plan.microbatches) for plan in job.plans)
    return f"{run.batch_tokens} tokens in {numbers} microbatches x {run.micro_tokens} tokens x {lanes} lanes"


def _sources(job: Job) -> Iterator[tuple[str, str]]:
    """Yield what the data are made of, how much of the run's samples it is, and how often each of its own comes up."""
    order = job.sample_order()
    about = "" if job.settings.run.global_batch else "about "
    total = job.settings.run.steps * step_samples(job, SampleStats.of(job)) if len(order.parts) > 1 else 0
    for part in order.parts if len(order.parts) > 1 else ():
        share = order.shares[part.name]
        epochs = total * share / part.samples
        yield (
            f"  {part.name}",
            f"{part.samples} samples, {100 * share:.3g}% of those that are read, {about}{epochs:.3g} epochs",
        )


def _modules(job: Job) -> Table:
    experts = any(module.experts for module in job.model_graph.modules)
    passing = [key for key, usual in _PASSING.items() if any(getattr(it, key) != usual for it in job.modules)]
    table = Table(box=None, pad_edge=False)
    spread_axes = EXPERT_AXES[2:] if experts else ()
    for heading in ("module", "plugin", "ranks", *AXES, *spread_axes, *passing, "frozen", "optimizer"):
        table.add_column(heading)
    for module in job.modules:
        spread = map(str, module.grid.expert_shape[2:]) if job.model_graph.by_name[module.name].experts else ("-", "-")
        table.add_row(
            module.name,
            module.spec.name,
            show_ranks(module.grid.ranks),
            *map(str, module.grid.shape),
            *(spread if experts else ()),
            *(str(getattr(module, key)) for key in passing),
            _frozen(module),
            module.optimizer.spec.name,
        )
    return table


def _frozen(module: JobModule) -> str:
    parts = () if isinstance(module.frozen, bool) else sorted(module.frozen)
    found = "all" if module.frozen is True else ", ".join(parts) or "-"
    return found if module.lora is None else f"{found} (LoRA of rank {module.lora.rank})"


def _patterns(job: Job, followers: Mapping[str, Mapping[str, Followers]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("module", "parameters of", "optimizer", "lr", "clip group", "clip"):
        table.add_column(heading)
    for heading in ("parameters", "elements"):
        table.add_column(heading, justify="right")
    for name, found in followers.items():
        rules = job.module(name).optimizer.rules
        for where, rule in [*((one.where, one.rule) for one in rules.patterns), ("", rules.base)]:
            if where in found:
                clip = job.settings.optimizer.clip_of(rule.clip_group)
                group, most = rule.clip_group or "-", f"{clip:g}" if clip else "-"
                counts = (f"{found[where].parameters:,}", f"{found[where].elements:,}")
                cells = (
                    name,
                    where or "no pattern",
                    rule.spec.name,
                    f"{rule.learning_rate.lr:g}",
                    group,
                    most,
                    *counts,
                )
                table.add_row(*map(Text, cells))
    return table


def _ranks(job: Job, memory: Mapping[int, RankMemory]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", *(module.name for module in job.modules), "parameters, gradients, optimizer"):
        table.add_column(heading)
    for rank in range(job.world):
        cells = [_place(module, rank) for module in job.model_graph.modules]
        table.add_row(str(rank), *cells, show_on_device(memory[rank]) if rank in memory else "idle")
    return table


def _place(module: Module, rank: int) -> str:
    if rank not in module.grid:
        return "-"
    place = attrs.asdict(module.grid.coordinates(rank))
    if module.chunks > 1:
        place = {"stages" if key == "pp" else key: at for key, at in place.items()}
        place["stages"] = show_ranks(module.stages_at(module.grid.coordinates(rank).pp))
    if module.experts:
        place |= attrs.asdict(module.grid.expert_coordinates(rank))
    return " ".join(f"{axis} {at}" for axis, at in place.items() if axis != "edp")


def _traffic(edges: Iterable[ExpectedTraffic]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("edge", "rank", "rows", "bytes", "rows in place", "gradient rows", "gradient bytes"):
        table.add_column(heading, justify="left" if heading in {"edge", "rank"} else "right")
    for expected in edges:
        name = expected.edge.name
        columns = attrs.astuple(expected.traffic, recurse=False)
        for rank, found in enumerate(zip(*columns, strict=True)):
            if any(found):
                table.add_row(name, str(rank), *(f"{one:,}" for one in found))
        table.add_row(name, "all", *(f"{sum(column):,}" for column in columns))
        if expected.least is not None:
            table.add_row(name, "least", f"{expected.least:,}")
    return table


def _words(actor: ActorPlan) -> Iterator[str]:
    several = len({action.stage_id for action in actor.actions}) > 1
    edges = {action.edge for action in actor.actions if action.edge is not None}
    return (_word(action, with_stage=several, with_edge=len(edges) > 1) for action in actor.actions)


def _word(action: Action, *, with_stage: bool, with_edge: bool) -> str:
    word = _LETTERS[action.kind] + "+".join(map(str, action.microbatches))
    if with_stage:
        word = f"{action.module}.{action.stage}:{word}"
    return f"{word}({action.edge})" if with_edge and action.edge is not None else word

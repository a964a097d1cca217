"""Layouts of several ranks that share one device, launched as `mimo train` launches them, beside a plain CPU process.

NCCL refuses two ranks on one GPU, so what they send is staged through host memory (`_staged`); all else is as on many
GPUs. Ranks of a launch go through all layouts of their number, each with process groups of its own.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from _case import Case, Found, noting, plain_arithmetic, run
from _compare import RelativeDifference, missed, relative_difference
from _staged import RENDEZVOUS
from jobs import prepare
from oracle import Oracle, Outcome, read_outcome, run_layout, write_outcome
from tables import EVEN_EPS, Table, scheduled, table, world_of
from tables import alone as on_one_rank
from test_oracle import CLEAR_SEEDS, EXPERTS, LAYOUTS, SLICED, TIED, on
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_mamba import SEED
from test_oracle_mixed import settings_of as mixed
from truth import Truth, run_plain

from mimo.launch import ProcessInfo
from mimo.launch.runtime import Terms, launch, start_method
from mimo.testing import Pool

FULL = {"plugin": "distributed", "shard": "full"}
OFFLOADED = {"plugin": "cpu-offload", "fraction": 0.5, "bucket_bytes": 2048, "staging_bytes": 0}
TIMEOUT = 60.0
"""For a layout: of the time that `day.py` gives a number of ranks enough is left to compare all before it."""
AGAIN_SECONDS = 75.0
"""So long after its begin a test still launches those after a layout that failed."""


def _stepped(settings: Table, optimizer: Mapping[str, Any]) -> Table:
    return {**settings, "optimizer": {**settings["optimizer"], **optimizer}}


def _experts(layout: str, scores: str) -> Table:
    keys, seed = CLEAR_SEEDS[scores]
    return table(EXPERTS[layout], microbatches=2, language=keys, seed=seed)


def _hybrid(language: Mapping[str, Any]) -> Table:
    modules = {"vision": on(0, 1), "language": {**language, "plugin": "hybrid", "config": HYBRID}}
    return table(modules, microbatches=2, seed=SEED, eps=EVEN_EPS)


def _plain(layout: str, microbatches: int = 4) -> Table:
    return table({**LAYOUTS, **SLICED}[layout], microbatches=microbatches)


def layouts() -> Mapping[int, Mapping[str, Table]]:
    """Return settings by number of ranks and name; the first of each number is the tiny one."""
    lanes = {"vision": on(0, 1), "language": on(0, 1)}
    named = {
        "one rank each": _plain("1+1"),
        "colocated, tensor ranks to lanes": _plain("colocated, vision tp2, language dp2"),
        "pipelines in both": _plain("colocated, pipelines in both"),
        "two lanes, all spread over them": _stepped(table(lanes, microbatches=2), FULL),
        "two lanes, half of the state on the host": _stepped(table(lanes, microbatches=2), OFFLOADED),
        "sequence parallel": _plain("language tp2 sp"),
        "context ranks": _plain("language cp2"),
        "experts over lanes": _experts("ep2 over lanes", "softmax"),
        "disjoint": _plain("disjoint 2+2"),
        "colocated lanes, tensor ranks": _stepped(_plain("colocated, vision dp4, language tp2 dp2"), FULL),
        "context and tensor slices on both": _plain("vision cp2 tp2 sp on the language's cp2 tp2 sp"),
        "zero bubble in a V": scheduled(
            table({"vision": on(0, 1), "language": on(2, 3, pp=2)}, microbatches=4), "zb-v"
        ),
        "lanes 3 to 2": _plain("lanes 3 to 2"),
        "experts cut and spread": _experts("ep2 etp2", "sigmoid"),
        "context ranks in a pipeline": _plain("language cp2 pp2"),
        "tied over stages": table(TIED["tp2 pp2"], microbatches=4, language={"tied": True}),
        "overlapping": _plain("overlapping"),
        "context, tensor, sequence": _plain("language cp2 tp2 sp"),
        "hybrid": _hybrid(on(2, 5, tp=2, ep=2, sequence_parallel=True)),
        "tensor, sequence, stages, lanes": _plain("language tp2 sp pp2 dp2"),
        "context, stages, tensor, colocated": _plain("language cp2 pp2 tp2 sp, colocated"),
        "experts over context and tensor ranks": _experts("ep4 over context and tensor ranks, pp2", "softmax"),
        "encoders of two families": mixed("vision tp2, audio lanes 2, language pp2 cp2", "decoder", 0, microbatches=2),
        "all spread, schedule of little memory": _stepped(
            scheduled(_plain("language tp2 pp2 dp2"), "zb-h1"), {**FULL, "shard": "optimizer"}
        ),
    }
    found: dict[int, dict[str, Table]] = {}
    for name, settings in named.items():
        found.setdefault(world_of(settings), {})[name] = settings
    return MappingProxyType(found)


def run_in_turn(settings: Mapping[int, Table], folder: Path, process: ProcessInfo) -> None:
    """Go through numbered layouts as one rank, and leave what each came to in a file."""
    plain_arithmetic()
    # Groups of a layout stay until the end, and each of gloo has about eleven files.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number, each in settings.items():
        process.heartbeat.enter(f"layout {number}")
        outcome = run_layout(process.rank, each, device=torch.device(process.device), objects=process.objects)
        write_outcome(_path(folder, number, process.rank), outcome)


def test(case: Case) -> Found:
    """Compare all layouts of a number of ranks."""
    begun, world = time.monotonic(), int(case.options["world"])
    chosen = dict(layouts()[world])
    if case.tiny:
        chosen = dict(list(chosen.items())[:1])
    found: dict[str, RelativeDifference] = {}
    wrong: list[str] = []
    with noting("the comparison", wrong), Pool(prepare, case.folder) as pool:
        oracle = Oracle(pool, case.folder)
        clear = {name: oracle.clear(settings) for name, settings in chosen.items()}
        truths = {name: oracle.truth(settings) for name, settings in clear.items()}
        wrong += run_all(case, list(clear.values()), world=world, until=begun + AGAIN_SECONDS)
        for number, name in enumerate(clear):
            if ended(case.folder, number, world):
                with noting(name, wrong):
                    found[name] = _compared(pool, clear[name], truths[name], _read(case.folder, number, world))
            else:
                wrong.append(f"{name}: it came to no end")
    figures = {name: {**each.figures(), "at most": 1} for name, each in found.items()}
    return Found(
        figures=figures, wrong=[*wrong, *(line for name, each in found.items() for line in missed(name, each))]
    )


def run_all(case: Case, settings: Sequence[Table], *, world: int, until: float) -> list[str]:
    """Launch ranks for all layouts, and anew for those after one that fails; return how launches failed.

    Args:
        case: where.
        settings: of the layouts, by number.
        world: number of ranks.
        until: of `time.monotonic`; later none is launched again.
    """
    wrong: list[str] = []
    rest = dict(enumerate(settings))
    device, terms = case.kind, Terms(timeout=TIMEOUT)
    while rest:
        task = partial(run_in_turn, rest, case.folder)
        code = launch(task, world=world, device=device, method=start_method(device), terms=terms, rendezvous=RENDEZVOUS)
        left = [number for number in rest if not ended(case.folder, number, world)]
        if code:
            wrong.append(f"the launch ended with code {code}{f', in layout {left[0]}' if left else ''}")
        rest = {number: rest[number] for number in left[1:]}
        if rest and time.monotonic() > until:
            return [*wrong, f"no time was left for layouts {', '.join(map(str, rest))}"]
    return wrong


def ended(folder: Path, number: int, world: int) -> bool:
    """Return whether all ranks have written the result of a layout."""
    return all(_path(folder, number, rank).exists() for rank in range(world))


def _path(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}-{rank}.safetensors"


def _read(folder: Path, number: int, world: int) -> list[Outcome]:
    return [read_outcome(_path(folder, number, rank)) for rank in range(world)]


def _compared(pool: Pool, settings: Table, truth: Truth, outcomes: Sequence[Outcome]) -> RelativeDifference:
    found = relative_difference(truth, outcomes)
    if found.worst <= 1:
        return found
    (nudged,) = pool.run(1, partial(run_plain, nudged=True), on_one_rank(settings))
    return relative_difference(truth, outcomes, nudged=nudged)


if __name__ == "__main__":
    sys.exit(run(test, options={"world": {"required": True}}))

"""Saving and loading beside plain files, beside `torch.distributed.checkpoint` as it comes, and beside each other.

*plain*: the same bytes, written to one file for each rank and synced, or read into memory that is there. Files are in
the page cache when they are read. What is compared takes turns; in several ranks a turn takes as long as the slowest.

A *resharding* load takes what tensor ranks have cut in two (rows of one matrix, columns of the next) into four, and the
other way round; the plain load fills the same tensors from what was saved like them. Beside it what seldom happens:
columns into rows, rows into columns, where every rank needs some of each block, and in one process four column pieces
into one whole tensor; there the plain load takes the same files as they were saved.

The *stall* of an asynchronous save is what `save` takes, with nothing being written before; of a synchronous one all of
it. *Planning* is what a save does before it writes or copies anything: the first time, and the second. *Peak* is by how
much the memory of a process grows.

``nox -s bench -- checkpoint [--rounds N] [--mib N]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _forked import in_ranks
from _found import Found, report
from _turns import MIB, Turns, cut, cut_by_layers, make_tensors, ratios, read_plain, show, write_plain
from torch.distributed.checkpoint.state_dict_loader import load as pytorch_load
from torch.distributed.checkpoint.state_dict_saver import save as pytorch_save

from mimo.checkpoint import Saver, load, reshard, save
from mimo.checkpoint._plan import plan_together, structure
from mimo.checkpoint._ranks import Ranks
from mimo.checkpoint._tree import collect
from mimo.checkpoint._writer import SHARD_BYTES

WORLD = 4
TENSORS = 1000
ABOUT: dict[str, Any] = {"config": {}, "topology": {}}


def compare_ways(turns: Turns, tensors: dict[str, torch.Tensor], where: str) -> Found:
    """Save and load, beside plain files and `torch.distributed.checkpoint`."""
    numbers: dict[str, list[float]] = {}
    saves = turns.take(
        {
            "plain": functools.partial(write_plain, tensors),
            "ours": lambda place: save(place, 1, tensors, **ABOUT),
            "dcp": lambda place: pytorch_save(tensors, checkpoint_id=place / "dcp"),
        }
    )
    show(f"save, {where}", saves)
    numbers[f"save speed over plain write and fsync, {where}"] = ratios(saves, "plain", "ours")
    numbers[f"save time over torch.distributed.checkpoint, {where}"] = ratios(saves, "ours", "dcp")

    kept = turns.folder / "kept"
    step = save(kept, 1, tensors, **ABOUT)
    pytorch_save(tensors, checkpoint_id=kept / "dcp")
    plain = kept / f"plain_{os.getpid()}"  # each rank's own
    plain.mkdir()
    write_plain(tensors, plain)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    loads = turns.take(
        {
            "plain": functools.partial(read_plain, targets, next(plain.iterdir())),
            "ours": lambda _: load(step, targets),
            "dcp": lambda _: pytorch_load(targets, checkpoint_id=kept / "dcp"),
        }
    )
    show(f"load, {where}", loads)
    numbers[f"load speed over plain read, {where}"] = ratios(loads, "plain", "ours")
    numbers[f"load time over torch.distributed.checkpoint, {where}"] = ratios(loads, "ours", "dcp")
    turns.meet()
    shutil.rmtree(kept, ignore_errors=True)
    aims = {what: (">=", 0.8) if "speed" in what else ("<=", 1.0) for what in numbers}
    return Found(ratios=numbers, aims=aims)


def compare_stalls(turns: Turns, tensors: dict[str, torch.Tensor], where: str) -> Found:
    """Save beside training and before it continues."""
    savers = {
        name: Saver(turns.folder / name, asynchronous=name == "asynchronous", keep=1)
        for name in ("asynchronous", "synchronous")
    }
    stalls: dict[str, list[float]] = {name: [] for name in savers}
    for turn in range(turns.rounds + 1):
        for name, saver in savers.items():
            seconds = turns.time(functools.partial(saver.save, turn, tensors, **ABOUT))
            saver.wait()
            if failure := saver.take_failure():
                raise failure
            if turn:  # the first one plans and allocates
                stalls[name].append(seconds)
    for saver in savers.values():
        saver.close()
    turns.meet()
    for name in savers:
        shutil.rmtree(turns.folder / name, ignore_errors=True)
    show(f"stall of a save, {where}", stalls)
    what = f"stall of an asynchronous over a synchronous save, {where}"
    return Found(ratios={what: ratios(stalls, "asynchronous", "synchronous")}, aims={what: ("<=", 0.15)})


def compare_plans(turns: Turns, where: str) -> Found:
    """Plan a save of many tensors, and the next one of the same."""
    ranks = Ranks.own()
    tensors = {f"layers.{number}.weight": torch.zeros(WORLD, 4) for number in range(TENSORS)}
    tree = cut(tensors, 0) if dist.is_initialized() else tensors
    seen: list[object] = []

    def first(_place: Path) -> None:
        flat = collect(tree)
        seen[:] = [structure(flat)]
        plan_together(ranks, flat, shard_bytes=SHARD_BYTES, where="")

    def second(_place: Path) -> None:
        ranks.all_true([seen == [structure(collect(tree))], True])

    seconds = turns.take({"first": first, "second": second})
    show(f"planning of {TENSORS:,} tensors, {where}", seconds)
    what = f"planning of the second save over the first, {TENSORS:,} tensors, {where}"
    return Found(ratios={what: ratios(seconds, "second", "first")}, aims={what: ("<=", 0.1)})


def compare_layouts(turns: Turns, tensors: dict[str, torch.Tensor]) -> Found:
    """Load what was cut along one dim into what is cut along the other, beside loading it as it was saved."""
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.dim() > 1}
    cuts = {dim: cut(matrices, dim) for dim in (0, 1)}
    steps = {dim: save(turns.folder / f"cut_{dim}", 1, found, **ABOUT) for dim, found in cuts.items()}
    seconds = turns.take(
        {
            "rows as saved": lambda _: load(steps[0], cuts[0]),
            "columns to rows": lambda _: load(steps[1], cuts[0]),
            "columns as saved": lambda _: load(steps[1], cuts[1]),
            "rows to columns": lambda _: load(steps[0], cuts[1]),
        }
    )
    turns.meet()
    for dim in cuts:
        shutil.rmtree(turns.folder / f"cut_{dim}", ignore_errors=True)
    where = f"{WORLD} ranks"
    show(f"load, {where}", seconds)
    found = {
        f"resharding load over plain load, columns to rows, {where}": ratios(
            seconds, "columns to rows", "columns as saved"
        ),
        f"resharding load over plain load, rows to columns, {where}": ratios(
            seconds, "rows to columns", "rows as saved"
        ),
    }
    return Found(ratios=found, aims=dict.fromkeys(found, ("<=", 1.3)))


def compare_sizes(turns: Turns, tensors: dict[str, torch.Tensor]) -> Found:
    """Load what two tensor ranks have cut into four, and the other way round, beside loading it as it was saved."""
    cuts = {parts: cut_by_layers(tensors, parts) for parts in (2, WORLD)}
    steps = {parts: save(turns.folder / f"in_{parts}", 1, found, **ABOUT) for parts, found in cuts.items()}
    seconds = turns.take(
        {
            f"{saved} to {asked}": functools.partial(_load_parts, steps[saved], cuts[asked])
            for saved in cuts
            for asked in cuts
        }
    )
    turns.meet()
    for parts in cuts:
        shutil.rmtree(turns.folder / f"in_{parts}", ignore_errors=True)
    show(f"load of tensor ranks' parts, {WORLD} ranks", seconds)
    found = {
        f"resharding load over plain load, {saved} to {asked} tensor ranks": ratios(
            seconds, f"{saved} to {asked}", f"{asked} to {asked}"
        )
        for saved, asked in ((2, WORLD), (WORLD, 2))
    }
    return Found(ratios=found, aims=dict.fromkeys(found, ("<=", 1.3)))


def _load_parts(step: Path, tensors: dict[str, torch.Tensor], _place: Path) -> None:
    load(step, tensors)


def measure_alone(mib: int, turns: Turns) -> list[Found]:
    """Measure in this process."""
    tensors = make_tensors(mib)
    where = "one process"
    return [
        compare_ways(turns, tensors, where),
        compare_stalls(turns, tensors, where),
        compare_plans(turns, where),
    ]


def measure_ranks(mib: int, folder: Path, _rank: int, rounds: int) -> list[Found]:
    """Measure on this rank of several."""
    turns, tensors = Turns(rounds, folder), make_tensors(mib)
    where = f"{WORLD} ranks"
    own = cut(tensors, 0)
    return [
        compare_ways(turns, own, where),
        compare_stalls(turns, own, where),
        compare_plans(turns, where),
        compare_sizes(turns, tensors),
        compare_layouts(turns, tensors),
    ]


def gather_columns(mib: int, folder: Path, _rank: int, _rounds: int) -> None:
    """Save matrices cut by columns."""
    save(folder, 1, cut(make_tensors(mib), 1), **ABOUT)


def join_columns(mib: int, turns: Turns) -> Found:
    """Load in one process what four ranks cut by columns, beside what one process saved whole."""
    columns, whole = (turns.folder / name for name in ("columns", "whole"))
    in_ranks(functools.partial(gather_columns, mib, columns), world=WORLD, rounds=0)
    tensors = {name: tensor for name, tensor in make_tensors(mib).items() if tensor.dim() > 1}
    steps = {"plain": save(whole, 1, tensors, **ABOUT), "resharding": next(columns.glob("step_*"))}
    seconds = turns.take(
        {"plain": lambda _: load(steps["plain"], tensors), "resharding": lambda _: load(steps["resharding"], tensors)}
    )
    show("load of four columns, one process", seconds)
    for folder in (columns, whole):
        shutil.rmtree(folder)
    what = "resharding load over plain load, columns to whole, one process"
    return Found(ratios={what: ratios(seconds, "resharding", "plain")}, aims={what: ("<=", 1.3)})


def measure_peak(mib: int, folder: Path) -> Found:
    """Reshard one large tensor."""
    step = save(folder / "large", 1, {"x": torch.zeros(mib, MIB // 4)}, **ABOUT)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_reshard, args=(step, folder / "cut", sender))
    worker.start()
    sender.close()
    grown = receiver.recv()
    worker.join()
    for name in ("large", "cut"):
        shutil.rmtree(folder / name)
    what = f"peak memory of `mimo checkpoint reshard` over the largest tensor, {mib} MiB"
    return Found(ratios={what: [grown / (mib * MIB)]}, aims={what: ("<=", 0.5)})


def _reshard(step: Path, target: Path, result: Connection) -> None:
    reshard(step, target.with_name("first"), parts=1, drop=["x"])  # what it imports and touches
    shutil.rmtree(target.with_name("first"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory("VmRSS")
    reshard(step, target, parts=4)
    result.send(_memory("VmHWM") - before)


def _memory(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each, of which the median counts")
    parser.add_argument("--mib", type=int, default=1024, help="size of what is saved")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; by default a temporary one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        parts = in_ranks(functools.partial(measure_ranks, given.mib, folder), world=WORLD, rounds=given.rounds)
        turns = Turns(given.rounds, folder)
        parts += [join_columns(given.mib, turns), *measure_alone(given.mib, turns), measure_peak(given.mib, folder)]
    report("checkpoint", parts, rounds=given.rounds)


if __name__ == "__main__":
    main()

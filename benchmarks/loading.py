"""Loading beside the step: how fast threads decode, what of it a step notices, and what it holds.

Files are drawn here like photographs, JPEG of 640 x 480 pixels, and resized to 224. *Decoding* runs the loader
of a rank without any step, over a plain loop that opens and prepares the same files, in as many processes as the loader
has threads. Both run on so many cores, since who waits for an item decodes too. Beside it torch's `DataLoader` with as
many worker processes there, and a plain loop that keeps as many items as the loader has ahead: it writes to memory that
no cache holds, which whoever decodes ahead must. *Step* trains one process with one thread of torch and one that
decodes, over the longer of the two: pictures are drawn of a size whose decoding takes as long as the step computes,
found by trial. *Ahead* trains on pictures of which some take much longer, by how far ahead they are
decoded; *hand_on* two tensor ranks that decode each picture once, or each all of them. *Memory* reads small pictures
through a loader, and compares what the process holds after a tenth of them and after all.
``nox -s bench -- loading [--part decoding step ahead hand_on memory] [--rounds N] [--samples N]`` prints a table, and
as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from _forked import in_ranks
from _found import Found, report
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from mimo.data import load_image
from mimo.launch import Heartbeat
from mimo.trainer import Job, Trainer, read_settings, resolve
from mimo.trainer.runtime import StepData, StepLoader

PHOTOGRAPHS, STEPS, BATCH, AHEAD, CALIBRATIONS = 96, 8, 24, 2, 3
WIDTHS = (32, 64, 128, 256, 512)
VIT = {"patch": 16, "channels": 3, "mode": "fixed", "size": 224, "width": 64, "layers": 1, "heads": 2}


def draw(path: Path, size: tuple[int, int], number: int) -> None:
    """Write a picture with about as much detail as a photograph has."""
    random_numbers = np.random.default_rng(number)
    coarse = Image.fromarray(random_numbers.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize(size)
    noise = random_numbers.normal(0, 12, (size[1], size[0], 3))
    Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)).save(path, quality=90)


def write(folder: Path, count: int, size: tuple[int, int], suffix: str) -> list[Path]:
    """Write pictures and the jsonl that names them."""
    paths = [folder / f"{number}{suffix}" for number in range(count)]
    for number, path in enumerate(paths):
        draw(path, size, number)
    lines = [json.dumps({"images": [path.name], "text": "<image> a photograph"}) for path in paths]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return paths


def make_job(
    folder: Path, *, batch: int, vit: Mapping[str, Any], decoder: Mapping[str, Any], ranks: int = 1, **data: Any
) -> Job:
    """Return a job over the pictures of a folder, of one process or of as many tensor ranks."""
    place = {"ranks": "0"} if ranks == 1 else {"ranks": f"0-{ranks - 1}", "tp": ranks}
    return resolve(
        read_settings(
            {
                "run": {"name": "loading", "steps": 10**6, "global_batch": batch, "micro_batch": batch},
                "data": {"plugin": "jsonl", "path": str(folder / "train.jsonl"), **data},
                "modules": {
                    "vision": {"plugin": "vit", **place, "config": vit},
                    "language": {"plugin": "decoder", **place, "config": decoder},
                },
            }
        )
    )


@contextlib.contextmanager
def loader_of(job: Job, last: int) -> Iterator[StepLoader]:
    """Yield what reads the steps of a job as far as the last."""
    assert job.train is not None
    train, order = job.train, job.sample_order()
    loader = StepLoader(
        cut=lambda step: StepData.cut(job, train, order.samples(step), microbatches=1),
        places=[(job.encoders[0], job.encoders[0].grid.coordinates(0))],
        settings=job.settings.data,
        reach=1,
        last=last,
        progress=Heartbeat(),
    )
    with contextlib.closing(loader):
        yield loader


def items_of(job: Job, data: StepData) -> int:
    """Take the items of a step, and return how many they were."""
    return sum(len(microbatch.prepare(job.encoders[0], 0)) for microbatch in data.microbatches)


class Files(torch.utils.data.Dataset[Mapping[str, Tensor]]):
    """The same files for a plain loop and for torch's loader."""

    def __init__(self, job: Job, paths: Sequence[Path]) -> None:
        self._module, self._paths = job.encoders[0], paths

    def __len__(self) -> int:
        """Return their number."""
        return len(self._paths)

    def __getitem__(self, number: int) -> Mapping[str, Tensor]:
        """Open and prepare one."""
        spec: Any = self._module.spec
        found: Mapping[str, Tensor] = spec.prepare(self._module.config, load_image(self._paths[number]))
        return found


def seconds_of(run: Callable[[], object]) -> float:
    """Return how long something takes."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Have this thread, and the threads and processes that it starts, share so many cores."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def plain_loop(files: Files, cores: int, kept: int) -> float:
    """Return items a second of a loop over files in as many processes, their start left out.

    Args:
        files: to be decoded.
        cores: as many processes.
        kept: so many items are kept in all, each until there is room for it no longer.
    """
    context = multiprocessing.get_context("fork")
    ready, go = context.Barrier(cores + 1), context.Barrier(cores + 1)

    def work(part: int) -> None:
        torch.set_num_threads(1)
        held = deque([files[part]], kept // cores)  # and with it what is made once
        ready.wait()
        for number in range(part, len(files), cores):
            held.append(files[number])
        go.wait()

    workers = [context.Process(target=work, args=(part,)) for part in range(cores)]
    for worker in workers:
        worker.start()
    ready.wait()
    took = seconds_of(go.wait)
    for worker in workers:
        worker.join()
    return len(files) / took


def torch_loader(files: Files, cores: int) -> float:
    """Return items a second of torch's loader, whose workers are there before the time begins."""
    loader = DataLoader(files, batch_size=None, num_workers=cores, persistent_workers=True, prefetch_factor=4)
    for _ in loader:
        pass
    took = seconds_of(lambda: [None for _ in loader])
    return len(files) / took


def threads(job: Job) -> float:
    """Return items a second of our loader, from its beginning to its end: nothing is there before, nothing left."""
    with loader_of(job, STEPS) as loader:
        begun = time.perf_counter()
        count = sum(items_of(job, loader.load(number)) for number in range(1, STEPS + 1))
        return count / (time.perf_counter() - begun)


def decoding(folder: Path, *, rounds: int) -> Found:
    """Compare items a second."""
    paths = write(folder, PHOTOGRAPHS, (640, 480), ".jpg")
    decoder = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 32}
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    aims: dict[str, tuple[str, float]] = {}
    for cores in (1, 2):
        job = make_job(folder, batch=BATCH, vit=VIT, decoder=decoder, workers=cores, ahead=AHEAD)
        files, where = Files(job, paths), f"items a second on {cores} cores"
        ours = f"{where}, {cores} threads over a plain loop in {cores} processes"
        aims[ours] = (">=", 0.9)
        with on_cores(cores):
            threads(job)  # what is read once, sizes among it
            for _ in range(rounds):
                plain = plain_loop(files, cores, 0)
                ratios[ours].append(threads(job) / plain)
                ratios[f"{where}, such a loop that keeps items over it"].append(
                    plain_loop(files, cores, BATCH * (AHEAD + 1)) / plain
                )
                ratios[f"{where}, DataLoader of {cores} processes over it"].append(torch_loader(files, cores) / plain)
    return Found(ratios=ratios, aims=aims)


def seconds_of_steps(trainer: Trainer, first: int) -> tuple[float, float, float]:
    """Return the median seconds of `STEPS` steps, of what each has waited for data, and of the rest of each."""
    infos = [trainer.train(number) for number in range(first, first + STEPS)]
    columns = [[info.seconds, info.data_seconds, info.seconds - info.data_seconds] for info in infos]
    whole, data, rest = (statistics.median(column) for column in zip(*columns, strict=True))
    return whole, data, rest


def step(folder: Path, *, rounds: int) -> Found:
    """Compare the time of a step with the longer of decoding and computing, where decoding takes as long."""
    decoder = {"hidden": 192, "layers": 2, "heads": 4, "intermediate": 384}
    vit = {**VIT, "patch": 32}

    def trainer(width: int, workers: int) -> Trainer:
        own = folder / str(width)
        if not own.exists():
            own.mkdir()
            write(own, PHOTOGRAPHS, (width, width * 3 // 4), ".jpg")
        return Trainer(make_job(own, batch=BATCH, vit=vit, decoder=decoder, workers=workers, ahead=2))

    width = 640
    for _ in range(CALIBRATIONS):
        with contextlib.closing(trainer(width, 0)) as alone:
            alone.train(1)
            _, decodes, computes = seconds_of_steps(alone, 2)
        width = max(round(width * (computes / decodes) ** 0.5), 64)
    alone, beside = trainer(width, 0), trainer(width, 1)
    for of in (alone, beside):
        seconds_of_steps(of, 1)
    found: dict[str, list[float]] = {}
    for number in range(1, rounds + 1):
        serial, decodes, computes = seconds_of_steps(alone, 1 + number * STEPS)
        overlapped, _, _ = seconds_of_steps(beside, 1 + number * STEPS)
        longer = max(decodes, computes)
        found.setdefault("a step with a decoding thread, over the longer of both", []).append(overlapped / longer)
        found.setdefault("decoding over computing of that step", []).append(decodes / computes)
        found.setdefault("a step that decodes itself, over the longer of both", []).append(serial / longer)
    beside.close()
    alone.close()
    return Found(ratios=found, aims={"a step with a decoding thread, over the longer of both": ("<=", 1.1)})


def ahead(folder: Path, *, rounds: int) -> Found:
    """Compare the time of all steps by how far ahead they are decoded, over that of two steps ahead."""
    decoder = {"hidden": 192, "layers": 2, "heads": 4, "intermediate": 384}
    for number, path in enumerate(write(folder, PHOTOGRAPHS, (320, 240), ".jpg")):
        if number % 8 == 0:  # these take many times as long, and some steps have more of them than others
            draw(path, (1280, 960), number)
    trainers = {
        steps: Trainer(make_job(folder, batch=8, vit={**VIT, "patch": 32}, decoder=decoder, workers=1, ahead=steps))
        for steps in (0, 1, 2, 4)
    }
    for each in trainers.values():
        seconds_of_steps(each, 1)
    found: dict[str, list[float]] = {}
    for number in range(1, rounds + 1):
        took = {}
        for steps, each in trainers.items():
            took[steps] = sum(each.train(number * 24 + at).seconds for at in range(24))
        for steps in (0, 1, 4):
            name = f"steps decoded {steps} ahead over two ahead, of uneven pictures"
            found.setdefault(name, []).append(took[steps] / took[2])
    for each in trainers.values():
        each.close()
    return Found(ratios=found, aims={})


def hand_on(folder: Path, *, rounds: int) -> Found:
    """Compare the time of a step of two tensor ranks that decode each item once, over one where each decodes all."""
    decoder = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 32}
    vit = {**VIT, "patch": 32, "size": 64}
    for width in WIDTHS:
        (folder / str(width)).mkdir()
        write(folder / str(width), 16, (width, width), ".jpg")

    def measure(rank: int, rounds: int) -> dict[int, list[float]]:
        found = dict[int, list[float]]()
        for width in WIDTHS:
            trainers = [
                Trainer(
                    make_job(folder / str(width), batch=4, vit=vit, decoder=decoder, ranks=2, workers=0, hand_on=bound),
                    rank=rank,
                )
                for bound in (0, 1 << 40)
            ]
            for number in range(rounds + 1):
                once, each = (seconds_of_steps(trainer, 1 + number * STEPS)[0] for trainer in trainers)
                if number:
                    found.setdefault(width, []).append(once / each)
        return found

    ratios = in_ranks(measure, world=2, rounds=rounds)
    return Found(
        ratios={
            f"a step of 4 x {width} x {width} pixels, handed on over not": values for width, values in ratios.items()
        }
    )


def memory(folder: Path, *, samples: int) -> Found:
    """Compare what a process holds after a tenth of the samples and after all."""
    write(folder, 64, (32, 32), ".png")
    vit = {"patch": 8, "channels": 3, "width": 64, "layers": 1, "heads": 2}
    decoder = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 32}
    job = make_job(folder, batch=64, vit=vit, decoder=decoder, workers=2, ahead=2, ahead_bytes=1 << 20)
    held, count = [], 0
    with loader_of(job, samples // 64) as loader:
        for number in range(1, samples // 64 + 1):
            count += items_of(job, loader.load(number))
            if number % max(samples // 640, 1) == 0:
                gc.collect()
                held.append(resident())
    return Found(
        ratios={f"bytes held after {count:,} samples over those after a tenth": [held[-1] / held[0]]},
        aims={f"bytes held after {count:,} samples over those after a tenth": ("<=", 1.05)},
    )


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", nargs="*", default=["decoding", "step", "ahead", "hand_on", "memory"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=100_000, help="of the part that looks at memory")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    parts: dict[str, Callable[[Path], Found]] = {  # processes are forked before this one computes
        "decoding": lambda folder: decoding(folder, rounds=chosen.rounds),
        "hand_on": lambda folder: hand_on(folder, rounds=chosen.rounds),
        "memory": lambda folder: memory(folder, samples=chosen.samples),
        "step": lambda folder: step(folder, rounds=chosen.rounds),
        "ahead": lambda folder: ahead(folder, rounds=chosen.rounds),
    }
    found = []
    for name, measure in parts.items():
        if name in chosen.part:
            with TemporaryDirectory() as folder:
                found.append(measure(Path(folder)))
    report("loading", found, rounds=chosen.rounds)


if __name__ == "__main__":
    main()

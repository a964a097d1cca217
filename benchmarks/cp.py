"""Time of a language-model step cut over two context ranks, beside the same samples without, on the same two cores.

Two samples of one length. *cp 2*: each rank half of both. *dp 2*: each rank one of them whole, which is as much
arithmetic, attention included, without a word between the ranks until the gradients are summed. *alone*: one rank both.
*ring*: cp 2 with keys and values passed on instead of gathered. A step is forward, backward and the sum of gradients;
all take turns in one run, one thread a rank. Wall time is the slower rank's, CPU time that of both.
``nox -s bench -- cp [--rounds N]`` prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TypeAlias
from unittest.mock import patch

import _ring
import attrs
import torch
import torch.distributed as dist
from _forked import in_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.model import DECODER, DecoderConfig
from mimo.model.language import attention
from mimo.model.runtime import ContextAxis, LanguageBatch, Part, TensorAxis, attend, build_part
from mimo.topology import Grid, context_spans

CONFIG = DecoderConfig(vocabulary=512, hidden=384, layers=4, heads=6, kv_heads=2, intermediate=1024)
SAMPLES = 2
STEPS = {256: 4, 1024: 2, 2048: 1}
"""Steps of each turn by tokens a sample."""

Times: TypeAlias = dict[tuple[int, str], list[tuple[float, float]]]
"""Wall and CPU seconds of each turn, by tokens a sample and way."""


@attrs.frozen(kw_only=True)
class Way:
    """One way to run the step, on this rank; without a batch the rank has nothing to do."""

    part: Part
    batch: LanguageBatch | None
    ring: bool = False

    def step(self) -> Tensor:
        """Do one; return all gradients, summed over the ranks."""
        parameters = list(self.part.module.parameters())
        for parameter in parameters:
            parameter.grad = None
        if self.batch is None:
            gradients = torch.zeros(sum(parameter.numel() for parameter in parameters))
        else:
            with patch.object(attention, "attend", _ring.ring_attend if self.ring else attend):
                hidden = self.part.language(self.batch, {}, None)
                self.part.language.losses(hidden, self.batch.labels).sum().backward()
            found = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(found) == len(parameters)
            gradients = torch.cat([gradient.flatten() for gradient in found])
        return gradients


def _batch(length: int, samples: int, first: int, context: ContextAxis) -> LanguageBatch:
    """Return what a context rank holds of ``samples`` samples, numbered from ``first``."""
    spans = context_spans(length, size=context.size, rank=context.rank)
    here = torch.cat([torch.arange(*span) for span in spans])
    numbers = torch.arange(first, first + samples).unsqueeze(1)
    tokens = ((here + 1) * (numbers * 31 + 7)) % CONFIG.vocabulary
    labels = ((here + 2) * (numbers * 31 + 7)) % CONFIG.vocabulary
    return attrs.evolve(
        LanguageBatch.of(tokens.flatten(), labels.flatten(), here.repeat(samples), lengths=[len(here)] * samples),
        lengths=(length,) * samples,
        label_tokens=(length,) * samples,
    )


def _ways(rank: int, length: int, mesh: DeviceMesh, context: ContextAxis) -> dict[str, Way]:
    def part(context: ContextAxis) -> Part:
        grid = Grid(name="language", ranks=range(context.size), cp=context.size)
        return build_part(
            DECODER,
            CONFIG,
            grid=grid,
            seed=1,
            axis=TensorAxis.single(),
            mesh=mesh,
            device=torch.device("cpu"),
            context=context,
        )

    single = ContextAxis.single()
    cut, whole = part(context), part(single)
    shared = _batch(length, SAMPLES, 0, context)
    return {
        "cp 2": Way(part=cut, batch=shared),
        "dp 2": Way(part=whole, batch=_batch(length, SAMPLES // 2, rank * (SAMPLES // 2), single)),
        "ring": Way(part=cut, batch=shared, ring=True),
        "alone": Way(part=whole, batch=_batch(length, SAMPLES, 0, single) if rank == 0 else None),
    }


def measure(rank: int, rounds: int) -> Times:
    """Return the times of all ways, the same on both ranks."""
    meshes = [DeviceMesh("cpu", [each], mesh_dim_names=("tp",)) for each in range(2)]
    assert dist.group.WORLD is not None
    context = ContextAxis.of(dist.group.WORLD)
    times: Times = {}
    for length, steps in STEPS.items():
        ways = _ways(rank, length, meshes[rank], context)
        wanted = torch.zeros(0)
        for name in reversed(ways):  # warms up, and sees that all do the same
            found = ways[name].step()
            dist.all_reduce(found)
            wanted = wanted if len(wanted) else found
            assert (found - wanted).norm() <= 1e-4 * wanted.norm(), name
        for _ in range(rounds):
            for name, way in ways.items():
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(steps):
                    gradients = way.step()
                    if name != "alone":
                        dist.all_reduce(gradients)
                took = (
                    torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64) / steps
                )
                both = [torch.empty_like(took) for _ in range(2)]
                dist.all_gather(both, took)
                walls, cpus = torch.stack(both).unbind(1)
                times.setdefault((length, name), []).append((float(walls.max()), float(cpus.sum())))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, of which the median counts")
    rounds = parser.parse_args().rounds
    times = in_ranks(measure, world=2, rounds=rounds)
    ratios, spread = {}, {}
    for length in STEPS:
        for name in ("cp 2", "dp 2", "ring", "alone"):
            wall, cpu = (statistics.median(column) for column in zip(*times[length, name], strict=True))
            print(f"{SAMPLES} x {length} tokens, {name}: wall {wall * 1e3:.1f} ms, CPU {cpu * 1e3:.1f} ms")
        for kind, other, column in (
            ("time", "dp 2", 0),
            ("CPU", "dp 2", 1),
            ("CPU", "alone", 1),
            ("time", "ring", 0),
            ("CPU", "ring", 1),
        ):
            found = [
                one[column] / another[column]
                for one, another in zip(times[length, "cp 2"], times[length, other], strict=True)
            ]
            what = f"{kind}, {SAMPLES} x {length} tokens, cp 2 / {other}"
            ratios[what], spread[what] = statistics.median(found), [min(found), max(found)]
            print(f"  {what}: {ratios[what]:.3f}")
    print(json.dumps({"bench": "cp", "ratios": ratios, "aims": {}, "runs": rounds, "spread": spread}))


if __name__ == "__main__":
    main()

"""Optimus' setting (arXiv 2408.03505): ViT-22B feeding GPT-175B, simulated; ours beside the paper's seconds of a step.

``nox -s bench -- optimus`` prints tables, and as its last line one JSON object. Nothing is run: plans are generated,
proved, and simulated with costs by formula. All that the formula knows, set before the first run and never tuned:

- A layer of width h computes 24 h² + 4 s h FLOPs for each token forward (MLP of 4 h, full attention over s = 2048
  tokens, in the encoder too), twice that backward (half for inputs, half for weights), and once more forward, as every
  layer is computed again before its backward. Embeddings, projector, vocabulary head and loss are left out.
- GPUs reach half of their 989 TFLOP/s, whatever the shape.
- Tensor ranks exchange a layer's rows four times forward (gathered and scattered, twice), as often backward and when
  computing again, at 360 GB/s, with nothing computed meanwhile. The paper hides encoder work there too (its fine
  bubbles, inside layers); ours has no gap smaller than a pass of a stage, and counts these seconds as work.
- Between nodes 50 GB/s for each GPU, after 10 microseconds; messages travel while their ends compute.
- A stage's gradients are summed in fp32 and its weights gathered in bf16 over all its lanes, once a step, at the same
  50 GB/s, with nothing computed meanwhile on these ranks, where the paper hides encoder work as well. No optimizer, no
  data loading, no stragglers.
- A layer keeps its input (2 bytes a value, cut over tensor ranks) until its backward; computing again brings 34 bytes a
  value; of a backward in two parts the second keeps 32. The budget of ``ahead`` is 16 GiB a rank.

Ours: the language model on all ranks, pp 8, tp 8, 12 chunks; the encoder on the same ranks in a grid of its own, the
best of a few. A pass of it serves as many microbatches as give each of its lanes whole samples. *Hidden* is the share
of the encoder's work by which the step is not longer than the best step of the language model alone, be that the usual
one (interleaved, with one chunk 1F1B) or that of ``ahead`` within the same budget, so that no gap counts which the
schedule closes without an encoder. The work is the encoder's computations; its reduction, 0.04 s of a step with pp 8,
comes on top, so the share is below 0 where the step gets longer by more than these computations take. *Least* is a
bound below which no plan in this model gets. The same is shown with 1 chunk, where the usual way leaves wide gaps.

Balanced: one pipeline of all 144 layers. *whole layers*: cut where the dearest stage is cheapest, the best number of
chunks, interleaved. *even*: cut into 96 equal stages, fractions of layers if need be, which no real model allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import attrs

from mimo.schedule import ActionKind, Costs, Link, Plan, Seconds, Simulation, StageCost, check, simulate
from mimo.schedule.ahead.plugin import Ahead
from mimo.schedule.ahead.plugin import generate as ahead
from mimo.schedule.ahead.task_builder import tasks_of
from mimo.schedule.schedules.interleaved import Interleaved
from mimo.schedule.schedules.interleaved import generate as interleaved
from mimo.schedule.schedules.one_forward_one_backward import OneForwardOneBackward
from mimo.schedule.schedules.one_forward_one_backward import generate as one_forward_one_backward
from mimo.topology import Grid, Module, ModuleGraph, StageId

TOKENS = 2048
SAMPLES = 2
"""Of a microbatch, for each lane of the language model."""
GLOBAL_BATCH = 1536
PP, TP, CHUNKS = 8, 8, 12
FLOPS = 989e12 * 0.5
TENSOR_BANDWIDTH, BANDWIDTH, LATENCY = 360e9, 50e9, 10e-6
BUDGET = 16 * 2**30
RESULT = Path(__file__).parent / "results" / "optimus.json"


@attrs.frozen(kw_only=True)
class Row:
    """A row of the paper's table: seconds of a step, and its shares of encoder work in bubbles, coarse and fine."""

    gpus: int
    balanced: float
    optimus: float
    hidden: tuple[float, float]

    @property
    def lanes(self) -> int:
        """Lanes of the language model."""
        return self.gpus // (PP * TP)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return GLOBAL_BATCH // (self.lanes * SAMPLES)


ROWS = (
    Row(gpus=1536, balanced=10.43, optimus=9.80, hidden=(0.343, 0.575)),
    Row(gpus=2048, balanced=8.06, optimus=7.29, hidden=(0.458, 0.693)),
    Row(gpus=3072, balanced=5.87, optimus=4.87, hidden=(0.687, 0.850)),
)


@attrs.frozen(kw_only=True)
class Layer:
    """A transformer layer."""

    width: int

    @property
    def flops(self) -> float:
        """Of the forward of one token."""
        return 24 * self.width**2 + 4 * TOKENS * self.width

    @property
    def parameters(self) -> int:
        """Weights of attention and MLP."""
        return 12 * self.width**2

    def compute(self, samples: float) -> float:
        """Return the seconds of a forward over samples, without communication."""
        return self.flops * TOKENS * samples / (TP * FLOPS)

    def exchange(self, samples: float) -> float:
        """Return the seconds in which tensor ranks exchange rows in a forward."""
        return 4 * self.values(samples) * 2 * (TP - 1) / TENSOR_BANDWIDTH

    def values(self, samples: float) -> float:
        """Return how many values of its rows lie on one tensor rank."""
        return samples * TOKENS * self.width / TP


VISION, LANGUAGE = Layer(width=6144), Layer(width=12288)
MODEL = (VISION,) * 48 + (LANGUAGE,) * 96


def stage_cost(layers: Mapping[Layer, float], each: float, lanes: int) -> StageCost:
    """Return what a stage costs.

    Args:
        layers: how many of each kind it has.
        each: samples that each lane has of a microbatch, whole ones only over a pass.
        lanes: that sum its gradients.
    """
    compute = sum(count * layer.compute(each) for layer, count in layers.items())
    exchange = sum(count * layer.exchange(each) for layer, count in layers.items())
    values = sum(count * layer.values(each) for layer, count in layers.items())
    parameters = sum(count * layer.parameters for layer, count in layers.items()) / TP
    return StageCost(
        forward=Seconds(each=compute + exchange),
        recompute=Seconds(each=compute + exchange),
        input_gradient=Seconds(each=compute + exchange),
        weight_gradient=Seconds(each=compute),
        reduce=6 * parameters * (lanes - 1) / lanes / BANDWIDTH,
        activations=math.ceil(2 * values),
        recomputed=math.ceil(34 * values),
        weight_inputs=math.ceil(32 * values),
    )


def costs_of(graph: ModuleGraph, stages: Mapping[StageId, StageCost]) -> Costs:
    """Return the costs of a graph; all messages are as large as the language model's rows, the encoder's own too."""
    sizes = {edge.name: math.ceil(2 * SAMPLES * TOKENS * LANGUAGE.width / TP) for edge in graph.edges}
    return Costs(stages=stages, message_bytes=sizes, link=Link(LATENCY, BANDWIDTH))


def proved(plan: Plan, graph: ModuleGraph, costs: Costs) -> Simulation:
    """Check a plan and simulate it."""
    check(plan, graph)
    return simulate(plan, graph, costs)


def pipeline(row: Row, chunks: int, parts: Sequence[Mapping[Layer, float]]) -> Simulation:
    """Return one pipeline of all layers, interleaved where it has chunks."""
    grid = Grid(name="model", ranks=range(row.gpus), pp=PP, tp=TP, dp=row.lanes)
    graph = ModuleGraph(modules=(Module(grid=grid, trains=(True,) * len(parts), chunks=chunks),), arrows=())
    costs = costs_of(
        graph,
        {stage: stage_cost(part, SAMPLES, row.lanes) for stage, part in zip(graph.stages, parts, strict=True)},
    )
    return proved(usual(graph, row.microbatches, costs), graph, costs)


def whole_layers(stages: int) -> list[Mapping[Layer, float]]:
    """Cut the layers into runs, one a stage, so that the dearest run is as cheap as can be."""
    ends = [0, *accumulate(layer.flops for layer in MODEL)]
    best: list[tuple[float, list[int]]] = [(ends[last], [last]) for last in range(len(MODEL) + 1)]
    for _ in range(stages - 1):
        best = [
            min((max(best[cut][0], ends[last] - ends[cut]), [*best[cut][1], last]) for cut in range(last + 1))
            for last in range(len(MODEL) + 1)
        ]
    cuts = [0, *best[-1][1]]
    runs = [MODEL[low:high] for low, high in pairwise(cuts)]
    return [{layer: run.count(layer) for layer in (VISION, LANGUAGE)} for run in runs]


def even() -> list[Mapping[Layer, float]]:
    """Cut all work into equal stages, each of some of the one or other kind of layer."""
    vision, language = 48 * VISION.flops, 96 * LANGUAGE.flops
    each = (vision + language) / (PP * CHUNKS)
    found: list[Mapping[Layer, float]] = []
    for stage in range(PP * CHUNKS):
        low, high = stage * each, (stage + 1) * each
        own = max(0.0, min(high, vision) - low)
        found.append({VISION: own / VISION.flops, LANGUAGE: (high - low - own) / LANGUAGE.flops})
    return found


@attrs.frozen(kw_only=True)
class Encoder:
    """A grid of the encoder on the language model's ranks."""

    pp: int
    chunks: int
    batch_factor: int

    def __str__(self) -> str:
        """Return it in words."""
        return f"pp {self.pp}, {self.chunks} chunks, {self.batch_factor} microbatches a pass"


def encoders(row: Row) -> Iterator[Encoder]:
    """Yield the grids that are tried: 24 stages, and passes that give all lanes one sample or two each."""
    for pp in (1, 2, 4, 8):
        for samples in (1, 2):
            batch_factor, rest = divmod(samples * row.gpus // TP // pp, row.lanes * SAMPLES)
            if not rest and row.microbatches % batch_factor == 0:
                yield Encoder(pp=pp, chunks=24 // pp, batch_factor=batch_factor)


@attrs.frozen(kw_only=True)
class Alone:
    """Seconds of the language model without an encoder: by the plan of one module in Megatron-LM, and by `ahead`."""

    usual: float
    ahead: float

    @property
    def best(self) -> float:
        """Seconds that the language model needs without an encoder."""
        return min(self.usual, self.ahead)


def language_alone(row: Row, chunks: int) -> Alone:
    """Return the seconds of the language model without an encoder."""
    graph, costs = language_and(row, chunks, None)
    plans = usual(graph, row.microbatches, costs), ahead(graph, row.microbatches, Ahead(budget=BUDGET), costs)
    usually, ours_ = (proved(plan, graph, costs).seconds for plan in plans)
    return Alone(usual=usually, ahead=ours_)


def usual(graph: ModuleGraph, microbatches: int, costs: Costs) -> Plan:
    """Return the plan that one module would have in Megatron-LM."""
    if graph.modules[0].chunks == 1:
        return one_forward_one_backward(graph, microbatches, OneForwardOneBackward(), costs)
    return interleaved(graph, microbatches, Interleaved(), costs)


def language_and(row: Row, chunks: int, encoder: Encoder | None) -> tuple[ModuleGraph, Costs]:
    """Return the language model, with an encoder on the same ranks or none, and what they cost."""
    grid = Grid(name="language", ranks=range(row.gpus), pp=PP, tp=TP, dp=row.lanes)
    language = Module(grid=grid, trains=(True,) * (PP * chunks), chunks=chunks)
    cost = stage_cost({LANGUAGE: 96 / (PP * chunks)}, SAMPLES, row.lanes)
    stages = {StageId("language", stage): cost for stage in range(PP * chunks)}
    if encoder is None:
        graph = ModuleGraph(modules=(language,), arrows=())
        return graph, costs_of(graph, stages)
    lanes = row.gpus // TP // encoder.pp
    count = encoder.pp * encoder.chunks
    grid = Grid(name="vision", ranks=range(row.gpus), pp=encoder.pp, tp=TP, dp=lanes)
    vision = Module(grid=grid, trains=(True,) * count, chunks=encoder.chunks, batch_factor=encoder.batch_factor)
    cost = stage_cost({VISION: 48 / count}, row.lanes * SAMPLES / lanes, lanes)
    stages |= {StageId("vision", stage): cost for stage in range(count)}
    graph = ModuleGraph(modules=(vision, language), arrows=(("vision", "language"),))
    return graph, costs_of(graph, stages)


def encoder_seconds(graph: ModuleGraph, costs: Costs, microbatches: int) -> float:
    """Return the seconds that a rank spends in encoder computations, those that are done again included."""
    module = graph.by_name["vision"]
    kinds: tuple[ActionKind, ...] = ("forward", "backward")
    return sum(
        costs.seconds(kind, StageId("vision", stage), len(served))
        for stage in module.stages_at(0)
        for served in module.passes(microbatches)
        for kind in kinds
    )


@attrs.frozen(kw_only=True)
class Found:
    """Our step of a row: with the best encoder grid, whose work takes so many seconds of each rank."""

    encoder: Encoder
    seconds: float
    least: float
    work: float
    alone: Alone
    peak: int

    @property
    def hidden(self) -> float:
        """Share of the encoder's work that makes the step no longer than the best one of the language model alone."""
        return 1 - (self.seconds - self.alone.best) / self.work


def ours(row: Row, chunks: int) -> Found:
    """Return our step."""
    alone = language_alone(row, chunks)
    found = []
    for encoder in encoders(row):
        graph, costs = language_and(row, chunks, encoder)
        step = proved(ahead(graph, row.microbatches, Ahead(budget=BUDGET), costs), graph, costs)
        found.append(
            Found(
                encoder=encoder,
                seconds=step.seconds,
                least=tasks_of(graph, row.microbatches, costs).bound,
                work=encoder_seconds(graph, costs, row.microbatches),
                alone=alone,
                peak=max(step.peak_total.values()),
            )
        )
        print(f"  {row.gpus} GPUs, language in {chunks} chunks, encoder {encoder}: {step.seconds:.3f} s")
    return min(found, key=lambda one: one.seconds)


def balanced(row: Row) -> tuple[int, float, float]:
    """Return the best number of chunks and the seconds of whole layers, and the seconds of even stages."""
    whole = {chunks: pipeline(row, chunks, whole_layers(PP * chunks)).seconds for chunks in (1, 2, 3, 4, 6)}
    chunks = min(whole, key=lambda count: whole[count])
    return chunks, whole[chunks], pipeline(row, CHUNKS, even()).seconds


def main() -> None:
    """Simulate the rows and print."""
    print(__doc__)
    print(
        f"forward of a layer, one sample: ViT {VISION.compute(1) * 1e3:.3f} + {VISION.exchange(1) * 1e3:.3f} ms, "
        f"GPT {LANGUAGE.compute(1) * 1e3:.3f} + {LANGUAGE.exchange(1) * 1e3:.3f} ms (computed + exchanged)"
    )
    ratios: dict[str, float] = {}
    lines = []
    for row in ROWS:
        count, whole, smooth = balanced(row)
        lines.append(
            f"{row.gpus} GPUs, {row.microbatches} microbatches. Paper: balanced {row.balanced:.2f} s, "
            f"Optimus {row.optimus:.2f} s (balanced takes {row.balanced / row.optimus:.3f} times as long), "
            f"encoder hidden {row.hidden[0]:.1%} coarse, {row.hidden[1]:.1%} fine.\n"
            f"  ours, simulated: balanced in whole layers {whole:.2f} s ({count} chunks), evenly {smooth:.2f} s"
        )
        at = f"{row.gpus} GPUs"
        ratios |= {
            f"seconds, balanced in whole layers, {at}": whole,
            f"seconds, balanced evenly, {at}": smooth,
            f"paper: balanced over Optimus, {at}": row.balanced / row.optimus,
        }
        for chunks in (CHUNKS, 1):
            found = ours(row, chunks)
            lines.append(
                f"  ahead, language in {chunks} chunks: {found.seconds:.2f} s (least {found.least:.2f}); whole layers "
                f"take {whole / found.seconds:.3f}, even {smooth / found.seconds:.3f} times as long; language alone "
                f"{found.alone.usual:.3f} s the usual way, {found.alone.ahead:.3f} s by ahead; "
                f"encoder work {found.work:.2f} s, hidden {found.hidden:.1%}; "
                f"{found.peak / 2**30:.1f} GiB; encoder {found.encoder}"
            )
            which = f"{chunks} chunks, {at}"
            ratios |= {
                f"seconds, ahead, {which}": found.seconds,
                f"ahead over the least possible, {which}": found.seconds / found.least,
                f"balanced in whole layers over ahead, {which}": whole / found.seconds,
                f"balanced evenly over ahead, {which}": smooth / found.seconds,
                f"seconds, language alone the usual way, {which}": found.alone.usual,
                f"seconds, language alone by ahead, {which}": found.alone.ahead,
                f"share of encoder work hidden, {which}": found.hidden,
            }
    print("\n".join(lines))
    result = {"bench": "optimus", "ratios": ratios, "aims": {}, "runs": 1, "spread": {}}
    text = json.dumps(result)
    RESULT.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

"""Optimus' setting (arXiv 2408.03505): ViT-22B feeding GPT-175B, simulated; ours beside the paper's seconds of a step.

``nox -s bench -- optimus`` prints tables, and as its last line one JSON object. Nothing is run: plans are generated,
proved, and simulated with costs by formula. All that the formula knows, set before the first run and never tuned:

- A layer of width h computes 24 h² + 4 s h FLOPs for each token forward (MLP of 4 h, full attention over s = 2048 tokens,
  in the encoder too), twice that backward (half for inputs, half for weights), and once more forward, as every layer is
  computed again before its backward. Embeddings, projector, vocabulary head and loss are left out.
- GPUs reach half of their 989 TFLOP/s, whatever the shape.
- Tensor ranks exchange a layer's rows four times forward (gather and scatter by halves, twice), as often backward and
  when computing again, at 360 GB/s, with nothing computed meanwhile.
- Between nodes 50 GB/s for each GPU, after 10 microseconds; messages travel while their ends compute.
- A stage's gradients are summed in fp32 and its weights gathered in bf16 over all its lanes, once a step, at the same
  50 GB/s, with nothing computed meanwhile on these ranks. No optimizer, no data loading, no stragglers.
- A layer keeps its input (2 bytes a value, cut over tensor ranks) until its backward; computing again brings 34 bytes a
  value; of a backward in two parts the second keeps 32. The budget of ``ahead`` is 16 GiB a rank.

Ours: the language model on all ranks, pp 8, tp 8, 12 chunks; the encoder on the same ranks in a grid of its own, the best
of a few. A pass of it serves as many microbatches as give each of its lanes whole samples.

Balanced: one pipeline of all 144 layers. *whole layers*: cut where the dearest stage is cheapest, the best number of
chunks, interleaved. *even*: cut into 96 equal stages, fractions of layers if need be, which no real model allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import attrs

from mimo.schedule import Costs, Link, Plan, Seconds, Simulation, StageCost, check, simulate
from mimo.schedule._ahead import Ahead
from mimo.schedule._ahead import generate as ahead
from mimo.schedule._interleaved import Interleaved
from mimo.schedule._interleaved import generate as interleaved
from mimo.schedule._one_forward_one_backward import OneForwardOneBackward
from mimo.schedule._one_forward_one_backward import generate as one_forward_one_backward
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


def stage_cost(layers: Mapping[Layer, float], samples: float, each: float, lanes: int) -> StageCost:
    """Return what a stage costs.

    Args:
        layers: how many of each kind it has.
        samples: that the busiest lane has in a pass.
        each: of these, how many for each microbatch of the pass.
        lanes: that sum its gradients.
    """
    assert samples > 0, samples
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


def costs_of(graph: ModuleGraph, stages: Mapping[StageId, StageCost], widths: Mapping[str, int]) -> Costs:
    """Return the costs of a graph; ``widths`` has that of the rows of each module's edges, others are the language's."""
    sizes = {
        edge.name: math.ceil(2 * SAMPLES * TOKENS * widths.get(edge.source.module, LANGUAGE.width) / TP)
        for edge in graph.edges
    }
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
        {stage: stage_cost(part, SAMPLES, SAMPLES, row.lanes) for stage, part in zip(graph.stages, parts, strict=True)},
        {},
    )
    if chunks == 1:
        plan = one_forward_one_backward(graph, row.microbatches, OneForwardOneBackward(), costs)
    else:
        plan = interleaved(graph, row.microbatches, Interleaved(), costs)
    return proved(plan, graph, costs)


def whole_layers(stages: int) -> list[Mapping[Layer, float]]:
    """Cut the layers into runs, one a stage, so that the dearest run is as cheap as can be."""
    ends = [0, *accumulate(layer.flops for layer in MODEL)]
    best: list[tuple[float, list[int]]] = [(ends[last], [last]) for last in range(len(MODEL) + 1)]
    for _ in range(stages - 1):
        best = [
            min(((max(best[cut][0], ends[last] - ends[cut]), [*best[cut][1], last]) for cut in range(last + 1)))
            for last in range(len(MODEL) + 1)
        ]
    cuts = [0, *best[-1][1]]
    runs = [MODEL[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]
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
    """Yield the grids that are tried: all whose lanes have whole samples and whose passes are all of one size."""
    for pp in (1, 2, 4, 8):
        for batch_factor in (1, 2, 4, 8):
            lanes = row.gpus // TP // pp
            samples = row.lanes * SAMPLES * batch_factor
            if samples % lanes == 0 and row.microbatches % batch_factor == 0:
                for stages in (12, 24):
                    yield Encoder(pp=pp, chunks=stages // pp if stages > pp else 1, batch_factor=batch_factor)


def language_alone(row: Row, *, schedule: str) -> Simulation:
    """Return the language model without an encoder."""
    graph, costs = language_and(row, None)
    if schedule == "ahead":
        return proved(ahead(graph, row.microbatches, Ahead(budget=BUDGET), costs), graph, costs)
    return proved(interleaved(graph, row.microbatches, Interleaved(), costs), graph, costs)


def language_and(row: Row, encoder: Encoder | None) -> tuple[ModuleGraph, Costs]:
    """Return the language model, with an encoder on the same ranks or none, and what they cost."""
    grid = Grid(name="language", ranks=range(row.gpus), pp=PP, tp=TP, dp=row.lanes)
    language = Module(grid=grid, trains=(True,) * (PP * CHUNKS), chunks=CHUNKS)
    each = {LANGUAGE: 96 / (PP * CHUNKS)}
    stages = {
        StageId("language", stage): stage_cost(each, SAMPLES, SAMPLES, row.lanes) for stage in range(PP * CHUNKS)
    }
    if encoder is None:
        graph = ModuleGraph(modules=(language,), arrows=())
        return graph, costs_of(graph, stages, {})
    lanes = row.gpus // TP // encoder.pp
    count = encoder.pp * encoder.chunks
    grid = Grid(name="vision", ranks=range(row.gpus), pp=encoder.pp, tp=TP, dp=lanes)
    vision = Module(
        grid=grid, trains=(True,) * count, chunks=encoder.chunks, batch_factor=encoder.batch_factor
    )
    samples = row.lanes * SAMPLES / lanes
    for stage in range(count):
        cost = stage_cost({VISION: 48 / count}, samples * encoder.batch_factor, samples, lanes)
        stages[StageId("vision", stage)] = cost
    graph = ModuleGraph(modules=(vision, language), arrows=(("vision", "language"),))
    return graph, costs_of(graph, stages, {})


def encoder_seconds(graph: ModuleGraph, costs: Costs, microbatches: int) -> float:
    """Return the seconds that a rank spends in encoder computations, those that are done again included."""
    module = graph.by_name["vision"]
    kinds = ("forward", "backward")
    return sum(
        costs.seconds(kind, StageId("vision", stage), len(served))
        for stage in module.stages_at(0)
        for served in module.passes(microbatches)
        for kind in kinds
    )


def ours(row: Row) -> tuple[Encoder, Simulation, float]:
    """Return the best encoder grid, its step, and the seconds of encoder work on each rank."""
    found = []
    for encoder in encoders(row):
        graph, costs = language_and(row, encoder)
        plan = ahead(graph, row.microbatches, Ahead(budget=BUDGET), costs)
        step = proved(plan, graph, costs)
        work = encoder_seconds(graph, costs, row.microbatches)
        print(f"  {row.gpus} GPUs, encoder {encoder}: {step.seconds:.3f} s, of these encoder work {work:.3f} s")
        found.append((encoder, step, work))
    return min(found, key=lambda one: one[1].seconds)


def main() -> None:
    """Simulate the rows and print."""
    print(__doc__)
    print(f"forward of a layer, one sample: ViT {VISION.compute(1) * 1e3:.3f} + {VISION.exchange(1) * 1e3:.3f} ms, "
          f"GPT {LANGUAGE.compute(1) * 1e3:.3f} + {LANGUAGE.exchange(1) * 1e3:.3f} ms (computed + exchanged)")
    ratios: dict[str, float] = {}
    lines = []
    for row in ROWS:
        whole = {chunks: pipeline(row, chunks, whole_layers(PP * chunks)).seconds for chunks in (1, 2, 3, 4, 6)}
        chunks = min(whole, key=lambda count: whole[count])
        smooth = pipeline(row, CHUNKS, even()).seconds
        alone, tight = (language_alone(row, schedule=name).seconds for name in ("interleaved", "ahead"))
        encoder, step, work = ours(row)
        hidden, strict = (1 - (step.seconds - one) / work for one in (alone, tight))
        peak = max(step.peak_total.values()) / 2**30
        lines.append(
            f"{row.gpus:5} {row.microbatches:4} | {row.balanced:6.2f} {row.optimus:6.2f} {row.balanced / row.optimus:6.3f} "
            f"{row.hidden[0]:6.1%} {row.hidden[1]:6.1%} | {whole[chunks]:6.2f} (V={chunks}) {smooth:6.2f} "
            f"{step.seconds:6.2f} {smooth / step.seconds:6.3f} {whole[chunks] / step.seconds:6.3f} "
            f"{alone:6.2f} {tight:6.2f} {work:6.2f} {hidden:6.1%} {strict:6.1%} {peak:5.1f} GiB | {encoder}"
        )
        at = f"{row.gpus} GPUs"
        ratios |= {
            f"seconds, balanced in whole layers, {at}": whole[chunks],
            f"seconds, balanced evenly, {at}": smooth,
            f"seconds, ahead, {at}": step.seconds,
            f"balanced evenly over ahead, {at}": smooth / step.seconds,
            f"balanced in whole layers over ahead, {at}": whole[chunks] / step.seconds,
            f"paper: balanced over Optimus, {at}": row.balanced / row.optimus,
            f"share of encoder work hidden beside the interleaved language model, {at}": hidden,
            f"share hidden beside the language model with its backward in parts, {at}": strict,
        }
    print("                paper, seconds                    |  simulated, seconds")
    print("GPUs  micro | balanced Optimus ratio coarse fine  | whole layers, even, ahead, even/ahead, whole/ahead, "
          "language alone (interleaved, ahead), encoder work, hidden beside each, peak | encoder")
    print("\n".join(lines))
    result = {"bench": "optimus", "ratios": ratios, "aims": {}, "runs": 1, "spread": {}}
    text = json.dumps(result)
    RESULT.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

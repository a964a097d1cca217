"""The few values that rooms hand to each other, free of torch; and the metrics of a run, read from its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from mimo.hooks._json import parse_json

METRICS_FILE = "metrics.jsonl"
"""In a run directory: a JSON object a line, each with its ``step``."""

ItemRole: TypeAlias = Literal["", "input", "output", "both"]
"""What the model does with an item, see `ItemInfo`."""


@attrs.frozen(kw_only=True)
class ItemInfo:
    """One image or clip of a sample, as known from its header alone.

    ``size`` is in the modality's unit: ``(height, width)`` in pixels for an image, ``(frames, frames a second)`` for a
    clip. A dataset may leave it empty: then the encoder that reads the modality is asked to measure the raw item.
    ``role`` says what the model does with it: an encoder reads an input, a generator learns to make an output, and what
    is both is made first and read behind that. Empty, it is an input where the model reads its modality, and an output
    elsewhere.
    """

    sample: int
    index: int
    modality: str
    size: tuple[int, ...]
    role: ItemRole = ""


@attrs.frozen(kw_only=True)
class RunInfo:
    """What a lifecycle plugin may know of the run that begins; ``config`` is the resolved one as plain data.

    ``loaded`` describes the checkpoint that it begins with, and what began new or was left; empty if with none.
    """

    name: str
    directory: Path
    rank: int
    world: int
    first_step: int
    steps: int
    config: Mapping[str, Any]
    loaded: str = ""


@attrs.frozen(kw_only=True)
class EdgeTraffic:
    """What each rank sent to others on one edge in one step, by rank, forward and as gradients.

    ``rows_in_place`` stayed on their rank, there and back.
    """

    rows_sent: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    rows_in_place: tuple[int, ...]
    gradient_rows_sent: tuple[int, ...]
    gradient_bytes_sent: tuple[int, ...]


@attrs.frozen
class OptimizerBytes:
    """Memory of a module's optimizers, state and what they need to step it, in host and device memory.

    ``promised`` is what they said before they took any.
    """

    host: int
    device: int
    host_promised: int
    device_promised: int


@attrs.frozen(kw_only=True)
class Flops:
    """Arithmetic of a module in one step, two operations for a multiplication and an addition.

    Args:
        model_operations: what forward and backward need, on all ranks of the module together.
        hardware_operations: the same with what backward computes again.
        model_flops: ``model_operations`` a second of the step, and a rank of the module.
        hardware_flops: ``hardware_operations`` likewise.
        mfu: model FLOPs utilisation, ``model_flops`` over the most that a rank's device can do; None if unknown.
        hfu: hardware FLOPs utilisation, ``hardware_flops`` likewise.
    """

    model_operations: float
    hardware_operations: float
    model_flops: float
    hardware_flops: float
    mfu: float | None = None
    hfu: float | None = None


@attrs.frozen(kw_only=True)
class MemoryBytes:
    """Bytes on the device of the rank of a module that has held the most.

    Args:
        held: of the module by kind, at the moment of a step's forward and backward at which the rank held the most:
            weights, what is ``gathered`` of them, gradients, the ``optimizer``'s state, activations, ``working`` memory
            of one computation, and messages.
        estimated: of the module by kind, as `mimo check` says, each at its most.
        rank_held: all that the rank held at that moment, whatever module it is of.
        rank_estimated: the same as `mimo check` says.
        allocated: the most that the device's allocator had given away at one time since the metrics last said so, of
            all modules of the rank; None where the device doesn't count.
        reserved: the most that it had taken from the device.
    """

    held: Mapping[str, int] = attrs.field(factory=dict)
    estimated: Mapping[str, int] = attrs.field(factory=dict)
    rank_held: int | None = None
    rank_estimated: int | None = None
    allocated: int | None = None
    reserved: int | None = None


@attrs.frozen(kw_only=True)
class StepInfo:
    """What happened in one training step, equal on every rank, times excepted.

    ``loss`` is per label token over the global batch, each counted by its weight; ``label_tokens`` are those whose
    weight is not 0, and ``label_weight`` is the sum of their weights, which is their number if the data gives none;
    ``rows`` counts each module's rows in the step; ``norms`` are per-module gradient norms before clipping;
    ``seconds`` is the wall time of the step on this rank; ``module_seconds`` are those of each module's computations,
    waiting for their rows included, as a mean over its ranks (what is encoded ahead counts where it is done);
    ``data_seconds`` are those in which a rank waited for samples and items, the longest of all ranks; ``broken`` counts
    samples with items that can't be decoded, which count for nothing, see ``data.max_broken``. ``samples`` counts those
    of the step, ``dropped`` those that it has left out as they are too long, see ``data.longer``.
    ``losses`` are further losses that are trained on beside ``loss``, per label token like it; ``counts`` is what else
    the model counts, such as the rows that each expert took. ``edges`` is what was sent on each edge, where
    ``logging.edges`` asks for it. ``loss_scale`` is what fp16 multiplied the loss by in this step; None in other
    precisions. ``group_norms`` are those of clip groups that have a name of their own; ``zero_gradients`` counts the
    numbers of each module's gradients that are exactly zero, where ``logging.zero_gradients`` asks for it.
    ``optimizer_bytes`` is what optimizers hold that can say so, by module, on all its ranks together. ``flops`` is the
    arithmetic of each module whose plugin gives it. ``memory`` is what ranks hold, by module: measured in the steps
    that ``logging.memory`` asks for, and counted by accelerators every ``logging.interval`` steps.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    label_tokens: int
    label_weight: float = attrs.field()
    rows: Mapping[str, int]
    norms: Mapping[str, float]
    seconds: float
    module_seconds: Mapping[str, float]
    tokens_per_second: float
    truncated: int
    skipped: bool
    losses: Mapping[str, float] = attrs.field(factory=dict)
    counts: Mapping[str, Sequence[int]] = attrs.field(factory=dict)
    edges: Mapping[str, EdgeTraffic] = attrs.field(factory=dict)
    loss_scale: float | None = None
    group_norms: Mapping[str, float] = attrs.field(factory=dict)
    zero_gradients: Mapping[str, int] = attrs.field(factory=dict)
    optimizer_bytes: Mapping[str, OptimizerBytes] = attrs.field(factory=dict)
    flops: Mapping[str, Flops] = attrs.field(factory=dict)
    memory: Mapping[str, MemoryBytes] = attrs.field(factory=dict)
    data_seconds: float = 0.0
    broken: int = 0
    samples: int = 0
    dropped: int = 0

    @label_weight.default
    def _of_label_tokens(self) -> float:
        return float(self.label_tokens)


@attrs.frozen(kw_only=True)
class Prediction:
    """What the model predicts for one held-out sample.

    Args:
        sample: its number in the evaluation dataset.
        text: the argmax at each label whose weight is not 0 given the true tokens before it, up to the end, as text.
            Where all of it is right, it is what greedy decoding gives.
        is_exact: whether the argmax is right at each of them.
        item: the sample's first item as the dataset gives it, such as an image; None if it has none.
    """

    sample: int
    text: str
    is_exact: bool
    item: Any = attrs.field(default=None, eq=False, repr=False)


@attrs.frozen(kw_only=True)
class EvaluationInfo:
    """Result of one evaluation, equal on every rank but for its predictions.

    Args:
        step: after which it was made.
        loss: per label token, each counted by its weight.
        exact_match: share of samples of which every label token whose weight is not 0 is the argmax.
        samples: how many there were.
        losses: other losses by name, likewise; the divergence from each teacher.
        answers: mean score of generated answers, by metric; empty where none were generated.
        predictions: for the first samples, on one rank; empty on the others. Each is made when it is taken out.
    """

    step: int
    loss: float
    exact_match: float
    samples: int
    losses: Mapping[str, float] = attrs.field(factory=dict)
    answers: Mapping[str, float] = attrs.field(factory=dict)
    predictions: Sequence[Prediction] = attrs.field(default=(), eq=False, repr=False)


@attrs.frozen(kw_only=True)
class IndexInfo:
    """What the index of a dataset says of its samples.

    Args:
        name: of the data.
        path: of the index.
        samples: how many, broken ones among them.
        broken: of these.
        distributions: by what is counted, such as tokens of a sample, or rows of an item of each modality: pairs of a
            number and how often it comes, the least number first; at least one pair each.
    """

    name: str
    path: Path
    samples: int
    broken: int
    distributions: Mapping[str, Sequence[tuple[int, int]]] = attrs.field(eq=False, repr=False)


@attrs.frozen
class Common:
    """A JSON leaf of a state tree that must be equal on all ranks."""

    value: Any


@attrs.frozen
class Owned:
    """A JSON leaf that only the ranks of one module know; written by them, found by whoever holds the module."""

    value: Any
    module: str


StateTree: TypeAlias = Mapping[str, "StateTree | Any"]
"""Nested mapping whose leaves are tensors, DTensors, `Common` or `Owned`; keys hold no slash."""


@runtime_checkable
class Stateful(Protocol):
    """A part of a run whose state a checkpoint holds."""

    @property
    def name(self) -> str:
        """Top-level key of this part in the checkpoint."""

    def state(self) -> StateTree:
        """Return the present state; tensors are views, not copies."""

    def load(self, tree: StateTree) -> None:
        """Take a state back; ``tree`` has the structure of `state`, filled from a checkpoint."""


@attrs.frozen
class Generators:
    """A part of a run whose state is that of generators of random numbers, and nothing else.

    ``load.rng = false`` leaves such a part as its plugin made it, where other parts are loaded. A plugin hands it in
    by `mimo_state` like any `Stateful`.
    """

    part: Stateful

    @property
    def name(self) -> str:
        """Top-level key of the part in the checkpoint."""
        return self.part.name

    def state(self) -> StateTree:
        """Return the part's present state."""
        return self.part.state()

    def load(self, tree: StateTree) -> None:
        """Have the part take a state back."""
        self.part.load(tree)


def read_metrics(path: Path) -> list[Mapping[str, Any]]:
    """Return the objects of a metrics file; null stands for numbers that are not finite.

    A line that can't be read is left out, such as one that a power failure has cut or filled with zeros.
    """
    lines = map(parse_metrics, path.read_bytes().split(b"\n"))
    return [line for line in lines if line is not None]


def parse_metrics(line: bytes) -> Mapping[str, Any] | None:
    """Return the object of one line; None for anything else."""
    try:
        parsed = parse_json(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and type(parsed.get("step")) is int else None

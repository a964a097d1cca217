"""The order of a run's samples: computed for any step by itself, so that resuming needs no place in a stream.

Positions are counted from 0 over the whole run; a step reads those of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.order.epochs import PartStream
from mimo.data.order.first_order import FirstOrder
from mimo.data.order.mixture import Mixture
from mimo.data.order.shares import Shares
from mimo.data.samples import DataPart, Dataset, parts_of
from mimo.hooks import ConfigError

FIRST_ORDER = 1
"""Version of the order of runs that say none."""
NEWEST_ORDER = 2
"""Version of the order of new runs."""
_BLOCK = 1 << 10
"""Positions that are read at once: of so many it takes little longer than of a step's few."""


@attrs.frozen(kw_only=True)
class WeightChange:
    """Weights of a mixture, and the step of the data from which they hold.

    Args:
        step: from 1 on.
        weights: of all parts, by name, each finite and above 0.
        position: at which that step begins; None where it follows from the samples of a step.
    """

    step: int
    weights: Mapping[str, float]
    position: int | None = None


class _Stream(Protocol):
    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the samples at ``count`` positions from ``first`` on."""


@attrs.frozen(kw_only=True, eq=False)
class SampleOrder:
    """Names the samples of each step; `of` makes one.

    Args:
        version: 1, all samples in one epoch after another, the order of each held in memory; or 2, by parts and shards,
            in a memory that doesn't grow with the samples.
        parts: of the dataset.
        changes: weights of the parts, the first from step 1 on, others from later ones; empty in version 1.
        global_batch: samples of one step, over all lanes and microbatches; may be more than there are. 0: steps have
            numbers of samples of their own, and weights that change do so at positions.
        seed: 0 or more.
    """

    version: int
    parts: tuple[DataPart, ...] = attrs.field(repr=False)
    changes: tuple[WeightChange, ...]
    global_batch: int
    seed: int
    _stream: _Stream = attrs.field(init=False, repr=False)

    @_stream.default
    def _make_stream(self) -> _Stream:
        for name, value, least in (("global_batch", self.global_batch, 0), ("seed", self.seed, 0)):
            if value < least:
                msg = f"{name}: expected at least {least}, got {value}"
                raise ValueError(msg)
        samples = sum(part.samples for part in self.parts)
        if self.version == FIRST_ORDER:
            _refuse_weights(self.parts)
            return FirstOrder(samples, self.seed)
        if self.version == NEWEST_ORDER:
            _check_changes(self.changes, self.parts, self.global_batch)
            stream = _StreamOfParts(self.parts, self.changes, global_batch=self.global_batch, seed=self.seed)
            return _InBlocks(stream, min(samples, _BLOCK))
        msg = f"version: expected {FIRST_ORDER} or {NEWEST_ORDER}, got {self.version}"
        raise ValueError(msg)

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        *,
        global_batch: int,
        seed: int,
        version: int = NEWEST_ORDER,
        changes: Sequence[WeightChange] = (),
    ) -> SampleOrder:
        """Return the order of a dataset's samples.

        Args:
            dataset: of at least one sample.
            global_batch: samples of a step; 0: each has a number of its own.
            seed: of the run.
            version: of the order.
            changes: weights that hold instead of the dataset's own.

        Raises:
            ValueError: a number is out of range, or changes have other parts than the dataset, or no ascending steps.
            ConfigError: a weight is too small, or the dataset has weights and version 1 knows none.
            PluginError: the dataset's parts contradict each other.
        """
        if not len(dataset):
            msg = "samples: expected at least 1, got 0"
            raise ValueError(msg)
        parts = parts_of(dataset)
        begin = None if global_batch else 0
        own = () if version == FIRST_ORDER else (WeightChange(step=1, weights=weights_of_parts(parts), position=begin),)
        changes = tuple(changes) or own
        return cls(version=version, parts=parts, changes=changes, global_batch=global_batch, seed=seed)

    def with_weights(self, step: int, weights: Mapping[str, float], *, position: int | None = None) -> SampleOrder:
        """Return the order with other weights from a step on; as it is where as many samples are taken of each part.

        Args:
            step: from 1 on.
            weights: of all parts, by name.
            position: at which that step begins, where steps have numbers of samples of their own.
        """
        names = [part.name for part in self.parts]
        before = self.changes[-1].weights
        if Shares.of({name: before[name] for name in names}) == Shares.of({name: weights[name] for name in names}):
            return self
        earlier = (change for change in self.changes if change.step < step)
        return attrs.evolve(self, changes=(*earlier, WeightChange(step=step, weights=weights, position=position)))

    @property
    def shares(self) -> Mapping[str, float]:
        """Which fraction of the samples comes from each part, by the weights that hold last."""
        weights = self.changes[-1].weights if self.changes else weights_of_parts(self.parts)
        total = sum(weights.values())
        return {part.name: weights[part.name] / total for part in self.parts}

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the samples of ``step`` (counted from 1), in order, where all steps have equally many.

        Raises:
            ValueError: ``step`` is less than 1, or they have not.
        """
        for name, value in (("step", step), ("global_batch", self.global_batch)):
            if value < 1:
                msg = f"{name}: expected at least 1, got {value}"
                raise ValueError(msg)
        return tuple(self.read((step - 1) * self.global_batch, self.global_batch).tolist())

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the samples at ``count`` positions from ``first`` on; positions are counted from 0 over all steps."""
        return self._stream.read(first, count)


def weights_of_parts(parts: Sequence[DataPart]) -> Mapping[str, float]:
    """Return the weights that parts have by themselves, those that count epochs as the samples that these come to."""
    return {
        part.name: part.weight if part.weight is not None else part.samples * (part.epochs or 1.0) for part in parts
    }


class _InBlocks:
    """Reads a stream ahead, as positions usually follow each other; what it holds never shows in a result.

    Args:
        stream: what is read.
        least: positions that are read at once if fewer are asked for.
    """

    def __init__(self, stream: _Stream, least: int) -> None:
        self._stream = stream
        self._least = least
        self._latest = 0, np.empty(0, dtype=np.int64)

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the samples at ``count`` positions from ``first`` on."""
        begin, block = self._latest
        if not begin <= first <= first + count <= begin + len(block):
            begin, block = self._latest = first, self._stream.read(first, max(count, self._least))
        return block[first - begin : first - begin + count]


class _StreamOfParts:
    """Order of version 2."""

    def __init__(
        self, parts: Sequence[DataPart], changes: Sequence[WeightChange], *, global_batch: int, seed: int
    ) -> None:
        self._streams = [
            PartStream(part.shards or (part.samples,), (seed, number)) for number, part in enumerate(parts)
        ]
        self._firsts = np.cumsum([0, *(part.samples for part in parts)])[:-1].tolist()
        names = [part.name for part in parts]
        in_order = [
            (_begin(change, global_batch), {name: change.weights[name] for name in names}) for change in changes
        ]
        shares = [(begin, Shares.of(weights)) for begin, weights in in_order]
        self._mixture = Mixture(shares, seed) if len(parts) > 1 else None

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the samples at ``count`` positions from ``first`` on."""
        if self._mixture is None:
            return self._streams[0].read(np.arange(first, first + count))
        draws = self._mixture.read(first, count)
        found = np.empty(count, dtype=np.int64)
        for part in np.unique(draws.parts).tolist():
            drawn = draws.parts == part
            found[drawn] = self._firsts[part] + self._streams[part].read(draws.places[drawn])
        return found


def _begin(change: WeightChange, global_batch: int) -> int:
    """Return the position from which weights hold."""
    if global_batch:
        return (change.step - 1) * global_batch
    assert change.position is not None, change
    return change.position


def _refuse_weights(parts: Sequence[DataPart]) -> None:
    if any(part.weight is not None or part.epochs is not None for part in parts):
        raise ConfigError(
            "data.order",
            expected=f"{NEWEST_ORDER}, as version {FIRST_ORDER} takes all samples equally often and knows no weights",
            got=repr(FIRST_ORDER),
            fix="Leave it out.",
        )


def _check_changes(changes: Sequence[WeightChange], parts: Sequence[DataPart], global_batch: int) -> None:
    names = {part.name for part in parts}
    steps = [change.step for change in changes]
    if steps[0] != 1 or any(later <= step for step, later in pairwise(steps)):
        msg = f"changes: expected steps that ascend from 1, got {steps}"
        raise ValueError(msg)
    if not global_batch:
        begins = [_begin(change, 0) for change in changes]
        if begins[0] != 0 or any(later <= begin for begin, later in pairwise(begins)):
            msg = f"changes: expected positions that ascend from 0, got {begins}"
            raise ValueError(msg)
    for change in changes:
        if change.weights.keys() != names:
            msg = f"changes: expected weights of {sorted(names)}, got those of {sorted(change.weights)}"
            raise ValueError(msg)

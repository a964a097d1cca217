"""The order of samples in checkpoints: what is saved of it, and how a run that resumes reads on in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from mimo.data import FIRST_ORDER, NEWEST_ORDER, DataPart, SampleOrder, WeightChange, parts_of, weights_of_parts
from mimo.hooks import CheckpointError, ConfigError, JsonNode, JsonSource
from mimo.trainer.batch.step_samples import StepSamples
from mimo.trainer.config.names import PROGRESS
from mimo.trainer.job.job import Job
from mimo.trainer.resume.resume_point import Source

_ORDER = f"{PROGRESS}.order"
_ANEW = "Set load.data = false to begin with the data anew."


@attrs.frozen(kw_only=True)
class SavedOrder:
    """What a checkpoint holds of the order of samples, from which its run resumes reading.

    Args:
        version: of the order.
        sizes: for each part its number of samples and a digest of its shards, by name; empty where none are saved, as
            in version 1 and earlier.
        changes: weights of parts, and the steps of the data from which they hold.
        position: at which the next step begins, of a run whose steps are by tokens.
    """

    version: int = FIRST_ORDER
    sizes: Mapping[str, tuple[int, str]] = attrs.field(factory=dict)
    changes: tuple[WeightChange, ...] = ()
    position: int | None = None

    @classmethod
    def of(cls, source: Source) -> SavedOrder:
        """Return that of a checkpoint; one without any was saved when there was only the first version.

        Raises:
            CheckpointError: it holds something else there.
        """
        if _ORDER not in source.manifest.common:
            return cls()
        where = JsonSource(where=f"{source.folder}: {_ORDER}", error=CheckpointError, fix="Load another checkpoint.")
        by_tokens = not source.progress("global_batch")
        position = ("position",) if by_tokens else ()
        keys = JsonNode(source.manifest.common[_ORDER], where).fields(("version", "parts", "changes", *position))
        version = keys["version"].integer()
        if not FIRST_ORDER <= version <= NEWEST_ORDER:
            raise keys["version"].fail(f"a version from {FIRST_ORDER} to {NEWEST_ORDER}")
        sizes = {}
        for name, node in keys["parts"].items():
            part = node.fields(("samples", "shards"))
            sizes[name] = part["samples"].size(), part["shards"].text()
        changes = tuple(_change(node, sizes.keys(), position) for node in keys["changes"].list())
        steps = [change.step for change in changes]
        if version > FIRST_ORDER and (steps[:1] != [1] or steps != sorted(set(steps))):
            raise keys["changes"].fail("weights from step 1 on, and others from later steps")
        return cls(
            version=version,
            sizes=sizes,
            changes=changes,
            position=keys["position"].size() if by_tokens else None,
        )


def order_state(order: SampleOrder, position: int | None = None) -> Mapping[str, Any]:
    """Return what a checkpoint holds of an order, as plain data.

    Args:
        order: of the run.
        position: at which its next step begins; None where that follows from the number of the step.
    """
    return {
        "version": order.version,
        "parts": {name: {"samples": samples, "shards": shards} for name, (samples, shards) in _sizes(order.parts)},
        "changes": [
            {"step": change.step, "weights": dict(change.weights), **_known("position", change.position)}
            for change in order.changes
        ],
        **_known("position", position),
    }


def resumed_order(job: Job, source: Source) -> SampleOrder:
    """Return the order in which a run reads that begins with a checkpoint; call it after `check_order`.

    It is the checkpoint's, with other weights from the run's first step on where settings have others.
    """
    if source.finetunes or not source.take.data:
        return job.sample_order()
    saved = SavedOrder.of(source)
    order = job.sample_order(version=saved.version, changes=saved.changes)
    if saved.version == FIRST_ORDER:
        return order
    step = source.first_step - source.data_begun
    return order.with_weights(step, weights_of_parts(order.parts), position=saved.position)


def resumed_samples(job: Job, source: Source) -> StepSamples:
    """Return the samples of the steps of a run that begins with a checkpoint, likewise."""
    resumes = source.take.data and not source.finetunes
    return StepSamples(
        job,
        resumed_order(job, source),
        begun=source.data_begun,
        step=source.first_step,
        position=SavedOrder.of(source).position or 0 if resumes else 0,
    )


def check_order(job: Job, source: Source) -> Iterator[ConfigError]:
    """Yield why the place in the data that a checkpoint has is none in those of the settings."""
    assert job.train is not None
    saved, parts, folder = SavedOrder.of(source), parts_of(job.train), repr(str(source.folder))
    as_saved = f"as in the run that {folder} was saved by"
    if job.settings.data.order not in {0, saved.version}:
        yield ConfigError(
            "data.order",
            expected=f"{saved.version}, {as_saved}",
            got=repr(job.settings.data.order),
            fix=f"Leave it out: a run keeps its order. {_ANEW}",
        )
    weighted = [part.name for part in parts if part.weight is not None or part.epochs is not None]
    if saved.version == FIRST_ORDER and weighted:
        yield ConfigError(
            "data",
            expected=f"a dataset without weights, {as_saved}, whose order of version {FIRST_ORDER} knows none",
            got=f"weights of {', '.join(weighted)}",
            fix=_ANEW,
        )
    sizes, fix = dict(_sizes(parts)), f"Positions in the data are counted by it. {_ANEW}"
    if saved.sizes and sizes.keys() != saved.sizes.keys():
        yield ConfigError("data", expected=f"{_names(saved.sizes)}, {as_saved}", got=_names(sizes), fix=fix)
    elif saved.sizes:
        for name, (samples, shards) in saved.sizes.items():
            of_part = f" of {name}" if name else ""
            if sizes[name][0] != samples:
                got = f"{sizes[name][0]}"
                yield ConfigError("data", expected=f"{samples} samples{of_part}, {as_saved}", got=got, fix=fix)
            elif sizes[name][1] != shards:
                expected = f"shards{of_part} of the sizes that they had, {as_saved}"
                yield ConfigError("data", expected=expected, got="others", fix=fix)
    elif len(job.train) != source.progress("samples"):
        expected = f"{source.progress('samples')} samples, {as_saved}"
        yield ConfigError("data", expected=expected, got=f"{len(job.train)}", fix=fix)


def order_changes(job: Job, source: Source) -> Iterator[str]:
    """Yield in what the order of samples is another one than before, for who reads what a run resumes with."""
    if source.finetunes:
        return
    before, order = SavedOrder.of(source), resumed_order(job, source)
    if order.version != before.version:
        yield f"data.order {order.version} (was {before.version})"
    if source.take.data and order.changes != before.changes:
        shares = (f"{name} {100 * share:.3g}%" for name, share in order.shares.items())
        yield f"samples from step {source.first_step} on: {', '.join(shares)}"


def _sizes(parts: Sequence[DataPart]) -> Iterator[tuple[str, tuple[int, str]]]:
    for part in parts:
        shards = ",".join(map(str, part.shards)).encode()
        digest = hashlib.blake2b(shards, digest_size=8).hexdigest() if part.shards else ""
        yield part.name, (part.samples, digest)


def _names(sizes: Mapping[str, Any]) -> str:
    return f"the sources {', '.join(sorted(sizes))}" if any(sizes) else "one dataset without sources"


def _known(name: str, value: int | None) -> Mapping[str, int]:
    return {} if value is None else {name: value}


def _change(node: JsonNode, names: Any, position: tuple[str, ...]) -> WeightChange:
    keys = node.fields(("step", "weights", *position))
    weights = {}
    for name, weight in keys["weights"].items():
        if type(weight.value) not in {int, float} or not 0 < weight.value < float("inf"):
            raise weight.fail("a finite number above 0")
        weights[name] = float(weight.value)
    if weights.keys() != set(names):
        raise keys["weights"].fail(f"weights of {', '.join(sorted(names))}")
    begin = keys["position"].size() if position else None
    return WeightChange(step=keys["step"].integer(), weights=weights, position=begin)

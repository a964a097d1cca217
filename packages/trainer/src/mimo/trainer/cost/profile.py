"""A profile: what the computations and messages of a job took on some machine, as the JSON that `mimo profile` writes.

It holds for the layout that it was measured in, and is refused for any other. The size of a microbatch may differ:
seconds of a pass are ``fixed`` and as many more for each sample of a language lane. All keys: docs/schedules.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import attrs

from mimo.hooks import ConfigError, must_be, parse_json
from mimo.schedule import Costs, Link, Seconds, StageCost
from mimo.topology import AXES, StageId, show_ranks
from mimo.trainer.config.structure import structure, unstructure
from mimo.trainer.cost.sample_stats import lane_samples
from mimo.trainer.job.job import Job

VERSION = 1
_WHERE = "schedule.profile"
_MAX_SIZE = 2**24
"""Bytes of the largest file that is read; one of a thousand stages is a tenth of it."""
_AGAIN = "Write one for this job with `mimo profile FILE`, or leave it out."


_SHOWN_LETTERS = 80
_LIMIT = 1e18
"""No time, count or size of a step comes near it, and what is computed from less stays finite."""


_number = must_be(f"a number from 0 and below {_LIMIT:g}", lambda value: value is None or 0 <= value < _LIMIT)
_speed = must_be(f"a number above 0 and below {_LIMIT:g}", lambda value: value is None or 0 < value < _LIMIT)


def _count(default: Any = attrs.NOTHING) -> Any:
    return attrs.field(default=default, validator=_number)


@attrs.frozen(kw_only=True)
class LinearTime:
    """Seconds of a pass: ``fixed``, and ``sample`` for every sample that each language lane has in it."""

    fixed: float = _count()
    sample: float = _count()

    def of(self, samples: float) -> float:
        """Return the seconds of a pass over so many samples of a language lane."""
        return self.fixed + self.sample * samples


@attrs.frozen(kw_only=True)
class PassTimes:
    """What passes over ``samples`` samples of a language lane took, in seconds; None where there is no such thing."""

    samples: int = _count()
    forward: float | None = _count(None)
    backward: float | None = _count(None)
    input_gradient: float | None = _count(None)
    weight_gradient: float | None = _count(None)


@attrs.frozen(kw_only=True)
class StageTimes:
    """One stage.

    Args:
        module, stage: which.
        forward, backward, input_gradient, weight_gradient: lines through ``passes``; ``backward`` is the whole one.
            None where the stage does not do it, or was not measured.
        reduce: seconds of the reduction of its gradients.
        reduce_tied: seconds in which those of a parameter that another stage holds too are added up.
        activations: bytes that each sample of a language lane keeps from forward to backward.
        recomputed: bytes more for each that recomputing brings back.
        weight_inputs: bytes of each that a split backward keeps from its first part to its second.
        passes: what was measured.
    """

    module: str
    stage: int
    forward: LinearTime
    backward: LinearTime | None = None
    input_gradient: LinearTime | None = None
    weight_gradient: LinearTime | None = None
    reduce: float = _count(0.0)
    reduce_tied: float = _count(0.0)
    activations: float = _count(0.0)
    recomputed: float = _count(0.0)
    weight_inputs: float = _count(0.0)
    passes: tuple[PassTimes, ...] = ()


@attrs.frozen(kw_only=True)
class EdgeTimes:
    """One edge: bytes that each sample of a language lane sends between the two ranks that exchange most.

    ``bandwidth`` in bytes a second; None where both ends are one rank, and nothing could be measured.
    """

    name: str
    bytes: float = _count()
    latency: float = _count(0.0)
    bandwidth: float | None = attrs.field(default=None, validator=_speed)


@attrs.frozen(kw_only=True)
class Profile:
    """The whole file.

    Args:
        version: of this layout of keys.
        machine: where it was measured.
        settings: digest of all settings of the job.
        micro_batch: samples of a microbatch for each language lane.
        modules: what must be the same for the profile to hold, by module.
        stages, edges: all of them.
    """

    version: int
    machine: Mapping[str, str]
    settings: str
    micro_batch: int = _count()
    modules: Mapping[str, Mapping[str, Any]]
    stages: tuple[StageTimes, ...]
    edges: tuple[EdgeTimes, ...]

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(unstructure(self), indent=1) + "\n"

    def costs(self, micro_batch: int) -> Costs:
        """Return what a step costs whose microbatches have so many samples for each language lane."""

        def seconds(line: LinearTime | None, factor: float = 1.0) -> Seconds:
            return Seconds() if line is None else Seconds(line.fixed * factor, line.sample * micro_batch * factor)

        def stage_cost(times: StageTimes) -> StageCost:
            factor = _backward_scale(times, micro_batch)
            return StageCost(
                forward=seconds(times.forward),
                input_gradient=seconds(times.input_gradient, factor),
                weight_gradient=seconds(times.weight_gradient, factor),
                reduce=times.reduce,
                reduce_tied=times.reduce_tied,
                activations=round(times.activations * micro_batch),
                recomputed=round(times.recomputed * micro_batch),
                weight_inputs=round(times.weight_inputs * micro_batch),
            )

        return Costs(
            stages={StageId(times.module, times.stage): stage_cost(times) for times in self.stages},
            message_bytes={times.name: round(times.bytes * micro_batch) for times in self.edges},
            links={
                times.name: Link(times.latency, times.bandwidth) for times in self.edges if times.bandwidth is not None
            },
        )


def read_profile(path: Path, job: Job) -> Costs:
    """Return what a step of ``job`` costs by the profile at ``path``.

    Raises:
        ConfigError: it can't be read, is none, or is of another job; what differs is named.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SIZE + 1)
    except OSError as error:
        raise ConfigError(
            _WHERE, expected="a file that can be read", got=f"{str(path)!r}: {error.strerror}", fix=_AGAIN
        ) from error
    if len(content) > _MAX_SIZE:
        raise ConfigError(
            _WHERE,
            expected=f"a profile of at most {_MAX_SIZE} bytes",
            got=f"{str(path)!r}, which is larger",
            fix=_AGAIN,
        )
    try:
        table = parse_json(content)
    except ValueError as error:
        raise ConfigError(_WHERE, expected="JSON", got=f"{str(path)!r}: {error}", fix=_AGAIN) from error
    version = table.get("version") if isinstance(table, dict) else None
    if version != VERSION:
        raise ConfigError(
            _WHERE, expected=f"a profile of version {VERSION}", got=f"{str(path)!r} of version {version!r}", fix=_AGAIN
        )
    profile = structure(table, Profile, _WHERE)
    _check(profile, job, path)
    return profile.costs(lane_samples(job))


def layout_of(job: Job) -> Mapping[str, Mapping[str, Any]]:
    """Return by module the layout that a profile of ``job`` is valid for, as plain data."""
    cuts = job.model_graph.by_name
    return {
        module.name: {
            "plugin": module.spec.name,
            "config": unstructure(module.config),
            "ranks": show_ranks(module.grid.ranks),
            **dict(zip((*AXES, "ep", "etp"), (*module.grid.shape, module.grid.ep, module.grid.etp), strict=True)),
            "sequence_parallel": module.sequence_parallel,
            "chunks": cuts[module.name].chunks,
            "placement": cuts[module.name].placement,
            "recompute": cuts[module.name].recompute,
            "precision": job.settings.run.precision,
            "frozen": module.frozen if isinstance(module.frozen, bool) else sorted(module.frozen),
            **({"compile": job.settings.run.compile_backend} if job.settings.run.compile else {}),
            **({} if module.lora is None else {"lora": unstructure(module.lora)}),
            "optimizer": {
                key: value
                for key, value in unstructure(module.optimizer.config).items()
                if key in module.optimizer.spec.lays
            },
        }
        for module in job.modules
    }


def digest(job: Job) -> str:
    """Return a digest of the settings of a job."""
    return hashlib.sha256(json.dumps(job.plain, sort_keys=True, default=str).encode()).hexdigest()


def machine(device: str, torch_version: str) -> Mapping[str, str]:
    """Return where a profile was measured.

    Args:
        device: what the ranks compute on.
        torch_version: of PyTorch.
    """
    return {
        "device": device,
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch_version,
    }


def _backward_scale(times: StageTimes, micro_batch: int) -> float:
    """Return the factor by which both parts of a split backward are scaled so that their sum is that of a full one.

    Where the job's own schedule splits it, no full one was measured, and the parts count as they are.
    """
    if times.backward is None:
        return 1.0
    parts = sum(line.of(micro_batch) for line in (times.input_gradient, times.weight_gradient) if line is not None)
    return times.backward.of(micro_batch) / parts if parts else 1.0


def _check(profile: Profile, job: Job, path: Path) -> None:
    """Refuse a profile of another job."""
    differing = [
        (what, own, other)
        for what, own, other in (
            ("modules", layout_of(job), profile.modules),
            ("stages", sorted(_stage_names(job)), sorted(f"{times.module}.{times.stage}" for times in profile.stages)),
            ("edges", sorted(edge.name for edge in job.graph.edges), sorted(times.name for times in profile.edges)),
        )
        if own != other
    ]
    if not differing:
        return
    what, own, other = _deepest(*differing[0])
    raise ConfigError(
        _WHERE,
        expected=f"a profile of this job, whose {what} is {_shown(own)}",
        got=f"{str(path)!r}, where it is {_shown(other)}",
        fix=_AGAIN,
    )


def _stage_names(job: Job) -> list[str]:
    return [f"{stage.module}.{stage.stage}" for stage in job.graph.stages]


_ABSENT = "missing"


def _deepest(what: str, own: Any, other: Any) -> tuple[str, Any, Any]:
    """Return the first place inside two unequal values at which they differ."""
    if not isinstance(own, Mapping) or not isinstance(other, Mapping):
        return what, own, other
    key = next(key for key in (*own, *other) if own.get(key, _ABSENT) != other.get(key, _ABSENT))
    return _deepest(f"{what}.{key}", own.get(key, _ABSENT), other.get(key, _ABSENT))


def _shown(value: Any) -> str:
    return value if value == _ABSENT else shorten(json.dumps(value, default=str), _SHOWN_LETTERS, placeholder="…")

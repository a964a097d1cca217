"""Which process this is among those of a run, as its launcher or the environment tells."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from mimo.hooks import ConfigError
from mimo.trainer._progress import Progress

_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


@attrs.frozen(kw_only=True)
class Place:
    """One process of a run.

    Args:
        rank: 0 to ``world - 1``.
        world: number of processes.
        local_rank: its number among the processes of this machine.
        device: where it computes, ``cpu`` or ``cuda:<local_rank>``.
        progress: what it does now.
    """

    rank: int
    world: int
    local_rank: int
    device: str = "cpu"
    progress: Progress = attrs.field(factory=Progress, eq=False, repr=False)


def with_slurm(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with torchrun's names, taken from Slurm's where a Slurm step is told its master."""
    if "RANK" in environ or "MASTER_ADDR" not in environ or not all(name in environ for name in _SLURM.values()):
        return environ
    return {**environ, **{ours: environ[theirs] for ours, theirs in _SLURM.items()}}


def is_joining(environ: Mapping[str, str]) -> bool:
    """Tell whether somebody else, such as torchrun, started this process as one of several."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def place_in(environ: Mapping[str, str], device: str) -> Place:
    """Return the place that the environment names.

    Args:
        environ: with ``RANK`` and ``WORLD_SIZE``.
        device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: one of them is not a number.
    """
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    return Place(
        rank=rank, world=world, local_rank=local_rank, device=f"cuda:{local_rank}" if device == "cuda" else device
    )


def local_world(environ: Mapping[str, str], world: int) -> int:
    """Return how many of ``world`` processes share this machine."""
    return _number(environ, "LOCAL_WORLD_SIZE") if is_joining(environ) and "LOCAL_WORLD_SIZE" in environ else world


def ranks_of_machine(environ: Mapping[str, str], world: int) -> int:
    """Return how many of ``world`` processes each machine will run: all, unless ``LOCAL_WORLD_SIZE`` says otherwise.

    Raises:
        ConfigError: it is not a number of at least 1.
    """
    if "LOCAL_WORLD_SIZE" not in environ:
        return world
    count = _number(environ, "LOCAL_WORLD_SIZE")
    if not count:
        raise ConfigError("environment variable LOCAL_WORLD_SIZE", expected="1 or more", got="0")
    return count


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ConfigError(f"environment variable {name}", expected="a whole number", got=repr(environ[name]))
    return int(environ[name])

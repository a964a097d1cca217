"""Which device the processes of a machine compute on: one GPU for each, or the CPU, but never silently."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import attrs

from mimo.hooks import ConfigError
from mimo.launch.process.process_info import is_joining, local_world
from mimo.launch.process.slurm import number

Device: TypeAlias = Literal["cpu", "cuda"]

_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NONE = frozenset({"", "-1", "NoDevFiles"})
"""Values of a mask that hides all GPUs from a process; the last is Slurm's."""


@attrs.frozen(kw_only=True)
class Gpus:
    """The GPUs of a machine, as one process finds them.

    Args:
        visible: how many torch can use, as masks allow.
        present: how many this process can open, whether torch can use them or not; counted only where none is
            visible.
        torch: version of torch, and of the CUDA that it was built for.
    """

    visible: int
    present: int = 0
    torch: str = "torch"


def count_gpus() -> int:
    """Return how many GPUs this process can open, without torch, which may not be able to use them."""
    return sum(map(_opens, Path("/dev").glob("nvidia[0-9]*")))


def find_gpus() -> Gpus:
    """Return the GPUs that this process finds on its machine."""
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    present = 0 if visible else count_gpus()
    return Gpus(visible=visible, present=present, torch=f"torch {torch.__version__} (built for {built})")


def choose_device(device: str, world: int, *, gpus: Gpus, environ: Mapping[str, str]) -> Device:
    """Return where the processes of this machine compute.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; auto takes GPUs where there are any.
        world: number of processes of the run.
        gpus: of this machine, as this process finds them.
        environ: of this process, with torchrun's names.

    Raises:
        ConfigError: there are too few GPUs, torch can't use them, or ``device`` is ``cuda`` and there are none.
    """
    if device == "cpu":
        return "cpu"
    here, joins = local_world(environ, world), is_joining(environ)
    masks = [environ[name] for name in _MASKS if name in environ]
    if not gpus.visible:
        if device == "auto" and (not gpus.present or any(mask in _NONE for mask in masks)):
            return "cpu"
        raise _refuse(here, gpus, environ)
    own = gpus.visible == 1 and joins and bool(masks) and not _is_shared(here, environ)
    if gpus.visible < here and not own:
        raise _refuse(here, gpus, environ)
    return "cuda"


def _is_shared(here: int, environ: Mapping[str, str]) -> bool:
    """Return whether Slurm gave this machine's tasks fewer GPUs than there are tasks."""
    return "SLURM_GPUS_ON_NODE" in environ and number(environ, "SLURM_GPUS_ON_NODE") < here


def _refuse(here: int, gpus: Gpus, environ: Mapping[str, str]) -> ConfigError:
    got, joins = f"{gpus.visible} that it can use", is_joining(environ)
    hides = [f"{name}={environ[name]!r}" for name in _MASKS if environ.get(name) in _NONE]
    if not gpus.visible and hides:
        got, fix = f"none, as {hides[0]} hides them", "Change that, or set run.device=cpu."
    elif gpus.present:
        got = f"none of this machine's {gpus.present} that {gpus.torch} can use"
        fix = "Install a torch that is built for their driver, or set run.device=cpu."
    elif "SLURM_JOB_ID" in environ and joins:
        fix = "Give srun --gpus-per-task=1, or as many --gpus-per-node as --ntasks-per-node; or set run.device=cpu."
    elif "SLURM_JOB_ID" in environ:
        fix = "Start it with srun, a task for each GPU; or use fewer ranks, or set run.device=cpu."
    elif joins and "LOCAL_WORLD_SIZE" not in environ:
        fix = "Set LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun does, or set run.device=cpu."
    else:
        fix = "Use fewer ranks, or set run.device=cpu."
    who = "the process" if here == 1 else f"each of the {here} processes"
    return ConfigError("run.device", expected=f"a GPU for {who} on this machine", got=got, fix=fix)


def _opens(path: Path) -> bool:
    """Return whether a device file can be opened; a job also sees files of GPUs that its cluster keeps from it."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return True
    return False

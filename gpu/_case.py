"""What every test of `day.py` is: a program that gets a device, and writes down what it found.

``python gpu/_families.py --device cuda --write found.json``, with arguments of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but torch's own types don't say so

from mimo.launch import ProcessInfo
from mimo.launch.runtime import join_world

_TIMEOUT = timedelta(minutes=1)
"""Shorter than any test's limit, so that the ranks that wait report a hang."""


@attrs.frozen(kw_only=True)
class Case:
    """Where a test computes, and how much.

    Args:
        device: ``cpu`` or ``cuda:0``.
        tiny: as little as shows that the test works.
        folder: for whatever it writes meanwhile; exists.
        options: arguments of its own, by name.
    """

    device: torch.device
    tiny: bool
    folder: Path
    options: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """What `launch` calls the device."""
        return "cuda" if self.is_cuda else "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether it computes on a GPU."""
        return self.device.type == "cuda"


@attrs.frozen(kw_only=True)
class Found:
    """What a test found.

    Args:
        figures: numbers and words by name, as JSON takes them.
        wrong: each bound that was missed, in a line; none where the test has passed.
        skipped: why the test can't run here; empty where it did.
    """

    figures: Mapping[str, Any]
    wrong: Sequence[str] = ()
    skipped: str = ""


def run(test: Callable[[Case], Found], *, options: Mapping[str, Mapping[str, Any]] | None = None) -> int:
    """Be the program of a test.

    Args:
        test: what it does.
        options: arguments of its own, as `argparse` takes them, by name.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, required=True, help="of files that it needs meanwhile")
    parser.add_argument("--write", type=Path, required=True, help="a JSON file of what it found")
    for name, about in (options or {}).items():
        parser.add_argument(f"--{name}", **about)
    given = parser.parse_args()
    device = torch.device("cuda:0" if given.device == "cuda" else "cpu")
    own = {name: getattr(given, name) for name in options or {}}
    try:
        found = test(Case(device=device, tiny=given.tiny, folder=given.folder, options=own))
    except Exception as error:  # noqa: BLE001  # whatever it is, it belongs into the report
        traceback.print_exc()
        found = Found(figures={}, wrong=[f"{type(error).__name__}: {error}"])
    if dist.is_initialized():  # a trainer has made a group of this process alone
        dist.destroy_process_group()
    line = {**attrs.asdict(found), "device": name_of(device), "torch": torch.__version__}
    given.write.write_text(json.dumps(line), encoding="utf-8")
    return int(bool(found.wrong))


def name_of(device: torch.device) -> str:
    """Return what the device is called, and in its place why nobody can say."""
    if device.type == "cpu":
        return "cpu"
    try:
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "cuda, and there is none"
    except Exception as error:  # noqa: BLE001  # after an error on the device all that asks it fails; the first is reported
        return f"cuda, whose name is not told: {type(error).__name__}"


class noting:  # noqa: N801  # reads as a function; mypy sees of a class that it swallows what is raised
    """Continue after what is raised, which is printed and added to what is wrong."""

    def __init__(self, name: str, wrong: MutableSequence[str]) -> None:
        self._name, self._wrong = name, wrong

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Note an error; what ends the process is raised."""
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        self._wrong.append(f"{self._name}: {type(error).__name__}: {error}")
        return True


@contextmanager
def alone(case: Case) -> Iterator[ProcessInfo]:
    """Be the one rank of a process group, as `mimo train` makes it, in plain arithmetic: see `plain_arithmetic`.

    Yields:
        Its process, with the group for what lies on no device.
    """
    if case.is_cuda:
        torch.cuda.set_device(case.device)
    plain_arithmetic()
    process = ProcessInfo(rank=0, world=1, local_rank=0, device=str(case.device))
    process = join_world(process, HashStore(), timeout=_TIMEOUT)
    try:
        yield process
    finally:
        dist.destroy_process_group()


def plain_arithmetic() -> None:
    """Have products of float32 computed in float32, and attention by the kernel that PyTorch puts together itself.

    The other kernels of attention round elsewhere, and some add up in an order that differs from run to run.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)

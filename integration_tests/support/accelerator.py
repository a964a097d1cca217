"""A device that is none: tensors on it compute on the CPU, and whatever would have the host wait for it is noted.

Every operation on such a tensor passes through here, of forward, backward and optimizer. A GPU works through a queue;
the host waits until it is empty where it reads a number (`Tensor.item`, `bool`), where a shape follows from numbers
(`nonzero`, a mask as an index), and where it copies to or from the device, unless the copy says ``non_blocking`` and,
on the way there, what is copied lies in page-locked memory. Tensors of both in one operation are an error on a GPU, but
for single numbers.

It changes the process that it is used in: one that ends after it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from mimo.topology import collectives

NAME = "lazy"
"""A kind of device that this torch has no code for, and whose backward runs in the thread that calls it."""
_OURS = ("/mimo/", "/mimo_")
aten = torch.ops.aten
_SHAPED_BY_NUMBERS = frozenset(
    {
        *(aten.nonzero.default, aten.masked_select.default, aten.bincount.default, aten.histc.default),
        *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
    }
)
_INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)


@attrs.frozen
class Wait:
    """What had the host wait, or would fail: its kind, the line of ours that asked for it, and in which thread."""

    kind: str
    place: str
    thread: str = ""
    """Its name; empty for the one that trains."""


class OnDevice(Tensor):
    """A tensor of the device, which computes by ``held``, a tensor of the CPU."""

    held: Tensor

    def __new__(cls, held: Tensor) -> Self:
        """Return the device's tensor of the same numbers."""
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return what has the numbers: FSDP2 gives its memory away and takes it again."""
        return self.held.untyped_storage()

    def record_stream(self, _stream: object) -> None:
        """Do nothing: all is done at once."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute where no mode is active, as in threads of the autograd engine; nothing is noted."""
        return _computed(func, args, kwargs or {})


def _is_here(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _held(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation; its result is on the device if any argument or its ``device`` is."""
    reads = any(isinstance(leaf, OnDevice) for leaf in tree_leaves((args, kwargs)))
    leaves = func is aten._to_copy.default and kwargs.get("device") is not None and not _is_here(kwargs["device"])
    found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if leaves or not (reads or _is_here(kwargs.get("device"))):
        return found
    found = tree_map(lambda one: OnDevice(one) if isinstance(one, Tensor) else one, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if reads and func.namespace == "aten" else found


def _kind(func: Any, args: Any, kwargs: Any) -> str:
    """Return how an operation has the host wait; empty if it doesn't."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [isinstance(tensor, OnDevice) for tensor in tensors]
    kind = ""
    if func is aten._to_copy.default:
        goes = here[0] if kwargs.get("device") is None else _is_here(kwargs["device"])
        kind = _copying(kwargs.get("non_blocking"), args[0], source=here[0], target=goes)
    elif func is aten.copy_.default:
        target, source = here
        waits = args[1].dim() or source  # a single number of the host goes along with the operation
        beside = any(args[2:]) or kwargs.get("non_blocking")
        kind = _copying(beside, args[1], source=source, target=target) if waits else ""
    elif not any(here) or func.namespace != "aten":
        pass
    elif func in {aten._local_scalar_dense.default, aten.equal.default} or _reads_offsets(func, args):
        kind = "number"
    elif func in _SHAPED_BY_NUMBERS or (func is aten.repeat_interleave.Tensor and not kwargs.get("output_size")):
        kind = "shape"
    elif func in _INDEXING and any(one is not None and one.dtype in {torch.bool, torch.uint8} for one in args[1]):
        kind = "mask"
    elif any(tensor.dim() for tensor, is_here in zip(tensors, here, strict=True) if not is_here):
        kind = f"tensors of both in {func}"
    return kind


def _reads_offsets(func: Any, args: Any) -> bool:
    """Return whether a product of groups is none of one kernel: GPUs have one for bf16 alone."""
    return func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16


def _copying(non_blocking: object, x: Tensor, *, source: bool, target: bool) -> str:
    is_locked = hasattr(x if x._base is None else x._base, "is_page_locked")
    if source == target or (non_blocking and (source or is_locked)):
        return ""
    return "copy to the device" if target else "copy to the host"


class _Functions(TorchFunctionMode):
    """What never becomes an operation that a mode sees."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a tensor of numbers on the host and copy it, as torch does; read all numbers of one at once."""
        kwargs = dict(kwargs or {})
        if func in {torch.tensor, torch.as_tensor} and _is_here(kwargs.get("device")):
            learns, device = kwargs.pop("requires_grad", False), kwargs.pop("device")
            return func(*args, **kwargs).to(device).requires_grad_(learns)
        if func is Tensor.new_tensor and isinstance(args[0], OnDevice):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(args[0].device)
        if func in {Tensor.tolist, Tensor.numpy} and isinstance(args[0], OnDevice):
            self._note("number")
            return func(args[0].held, *args[1:], **kwargs)
        if func is Tensor.pin_memory:  # which a machine without accelerators doesn't have
            return _lock(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return _lock(func(*args, **kwargs))
        return func(*args, **kwargs)


def _lock(x: Tensor) -> Tensor:
    """Return what is to be taken for page-locked memory."""
    locked: Any = x
    locked.is_page_locked = True
    return x


class _Stream:
    """Where copies and sums would run beside computations: all is done at once, and nothing waits for it."""

    note: Callable[[str], None]

    def __init__(self, device: Any = NAME, **_options: Any) -> None:
        self.device = torch.device(device)

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Do nothing."""

    def wait_event(self, _event: object) -> None:
        """Return at once."""

    def wait_stream(self, _stream: object) -> None:
        """Return at once."""

    def record_event(self, event: object = None) -> object:
        """Return one that is reached."""
        return event or _Event(self.note)


@attrs.frozen
class _Event:
    """What has been reached; who waits for it on the host is noted."""

    note: Callable[[str], None]

    def wait(self, _stream: object = None) -> None:
        """Have the device wait, not the host."""

    def synchronize(self) -> None:
        """Note that the host waits."""
        self.note("event")


class _Handle:
    """What ``torch.cuda`` is of GPUs."""

    Stream = _Stream

    @staticmethod
    def current_device() -> int:
        """Return the only one."""
        return 0

    @staticmethod
    def current_stream(_device: object = None) -> _Stream:
        """Return a stream."""
        return _Stream()

    @staticmethod
    def stream(stream: Any) -> Any:
        """Return a context in which operations go to a stream."""
        return stream or nullcontext()

    def __getattr__(self, name: str) -> Any:
        """Return what the CPU has."""
        return getattr(torch.cpu, name)


class _Operations(TorchDispatchMode):
    def __init__(self, note: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._note = note

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what waits, and compute."""
        if kind := _kind(func, args, kwargs or {}):
            self._note(kind)
        return _computed(func, args, kwargs or {})


def _place(frame: FrameType | None, own: str) -> str:
    """Return file and line nearest to a frame that are ours, or of the file ``own``."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path == own or any(mark in path for mark in _OURS):
            start = max(path.rfind(mark) for mark in (*_OURS, "/")) if path == own else max(map(path.rfind, _OURS))
            return f"{path[start + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "nowhere"


@contextmanager
def accelerator(own: str = "") -> Iterator[tuple[torch.device, Counter[Wait]]]:
    """Give the device, and a counter of what had the host wait for it within the block.

    Args:
        own: a file whose own lines are named too.
    """
    waits: Counter[Wait] = Counter()

    def note(kind: str) -> None:
        thread = threading.current_thread()
        name = "" if thread is threading.main_thread() else thread.name
        waits[Wait(kind, _place(sys._getframe(2), own), name)] += 1

    def run(thread: threading.Thread) -> None:
        with _Functions(note), _Operations(note):
            begin(thread)

    known, begin = collectives._backends, threading.Thread.run
    with ExitStack() as stack:
        stack.enter_context(patch.object(collectives, "_backends", lambda group: {**known(group), NAME: "gloo"}))
        stack.enter_context(patch.object(torch, NAME, _Handle(), create=True))  # where recomputation looks for its own
        stack.enter_context(patch.object(threading.Thread, "run", run))
        stack.enter_context(patch.object(_Stream, "note", staticmethod(note), create=True))
        stack.enter_context(patch.object(torch, "Stream", _Stream))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", _Handle.current_stream))
        stack.enter_context(_Functions(note))
        stack.enter_context(_Operations(note))
        yield torch.device(NAME, 0), waits

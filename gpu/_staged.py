"""A process group whose ranks may share one GPU, which NCCL refuses: gloo, with tensors staged through host memory.

It takes the place of NCCL alone: whoever launches hands `RENDEZVOUS` over, and nothing else knows. Tensors are copied
to the host when an operation begins, and results back when it is waited for, each on the stream that is then current.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from mimo.launch.runtime import Rendezvous

NAME = "staged"
_AT_ONCE = timedelta(0)

_TorchWork: Any = vars(dist)["_Work"]  # the class to derive from, as torch's own tests do; its types know neither
_ProcessGroup: Any = dist.ProcessGroup
Pairs: TypeAlias = list[tuple[Tensor, Tensor]]


class StagedWork(_TorchWork):  # type: ignore[misc]  # see there
    """An operation that has begun.

    Args:
        works: gloo's, on host memory.
        results: tensors that wait for what it brings, each with where that comes in host memory.
        sent: what must stay untouched until it is done.
    """

    def __init__(self, works: Sequence[Any], results: Pairs, sent: Sequence[Tensor]) -> None:
        super().__init__()
        self._works = works
        self._results = results
        self._sent = sent

    def wait(self, timeout: timedelta = _AT_ONCE) -> bool:
        """Wait, and copy what has come to where it belongs; a second time it is there already."""
        done = [work.wait(timeout) if timeout else work.wait() for work in self._works]
        for target, host in self._results:
            if target.data_ptr() != host.data_ptr():
                target.copy_(host.view(target.shape))
        self._results, self._sent = [], ()
        return all(done)

    def is_completed(self) -> bool:
        """Return whether `wait` would only copy."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done, after waiting: nothing of ours continues from one."""
        self.wait()
        found: torch.futures.Future[Any] = torch.futures.Future()
        found.set_result(None)
        return found


class StagedGroup(_ProcessGroup):  # type: ignore[misc]  # see there
    """See the file. Names of operations are those that torch 2.11 calls, and those of 2.13 beside them."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo._set_sequence_number_for_group()  # noqa: SLF001  # as torch does for every group of gloo
        self._called = {"name": "", "desc": ""}

    def setGroupName(self, name: str) -> None:  # noqa: N802  # torch's name, as of the three below
        """Take the name that torch gives; it asks here for it, as no backend of C++ has it."""
        self._called["name"] = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name."""
        return self._called["name"]

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take the description."""
        self._called["desc"] = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description."""
        return self._called["desc"]

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return what `init_process_group` calls it."""
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        """Sum in place."""
        hosts = [_host(x) for x in tensors]
        return StagedWork([self._gloo.allreduce(hosts, opts)], list(zip(tensors, hosts, strict=True)), ())

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        """Sum several in place."""
        hosts = [_host(x) for x in tensors]
        return StagedWork([self._gloo.allreduce_coalesced(hosts, opts)], list(zip(tensors, hosts, strict=True)), ())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        """Send to all, in place."""
        hosts = [_host(x) for x in tensors]
        return StagedWork([self._gloo.broadcast(hosts, opts)], list(zip(tensors, hosts, strict=True)), ())

    def reduce(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        """Sum on one rank, in place."""
        hosts = [_host(x) for x in tensors]
        return StagedWork([self._gloo.reduce(hosts, opts)], list(zip(tensors, hosts, strict=True)), ())

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> StagedWork:
        """Gather on all ranks, in a list."""
        return self._from_lists(self._gloo.allgather, outputs, inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> StagedWork:
        """Gather on one rank, in a list."""
        return self._from_lists(self._gloo.gather, outputs, inputs, opts)

    def _from_lists(
        self, operation: Callable[..., Any], outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> StagedWork:
        hosts, sent = [[_room(x) for x in each] for each in outputs], [_host(x) for x in inputs]
        pairs = [pair for each, host in zip(outputs, hosts, strict=True) for pair in zip(each, host, strict=True)]
        return StagedWork([operation(hosts, sent, opts)], pairs, sent)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> StagedWork:
        """Send each rank its own of a list."""
        return self._to_lists(self._gloo.scatter, outputs, inputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> StagedWork:
        """Sum lists; each rank keeps its own of the sums."""
        return self._to_lists(self._gloo.reduce_scatter, outputs, inputs, opts)

    def _to_lists(
        self, operation: Callable[..., Any], outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> StagedWork:
        hosts, sent = [_room(x) for x in outputs], [[_host(x) for x in each] for each in inputs]
        kept = [x for each in sent for x in each]
        return StagedWork([operation(hosts, sent, opts)], list(zip(outputs, hosts, strict=True)), kept)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any) -> StagedWork:
        return self._flat(self._gloo._allgather_base, output, given, opts)  # noqa: SLF001  # what frontends call

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> StagedWork:
        return self._flat(self._gloo._reduce_scatter_base, output, given, opts)  # noqa: SLF001  # likewise

    def _flat(self, operation: Callable[..., Any], output: Tensor, given: Tensor, opts: Any) -> StagedWork:
        """Do what NCCL does with tensors of any shape, which gloo wants flat."""
        host, sent = _room(output).view(-1), _host(given).view(-1)
        return StagedWork([operation(host, sent, opts)], [(output, host)], [sent])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> StagedWork:
        """Gather on all ranks, in one tensor."""
        return self._allgather_base(output, given, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> StagedWork:
        """Sum; each rank keeps its part."""
        return self._reduce_scatter_base(output, given, opts)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> StagedWork:
        """Gather several."""
        return self._several(self._gloo._allgather_base, outputs, inputs, opts)  # noqa: SLF001  # likewise

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> StagedWork:
        """Sum several; each rank keeps its parts."""
        return self._several(self._gloo._reduce_scatter_base, outputs, inputs, opts)  # noqa: SLF001  # likewise

    def _several(
        self, operation: Callable[..., Any], outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> StagedWork:
        """Do one after the other, as gloo has no such operation of several."""
        hosts, sent = [_room(x).view(-1) for x in outputs], [_host(x).view(-1) for x in inputs]
        works = [operation(host, x, opts) for host, x in zip(hosts, sent, strict=True)]
        return StagedWork(works, list(zip(outputs, hosts, strict=True)), sent)

    def alltoall_base(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: Any
    ) -> StagedWork:
        """Send each rank its rows."""
        host, staged = _room(output), _host(given)
        return StagedWork([self._gloo.alltoall_base(host, staged, received, sent, opts)], [(output, host)], [staged])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: Any
    ) -> StagedWork:
        """Send each rank its rows."""
        return self.alltoall_base(output, given, received, sent, opts)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StagedWork:
        """Send to one rank; the tensor may change at once, as it is its copy that travels."""
        hosts = [_host(x) for x in tensors]
        return StagedWork([self._gloo.send(hosts, peer, tag)], [], hosts)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StagedWork:
        """Receive from one rank."""
        hosts = [_room(x) for x in tensors]
        return StagedWork([self._gloo.recv(hosts, peer, tag)], list(zip(tensors, hosts, strict=True)), ())

    def barrier(self, opts: Any) -> StagedWork:
        """Wait for all ranks."""
        return StagedWork([self._gloo.barrier(opts)], [], ())


def _host(x: Tensor) -> Tensor:
    """Return a copy in host memory, contiguous: also of what lies there, so that the CPU takes the same path."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())


def _room(x: Tensor) -> Tensor:
    """Return as much room in host memory."""
    return torch.empty(x.shape, dtype=x.dtype)


def make_group(store: Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    """Make a group, as `torch.distributed.Backend.register_backend` wants it."""
    return StagedGroup(store, rank, size, timeout)


def staged_backend(_device: str) -> str:
    """Register the backend in this process and name it; see `mimo.launch.start.rendezvous.Rendezvous`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make_group, devices=["cpu", "cuda"])
    return NAME


def first_gpu(device: str, _local_rank: int) -> str:
    """Return the first GPU for every process."""
    return f"{device}:0" if device == "cuda" else device


RENDEZVOUS = Rendezvous(device=first_gpu, backend=staged_backend)
"""What is handed to `launch`."""

"""One message's worth of parameters in FSDP2 (`torch.distributed.fsdp.fully_shard`): gathered and summed together.

FSDP2 does both from hooks of modules and of autograd, which fire where a lane has something to compute. Here both are
calls, since a lane without a sample must take part too: FSDP2 is given modules whose forward is never called. Sums are
not its own: those wait for the other lanes. All that reaches into its private parts is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard

from mimo.topology.meshes import local
from mimo_optimizer_distributed.units import Owned

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


class Begun(Protocol):
    """A sum over lanes that has begun."""

    @property
    def is_done(self) -> bool:
        """Whether `end` would not wait."""

    def end(self) -> list[Tensor]:
        """Wait, and return this lane's piece of each sum; what is behind its end is padding."""


class _Holder(nn.Module):
    """Shows parameters to FSDP2, without being a part of the model."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)


class Group:
    """Parameters that are gathered and reduced in one message each. The modules hold whole ones between the two calls.

    Args:
        found: plain tensors and where modules hold them, by name; this puts others in their places.
        mesh: the lanes over which they are spread.
        sums: begins to sum whole gradients over the lanes, of which this one is to have its pieces.
        dtype: what layers compute in. Pieces, and gradients once reduced, are fp32.
        before: is called whenever they are about to be gathered.
    """

    def __init__(
        self,
        found: Mapping[str, Owned],
        *,
        mesh: DeviceMesh,
        sums: Callable[[list[Tensor]], Begun],
        dtype: torch.dtype,
        before: Callable[[], None],
    ) -> None:
        self._begin = sums
        self._before = before
        names = {place: name for name, one in found.items() for place in one.places}
        holder = _Holder(dict.fromkeys(module for module, _ in names))
        given = {one.parameter for one in found.values()}
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        self._module: FSDPModule = fully_shard(
            holder,
            mesh=mesh,
            reshard_after_forward=False,
            mp_policy=policy,
            ignored_params={parameter for parameter in holder.parameters() if parameter not in given},
        )
        self._module.set_reshard_after_backward(False)
        state = self._module._get_fsdp_state()  # noqa: SLF001
        self._group = _group_of(state)
        # It would look for changed parameters by the names of modules' attributes, which may be properties.
        self._group._reset_sharded_params = True  # noqa: SLF001
        state._lazy_init()  # noqa: SLF001
        self._parameters: dict[str, FSDPParam] = {
            names[one._module_info.module, one._module_info.param_name]: one  # noqa: SLF001
            for one in self._group.fsdp_params
        }
        self._trained = {name: one for name, one in self._parameters.items() if one.sharded_param.requires_grad}
        self._is_due: Future[torch.Event | None] | None = None
        self._pending: UnshardHandle | None = None
        self._sum: Begun | None = None
        self._sums: dict[str, Tensor] = {}

    @property
    def pieces(self) -> dict[str, Tensor]:
        """This rank's piece of each parameter, by name: fp32, and none of the padding."""
        return {name: local(one.sharded_param) for name, one in self._parameters.items()}

    @property
    def is_gathered(self) -> bool:
        """Whether the modules hold whole parameters, or will once they are waited for."""
        return self._pending is not None or self._is_due is not None or bool(self._group.is_unsharded)

    def gather(self) -> None:
        """Begin to gather the parameters, on all lanes."""
        if not self.is_gathered:
            self._begin_gather()

    def gather_when_ready(self, executor: Executor, stream: torch.Stream | None) -> None:
        """Have a thread begin to gather the parameters, on all lanes; its groups are used by no other.

        Args:
            executor: the thread.
            stream: of an accelerator, where it waits so that what the device computes need not; None on the CPU.
        """
        if not self.is_gathered:
            stepped = None if stream is None else torch.accelerator.current_stream(stream.device).record_event()
            self._is_due = executor.submit(self._begin_gather_beside, stream, stepped)

    def _begin_gather(self) -> None:
        self._before()
        self._pending = self._module.unshard(async_op=True)

    def _begin_gather_beside(self, stream: torch.Stream | None, stepped: torch.Event | None) -> torch.Event | None:
        """Do so without having what the device computes wait for it, after what the device steps itself.

        Returns:
            What is reached on ``stream`` when the pieces may be read. None on the CPU.
        """
        if stream is None or stepped is None:
            self._begin_gather()
            return None
        with stream:
            stream.wait_event(stepped)
            self._begin_gather()
            return stream.record_event()

    def wait(self) -> None:
        """Have the modules hold what is being gathered."""
        if self._is_due is not None:
            due, self._is_due = self._is_due, None
            ready = due.result()
            if ready is not None:  # of a single lane FSDP2 gathers nothing, and copies the pieces on the current stream
                ready.wait()
            self._keep()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _keep(self) -> None:
        """Have what was gathered on another stream not be given away before it has been read on this one."""
        result = self._group._all_gather_result  # noqa: SLF001
        if result is not None and result.all_gather_output.device.type != "cpu":
            output = result.all_gather_output
            output.record_stream(torch.accelerator.current_stream(output.device))

    def release(self) -> None:
        """Have the modules hold pieces again."""
        self.wait()
        self._module.reshard()

    def add(self) -> None:
        """Add gradients of the layers' precision to those in fp32."""
        self.wait()  # a lane without rows may not have done so
        for one in self._parameters.values():
            one.accumulate_unsharded_grad_if_needed()
            one.to_accumulated_grad_if_needed()

    @property
    def trains(self) -> bool:
        """Whether any of them is trained."""
        return bool(self._trained)

    @property
    def leaves(self) -> list[Tensor]:
        """What layers compute with of the trained ones, as far as they have been gathered yet."""
        return [one.unsharded_param for one in self._trained.values() if hasattr(one, "_unsharded_param")]

    def begin_sum(self) -> None:
        """Begin to sum over the lanes what each has added since the last time, without waiting for another one."""
        assert self._sum is None, "one sum at a time"
        self.add()
        gradients = []
        for one in self._trained.values():
            if one.unsharded_accumulated_grad is None and one.unsharded_param.grad is None:
                # Storage of the parameter may be gone, its shape is not.
                one.unsharded_param.grad = torch.zeros_like(one.unsharded_param)
                one.to_accumulated_grad_if_needed()
            gradient = one.unsharded_accumulated_grad
            gradients.append(one.unsharded_grad_data if gradient is None else gradient)
            one.unsharded_accumulated_grad = one.unsharded_param.grad = None
        if gradients:
            self._sum = self._begin(gradients)

    @property
    def is_summing(self) -> bool:
        """Whether a sum has begun and not been taken."""
        return self._sum is not None

    @property
    def is_summed(self) -> bool:
        """Whether `end_sum` would not wait."""
        return self._sum is None or self._sum.is_done

    @torch.no_grad()
    def end_sum(self) -> None:
        """Wait for the sum that has begun, if there is one, and add this rank's pieces to those of earlier ones."""
        if self._sum is None:
            return
        pieces = self._sum.end()
        self._sum = None
        for (name, one), padded in zip(self._trained.items(), pieces, strict=True):
            piece = padded[: len(local(one.sharded_param))]
            if name in self._sums:
                self._sums[name] += piece
            else:
                self._sums[name] = piece

    def take_sums(self) -> dict[str, Tensor]:
        """Return this rank's pieces of all sums since the last call, by name of the trained parameters."""
        taken, self._sums = self._sums, {}
        return taken


def _group_of(state: FSDPState) -> FSDPParamGroup:
    """Return the parameters of a module that was given to FSDP2: of torch 2.11 one group, of later ones a list."""
    if not hasattr(state, "_fsdp_param_groups"):
        assert state._fsdp_param_group is not None  # noqa: SLF001
        return state._fsdp_param_group  # noqa: SLF001
    (group,) = state._fsdp_param_groups  # noqa: SLF001
    return group

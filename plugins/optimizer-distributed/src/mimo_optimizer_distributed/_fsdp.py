"""One message's worth of parameters in FSDP2 (`torch.distributed.fsdp.fully_shard`): gathered and reduced together.

FSDP2 does both from hooks of modules and of autograd, which fire where a lane has something to compute. Here both are
calls, since a lane without a sample must take part too: FSDP2 is given modules whose forward is never called. All that
reaches into its private parts is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor

from mimo_optimizer_distributed.units import Owned

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


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
        dtype: what layers compute in. Pieces, and gradients once reduced, are fp32.
        before: is called whenever they are about to be gathered.
    """

    def __init__(
        self, found: Mapping[str, Owned], *, mesh: DeviceMesh, dtype: torch.dtype, before: Callable[[], None]
    ) -> None:
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
        self._module.set_gradient_divide_factor(1.0)
        self._module.set_force_sum_reduction_for_comms(True)
        self._state = self._module._get_fsdp_state()  # noqa: SLF001
        (self._group,) = self._state._fsdp_param_groups  # noqa: SLF001
        # It would look for changed parameters by the names of modules' attributes, which may be properties.
        self._group._reset_sharded_params = True  # noqa: SLF001
        self._state._lazy_init()  # noqa: SLF001
        self._parameters: dict[str, FSDPParam] = {
            names[one._module_info.module, one._module_info.param_name]: one  # noqa: SLF001
            for one in self._group.fsdp_params
        }
        self._pending: UnshardHandle | None = None

    @property
    def pieces(self) -> dict[str, Tensor]:
        """This rank's piece of each parameter, by name: fp32, and none of the padding."""
        return {name: _local(one.sharded_param) for name, one in self._parameters.items()}

    @property
    def is_gathered(self) -> bool:
        """Whether the modules hold whole parameters, or will once they are waited for."""
        return self._pending is not None or bool(self._group.is_unsharded)

    def gather(self) -> None:
        """Begin to gather the parameters, on all lanes alike."""
        if not self.is_gathered:
            self._before()
            self._pending = self._module.unshard(async_op=True)

    def wait(self) -> None:
        """Have the modules hold what is being gathered."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

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

    def reduce(self) -> None:
        """Begin to add each lane's piece of the sum of all lanes' gradients to what it has of it."""
        self.add()
        trained = [one for one in self._parameters.values() if one.sharded_param.requires_grad]
        for one in trained:
            if one.unsharded_accumulated_grad is None and one.unsharded_param.grad is None:
                # Storage of the parameter may be gone, its shape is not.
                one.unsharded_param.grad = torch.zeros_like(one.unsharded_param)
                one.to_accumulated_grad_if_needed()
        if trained:
            self._group.post_backward()

    def end_reduction(self) -> None:
        """Wait for the sums that `reduce` has begun."""
        self._state._root_post_backward_final_callback()  # noqa: SLF001

    def take_gradients(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the sums since the last call, by name of the trained parameters."""
        taken = {}
        for name, one in self._parameters.items():
            if one.sharded_param.grad is not None:
                taken[name] = _local(one.sharded_param.grad)
                one.sharded_param.grad = None
        return taken


def _local(value: Tensor) -> Tensor:
    return cast("DTensor", value)._local_tensor  # noqa: SLF001 - `to_local` makes a view, which counts versions apart

"""Modules created on a device; on the meta device without the draws of values that it does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset(
    {
        nn.init.kaiming_uniform_,
        nn.init.normal_,
        nn.init.trunc_normal_,
        nn.init.uniform_,
        Tensor.normal_,
        Tensor.uniform_,
    }
)
"""What fills a tensor at random; the other functions of `torch.nn.init` end in one of these."""


class _WithoutDraws(TorchFunctionMode):
    """Leaves out draws into tensors on the meta device.

    For each of them PyTorch runs a reference implementation in Python, which takes longer than the layer around it.
    """

    def __torch_function__(
        self, func: Any, _types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            drawn = args[0] if args else kwargs["tensor"]
            if drawn.is_meta:
                return drawn
        return func(*args, **kwargs)


@contextmanager
def create_on(device: torch.device | str) -> Iterator[None]:
    """Have modules created on a device, unless they name another.

    Args:
        device: on ``meta`` parameters have shapes but no values, and none are drawn: no random number is used up.
    """
    device = torch.device(device)
    with device, _WithoutDraws() if device.type == "meta" else nullcontext():
        yield

"""The state that a step changes on a rank beside gradients, saved before the step, so that it can be run again."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor, nn


@attrs.frozen(kw_only=True)
class Before:
    """The state that a step changes on a rank beside gradients, as it was before the step."""

    generators: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> Before:
        """Return the state of this rank now."""
        generators = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(device)
        return cls(generators=generators, buffers={name: one.clone() for name, one in model.named_buffers()})

    @torch.no_grad()
    def restore(self, model: nn.Module, device: torch.device) -> None:
        """Put the saved state back."""
        self.restore_buffers(model)
        torch.set_rng_state(self.generators["cpu"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.generators["cuda"], device)

    @torch.no_grad()
    def restore_buffers(self, model: nn.Module) -> None:
        """Put back buffers alone."""
        for name, buffer in model.named_buffers():
            buffer.copy_(self.buffers[name])

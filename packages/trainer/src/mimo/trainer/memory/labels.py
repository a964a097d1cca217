"""What modules and optimizers of a rank hold between the actions of a step, by kind."""

from __future__ import annotations

from torch import Tensor

from mimo.model.runtime import MimoModel
from mimo.optimizer.runtime import MimoOptimizer
from mimo.topology.meshes import gradient_of
from mimo.trainer.memory.tracker import Labels


def held_tensors(model: MimoModel, optimizer: MimoOptimizer) -> Labels:
    """Yield parameters, optimizer state and gradients of a rank, and what layers compute with where it is not these."""
    for name, module in optimizer.modules.items():
        for parameter in (*module.part.parameters.values(), *module.part.frozen.values()):
            yield "weights", name, parameter
            if (gradient := gradient_of(parameter)) is not None:
                yield "gradients", name, gradient
        states = (state for one in module.steppers for state in one.optimizer.state.values())
        values = (value for state in states for value in state.values())
        yield from (("optimizer", name, value) for value in values if isinstance(value, Tensor))
        for part in model.parts_of(name):
            for parameter in part.module.parameters():
                yield "gathered", name, parameter
                if parameter.grad is not None:
                    yield "gradients", name, parameter.grad
            yield from (("other", name, buffer) for buffer in part.module.buffers())

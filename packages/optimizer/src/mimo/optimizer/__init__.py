"""What optimizer plugins are written against, and learning rates; free of torch. The rest: `mimo.optimizer.runtime`."""

from mimo.hooks import Kind
from mimo.optimizer import hookspecs
from mimo.optimizer._learning_rate import LearningRate
from mimo.optimizer._specs import ModuleParameters, OptimizerSpec, Prepared

OPTIMIZERS = Kind(
    group="mimo.optimizers", noun="optimizer", hook="mimo_register_optimizers", hookspecs=hookspecs, spec=OptimizerSpec
)

__all__ = ["OPTIMIZERS", "LearningRate", "ModuleParameters", "OptimizerSpec", "Prepared"]

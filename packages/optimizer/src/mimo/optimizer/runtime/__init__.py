"""The torch side: reductions, the sums of a step over all ranks, and the optimizer over all modules."""

from mimo.optimizer.runtime._adamw import LocalAdamW, zeros_like
from mimo.optimizer.runtime._agreement import WORD_BITS, WORDS, LocalStats, NormBucket, ReducedStats, agree
from mimo.optimizer.runtime._fused_adamw import fused_adamw
from mimo.optimizer.runtime._gradients import is_counted
from mimo.optimizer.runtime._in_order import InOrder, LaneSum
from mimo.optimizer.runtime._layers import layers
from mimo.optimizer.runtime._loading import load_in_place
from mimo.optimizer.runtime._mimo_optimizer import MimoOptimizer, StepDecision, StepResult
from mimo.optimizer.runtime._module_optimizer import LaidOut, ModuleOptimizer, Stepper, build_together
from mimo.optimizer.runtime._replicate import FlatSum, local_gradient, reduce_tied, replicate, sum_over
from mimo.optimizer.runtime._scaling import SCALING, LossScale

__all__ = [
    "SCALING",
    "WORDS",
    "WORD_BITS",
    "FlatSum",
    "InOrder",
    "LaidOut",
    "LaneSum",
    "LocalAdamW",
    "LocalStats",
    "LossScale",
    "MimoOptimizer",
    "ModuleOptimizer",
    "NormBucket",
    "ReducedStats",
    "StepDecision",
    "StepResult",
    "Stepper",
    "agree",
    "build_together",
    "fused_adamw",
    "is_counted",
    "layers",
    "load_in_place",
    "local_gradient",
    "reduce_tied",
    "replicate",
    "sum_over",
    "zeros_like",
]

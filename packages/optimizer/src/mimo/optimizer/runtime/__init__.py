"""The torch half: reductions, the agreement of all ranks on one step, and the optimizer over all modules."""

from mimo.optimizer.runtime._adamw import LocalAdamW, fused_adamw
from mimo.optimizer.runtime._agreement import WORD_BITS, WORDS, Agreed, Bin, Tally, agree
from mimo.optimizer.runtime._gradients import is_counted
from mimo.optimizer.runtime._in_order import InOrder, LaneSum
from mimo.optimizer.runtime._layers import layers
from mimo.optimizer.runtime._loading import load_in_place
from mimo.optimizer.runtime._mimo_optimizer import MimoOptimizer, Proposed, Stepped
from mimo.optimizer.runtime._module_optimizer import LaidOut, ModuleOptimizer, Stepper, build_together
from mimo.optimizer.runtime._replicate import FlatSum, local_gradient, reduce_tied, replicate, sum_over
from mimo.optimizer.runtime._scaling import SCALING, LossScale

__all__ = [
    "SCALING",
    "WORDS",
    "WORD_BITS",
    "Agreed",
    "Bin",
    "FlatSum",
    "InOrder",
    "LaidOut",
    "LaneSum",
    "LocalAdamW",
    "LossScale",
    "MimoOptimizer",
    "ModuleOptimizer",
    "Proposed",
    "Stepped",
    "Stepper",
    "Tally",
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
]

"""The torch half: reductions, the agreement of all ranks on one step, and the optimizer over all modules."""

from mimo.optimizer.runtime._adamw import LocalAdamW, fused_adamw
from mimo.optimizer.runtime._agreement import WORD_BITS, WORDS, Agreed, Bin, Tally, agree
from mimo.optimizer.runtime._gradients import is_counted
from mimo.optimizer.runtime._loading import load_in_place
from mimo.optimizer.runtime._mimo_optimizer import MimoOptimizer, Stepped
from mimo.optimizer.runtime._module_optimizer import ModuleOptimizer, Stepper
from mimo.optimizer.runtime._replicate import local_gradient, reduce_tied, replicate, sum_over
from mimo.optimizer.runtime._scaling import SCALING, LossScale

__all__ = [
    "SCALING",
    "WORDS",
    "WORD_BITS",
    "Agreed",
    "Bin",
    "LocalAdamW",
    "LossScale",
    "MimoOptimizer",
    "ModuleOptimizer",
    "Stepped",
    "Stepper",
    "Tally",
    "agree",
    "fused_adamw",
    "is_counted",
    "load_in_place",
    "local_gradient",
    "reduce_tied",
    "replicate",
    "sum_over",
]

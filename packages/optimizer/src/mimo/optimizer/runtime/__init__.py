"""The torch half: reductions, the agreement of all ranks on one step, and the optimizer over all modules."""

from mimo.optimizer.runtime._adamw import LocalAdamW
from mimo.optimizer.runtime._agreement import WORD_BITS, WORDS, Agreed, Tally, agree
from mimo.optimizer.runtime._mimo_optimizer import MimoOptimizer, ModuleOptimizer, Stepped
from mimo.optimizer.runtime._replicate import local_gradient, reduce_tied, replicate

__all__ = [
    "WORDS",
    "WORD_BITS",
    "Agreed",
    "LocalAdamW",
    "MimoOptimizer",
    "ModuleOptimizer",
    "Stepped",
    "Tally",
    "agree",
    "local_gradient",
    "reduce_tied",
    "replicate",
]

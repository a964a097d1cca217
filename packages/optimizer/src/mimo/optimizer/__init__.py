"""What optimizer plugins are written against, and learning rates; free of torch. The rest: `mimo.optimizer.runtime`."""

from mimo.hooks import Kind
from mimo.optimizer import hookspecs
from mimo.optimizer._adamw import AdamWConfig, LocalAdamWConfig, betas_below_one, build_adamw, local_adamw_state
from mimo.optimizer._check_patterns import check_patterns
from mimo.optimizer._learning_rate import FALLING, LearningRate
from mimo.optimizer._rules import Pattern, Rule, Rules
from mimo.optimizer._specs import (
    GRADIENT_SCALE,
    LOSS_SCALES,
    Access,
    DeferredGrads,
    ModuleParameters,
    OptimizerSpec,
    Phase,
    Precision,
    Prepared,
    Share,
    Sums,
)
from mimo.topology import DATA, Overlap

OPTIMIZERS = Kind(
    group="mimo.optimizers", noun="optimizer", hook="mimo_register_optimizers", hookspecs=hookspecs, spec=OptimizerSpec
)

__all__ = [
    "DATA",
    "FALLING",
    "GRADIENT_SCALE",
    "LOSS_SCALES",
    "OPTIMIZERS",
    "Access",
    "AdamWConfig",
    "DeferredGrads",
    "LearningRate",
    "LocalAdamWConfig",
    "ModuleParameters",
    "OptimizerSpec",
    "Overlap",
    "Pattern",
    "Phase",
    "Precision",
    "Prepared",
    "Rule",
    "Rules",
    "Share",
    "Sums",
    "betas_below_one",
    "build_adamw",
    "check_patterns",
    "local_adamw_state",
]

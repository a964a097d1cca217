"""Hooks of the kind that this package owns: optimizers."""

from __future__ import annotations

from mimo.hooks import hookspec
from mimo.optimizer._specs import OptimizerSpec


@hookspec
def mimo_register_optimizers() -> list[OptimizerSpec]:  # type: ignore[empty-body]
    """Return the optimizers of this plugin (entry-point group ``mimo.optimizers``)."""

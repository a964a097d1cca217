"""The optimizer ``muon``: its settings, which parameters it leaves to AdamW, and how it registers. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import attrs

from mimo.hooks import ConfigError, Validator, hookimpl, must_be
from mimo.optimizer import OptimizerSpec, betas_below_one
from mimo.optimizer.estimates import StateBytes, SteppedShapes
from mimo_optimizer_distributed.sharding import Sharding
from mimo_optimizer_distributed.spec import sharded_optimizer
from mimo_optimizer_muon._estimate import state_of

if TYPE_CHECKING:
    import torch
    from torch import nn

_MAX_ITERATIONS = 99  # torch refuses more


_WHERE = "optimizer"


def _between(low: float, high: float, words: str) -> Validator:
    return must_be(words, lambda value: low <= value < high, where=_WHERE)


_not_negative = _between(0, 1e3, "a finite number of 0 or more, less than 1000")
_above_zero = _between(math.ulp(0), 1e3, "a finite number above 0, less than 1000")
_below_one = _between(0, 1, "a number from 0 to below 1")
_few = _between(1, _MAX_ITERATIONS + 1, f"a whole number from 1 to {_MAX_ITERATIONS}")


def _not_blank(_config: MuonConfig, _attribute: object, globs: tuple[str, ...]) -> None:
    if not all(globs):
        raise ConfigError(
            "optimizer.adamw",
            expected="globs of parameter names",
            got=f"{list(globs)!r}, of which '' matches none",
            fix="Leave the list empty to give every matrix to Muon.",
        )


@attrs.frozen(kw_only=True)
class MuonConfig(Sharding):
    """Settings of Muon for matrices, and of AdamW for everything else; how all of them lie says `Sharding`.

    Args:
        weight_decay: of both, times the learning rate.
        momentum: share of a matrix's momentum that stays at each step.
        nesterov: whether the step looks ahead, by the gradient and the new momentum.
        iterations: of Newton-Schulz.
        adjust_lr: how the learning rate of a matrix follows from ``lr``; with ``match_rms_adamw`` its updates are as
            large as AdamW's, so that one ``lr`` serves both, with ``original`` its own one of about 0.02 is needed.
        adamw: matrices that AdamW steps, as globs of their paths inside the module: those that read inputs and those
            that write outputs. What is no matrix it steps anyway.
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        ConfigError: a value is out of range.
    """

    weight_decay: float = attrs.field(default=0.1, validator=_not_negative)
    momentum: float = attrs.field(default=0.95, validator=_below_one)
    nesterov: bool = True
    iterations: int = attrs.field(default=5, validator=_few)
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw: tuple[str, ...] = attrs.field(default=("*embed*", "patch.*", "head.*", "lm_head.*"), validator=_not_blank)
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=betas_below_one)
    eps: float = attrs.field(default=1e-8, validator=_above_zero)


def is_for_adamw(name: str, globs: Iterable[str]) -> bool:
    """Return whether one of ``globs`` matches the path inside its module of a parameter's full name."""
    path = name.partition(".")[2]
    return any(fnmatchcase(path, glob) for glob in globs)


def _build(parameters: Mapping[str, nn.Parameter], config: MuonConfig, _meshes: object) -> torch.optim.Optimizer:
    from mimo_optimizer_muon._muon import ShardedMuon, has_matrices

    matrices = {
        name: parameter
        for name, parameter in parameters.items()
        if has_matrices(parameter) and not is_for_adamw(name, config.adamw)
    }
    return ShardedMuon(
        matrices.values(),
        [parameter for name, parameter in parameters.items() if name not in matrices],
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        iterations=config.iterations,
        adjust_lr=config.adjust_lr,
        betas=config.betas,
        eps=config.eps,
    )


def _state(stepped: SteppedShapes, config: MuonConfig) -> StateBytes:
    return state_of(stepped, lambda piece: not is_for_adamw(piece.name, config.adamw))


MUON = sharded_optimizer(name="muon", config=MuonConfig, build=_build, state=_state)


@hookimpl
def mimo_register_optimizers() -> list[OptimizerSpec]:
    """Register ``muon``."""
    return [MUON]

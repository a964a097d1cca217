"""Precision that layers compute in: bytes of an element, optimizers that support it, and fp16's loss scale."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mimo.hooks import ConfigError, RunError, discover
from mimo.optimizer import LOSS_SCALES, OPTIMIZERS, Precision
from mimo.trainer.config.settings import RunSettings, Settings
from mimo.trainer.job.job import NUMBER_BYTES, JobModule

if TYPE_CHECKING:
    import torch

    from mimo.optimizer.runtime import LossScale

_UNREPEATABLE = "does not have a deterministic implementation"
"""What torch says of an operation that it has no repeatable form of."""
_SCALE, _SCALE_STEPS = 2.0**16, 2000


def set_numerics(run: RunSettings) -> None:
    """Have torch compute in this process as a run says, from here on; what it does not ask for stays as it is."""
    import torch

    torch.backends.cudnn.allow_tf32 = run.tf32  # true unless somebody says otherwise, which no other product is
    if run.tf32 and torch.cuda.is_available():  # on CPUs the same call lets oneDNN round
        torch.set_float32_matmul_precision("high")
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS shares scratch between its streams
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(mode=True)


@contextlib.contextmanager
def unrepeatable_refused(run: RunSettings) -> Iterator[None]:
    """Say what a user can do about an operation that ``run.deterministic`` forbids.

    Raises:
        RunError: within it torch has refused one.
    """
    try:
        yield
    except RuntimeError as error:
        if not run.deterministic or _UNREPEATABLE not in str(error):
            raise
        raise RunError(
            "run.deterministic",
            expected="operations that give the same bits each time",
            got=str(error).partition(", but")[0],
            fix="Set it to false, or leave out what calls this operation; the traceback shows where.",
        ) from error


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return what layers compute in and rows travel in."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def check_precision(settings: Settings, modules: Sequence[JobModule]) -> None:
    """Refuse a precision that some module's optimizer has no weights for, and a loss scale that nothing would use.

    Raises:
        ConfigError: naming ``run.precision`` or ``run.loss_scale``.
    """
    run = settings.run
    lacking = [module for module in modules if run.precision not in module.optimizer.spec.precisions]
    if lacking:
        usable = [one for one in NUMBER_BYTES if all(one in module.optimizer.spec.precisions for module in modules)]
        specs = discover(OPTIMIZERS, where="run.precision").items()
        able = sorted(repr(name) for name, spec in specs if run.precision in spec.precisions)
        optimizers = " and ".join(f"{module.name} ({module.optimizer.spec.name!r})" for module in lacking)
        keys = dict.fromkeys(_plugin_key(module.name, settings) for module in lacking)
        raise ConfigError(
            "run.precision",
            expected=f"{' or '.join(map(repr, usable))}, as the optimizer of {optimizers} allows nothing else",
            got=repr(run.precision),
            fix=f"Set {' and '.join(keys)} to one that allows it: {' or '.join(able)}."
            if able
            else "None that is installed allows it.",
        )
    _check_scale(run)


def _plugin_key(name: str, settings: Settings) -> str:
    """Return the path of the key that says which plugin a module has."""
    return f"modules.{name}.optimizer.plugin" if "plugin" in settings.modules[name].optimizer else "optimizer.plugin"


def _check_scale(run: RunSettings) -> None:
    for key, value in (("loss_scale", run.loss_scale), ("loss_scale_steps", run.loss_scale_steps)):
        if value and run.precision != "fp16":
            raise ConfigError(
                f"run.{key}",
                expected=f"0, as only fp16 scales its loss and run.precision is {run.precision!r}",
                got=repr(value),
                fix="Leave it out.",
            )
    smallest, largest = LOSS_SCALES
    if run.loss_scale and not smallest <= run.loss_scale <= largest:
        raise ConfigError(
            "run.loss_scale",
            expected=f"0, or a number from 2^{math.log2(smallest):.0f} to 2^{math.log2(largest):.0f}",
            got=repr(run.loss_scale),
            fix="Leave it out: steps find the right one.",
        )


def make_scaling(run: RunSettings) -> LossScale | None:
    """Return the loss scale as it is before the first step; None where the precision needs none."""
    from mimo.optimizer.runtime import LossScale

    if run.precision != "fp16":
        return None
    return LossScale(scale=run.loss_scale or _SCALE, growth_steps=run.loss_scale_steps or _SCALE_STEPS)

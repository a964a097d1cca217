"""Lifecycle plugin ``tensorboard``: scalars of steps and evaluations, where ``logging.tensorboard`` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mimo.hooks import EvaluationInfo, Flops, RunInfo, StepInfo, hookimpl

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard:
    """Writes on rank 0, where all values are known as on every rank."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    @hookimpl
    def mimo_run_begin(self, run: RunInfo) -> None:
        """Open the event file; steps that are now to come hide those that an earlier attempt wrote."""
        if run.rank == 0 and run.config["logging"]["tensorboard"]:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(run.directory / FOLDER), purge_step=run.first_step)

    @hookimpl
    def mimo_step_end(self, info: StepInfo) -> None:
        """Write a step."""
        self._write(
            info.step,
            {
                "training/loss": info.loss,
                "training/grad_norm": info.grad_norm,
                "training/lr": info.lr,
                "training/tokens_per_second": info.tokens_per_second,
                **{f"training/{name}": loss for name, loss in info.losses.items()},
                **{f"grad_norm/{name}": norm for name, norm in (*info.norms.items(), *info.group_norms.items())},
                **{f"zero_gradients/{name}": float(count) for name, count in info.zero_gradients.items()},
                **{f"rows/{name}": float(rows) for name, rows in info.rows.items()},
                **_scalars(info.flops),
                **({} if info.loss_scale is None else {"training/loss_scale": info.loss_scale}),
            },
        )

    @hookimpl
    def mimo_evaluated(self, info: EvaluationInfo) -> None:
        """Write an evaluation."""
        self._write(
            info.step,
            {
                "evaluation/loss": info.loss,
                "evaluation/exact_match": info.exact_match,
                **{f"evaluation/{name}": loss for name, loss in info.losses.items()},
            },
        )

    @hookimpl
    def mimo_run_end(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)


def _scalars(flops: Mapping[str, Flops]) -> dict[str, float]:
    """Return how fast each module is, and its share of what it could be where that is known."""
    keys = ("model_flops", "hardware_flops", "mfu", "hfu")
    found = {f"{key}/{module}": getattr(one, key) for module, one in flops.items() for key in keys}
    return {name: value for name, value in found.items() if value is not None}

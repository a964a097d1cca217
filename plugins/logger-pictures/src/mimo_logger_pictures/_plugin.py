"""Lifecycle plugin ``pictures``: draws when a run has ended, or an index is written."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Sequence
from typing import Any

from mimo.hooks import METRICS_FILE, EvaluationInfo, IndexInfo, Prediction, RunInfo, hookimpl, read_metrics
from mimo_logger_pictures._draw import caption_grid, distribution_bars, loss_curve

LOSS_PICTURE = "loss.png"
CAPTIONS_PICTURE = "captions.png"
SHOWN = 30
"""Images with captions, at most."""


class Pictures:
    """Draws the loss curve on rank 0, and captions on the rank that has predictions; without matplotlib it says so."""

    def __init__(self) -> None:
        self._predictions: Sequence[Prediction] = ()

    @hookimpl
    def mimo_evaluated(self, info: EvaluationInfo) -> None:
        """Hold on to the last predictions."""
        self._predictions = info.predictions

    @hookimpl
    def mimo_indexed(self, index: IndexInfo) -> None:
        """Draw what is in the data, beside their index."""
        if not index.distributions:
            return
        if not _can_draw():
            print(f"{index.name}: no picture is drawn, as matplotlib is not installed")
            return
        picture = index.path.with_name(f"{index.path.name}.png")
        title = f"{index.name}: {index.samples:,} samples, {index.broken:,} broken"
        distribution_bars(picture, title, index.distributions)
        print(f"{picture}: drawn")

    @hookimpl
    def mimo_run_end(self, run: RunInfo) -> None:
        """Draw the loss curve of all that the metrics hold, and what the model wrote for the first images."""
        has_metrics = run.rank == 0 and (run.directory / METRICS_FILE).exists()
        if not _can_draw():
            if has_metrics:
                print(f"{run.name}: no pictures are drawn, as matplotlib is not installed")
            return
        if has_metrics:
            _draw_losses(run)
        from PIL import Image

        images = (each for each in self._predictions if isinstance(each.item, Image.Image))
        if shown := list(itertools.islice(images, SHOWN)):
            caption_grid(
                run.directory / CAPTIONS_PICTURE,
                [each.item for each in shown],
                [each.text for each in shown],
                [each.is_exact for each in shown],
            )


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None  # left out on machines that only train


def _draw_losses(run: RunInfo) -> None:
    lines = read_metrics(run.directory / METRICS_FILE)
    losses = [line for line in lines if "loss" in line]  # others are of saves that failed or were left out
    steps = [line for line in losses if not line.get("evaluation")]
    if steps:
        loss_curve(
            run.directory / LOSS_PICTURE,
            [line["step"] for line in steps],
            [_number(line["loss"]) for line in steps],
            [(line["step"], _number(line["loss"])) for line in losses if line.get("evaluation")],
        )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan

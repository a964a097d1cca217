"""Three pictures: a loss curve, images with captions, and distributions of numbers.

Figures are made without matplotlib's global state, so that drawing changes nothing for anybody else.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

_TRAINING, _EVALUATION, _WRONG = "#2b5d8a", "#c44e1a", "#b3261e"
_CHARACTERS_A_LINE = 22
_BARS = 60


def loss_curve(
    path: Path, steps: Sequence[int], losses: Sequence[float], evaluations: Sequence[tuple[int, float]]
) -> None:
    """Draw the loss of each step, and of each evaluation as a point.

    Args:
        path: a PNG file to write.
        steps: counted from 1.
        losses: per label token; those that are not finite are left out.
        evaluations: pairs of step and loss on held-out samples.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)]
    axes.plot(
        [step for step, _ in shown], [loss for _, loss in shown], color=_TRAINING, linewidth=1.2, label="training"
    )
    if evaluations:
        axes.plot(
            [step for step, _ in evaluations],
            [loss for _, loss in evaluations],
            color=_EVALUATION,
            marker="o",
            markersize=7,
            linestyle="--" if len(evaluations) > 1 else "none",
            label="held-out",
        )
    if shown and min(loss for _, loss in shown) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per label token")
    axes.grid(visible=True, which="both", linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)


def caption_grid(
    path: Path, images: Sequence[Image.Image], captions: Sequence[str], right: Sequence[bool], *, columns: int = 6
) -> None:
    """Draw images with a caption below each; wrong captions are red, framed and marked with a cross.

    Args:
        path: a PNG file to write.
        images: at least one; of any sizes.
        captions: one for each image.
        right: for each, whether the caption is exactly right.
        columns: images in a row, at most.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    lines = max(_wrap(caption).count("\n") for caption in captions) + 1
    figure = Figure(figsize=(1.75 * columns, (1.75 + 0.2 * lines) * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{sum(right)} of {len(right)} exactly right", fontsize=11)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, shown in itertools.zip_longest(grid.flat, zip(images, captions, right, strict=True)):
        axes.set_xticks([])
        axes.set_yticks([])
        if shown is None:
            axes.set_axis_off()
            continue
        image, caption, is_right = shown
        # The axes frame a square, so that images of other shapes stand centred in one of the same size.
        axes.imshow(image.convert("RGB"), interpolation="nearest")
        axes.set_box_aspect(1)
        side = max(image.size)
        axes.set_xlim((image.width - side) / 2 - 0.5, (image.width + side) / 2 - 0.5)
        axes.set_ylim((image.height + side) / 2 - 0.5, (image.height - side) / 2 - 0.5)
        axes.set_xlabel(
            _wrap(caption if is_right else f"\N{MULTIPLICATION SIGN} {caption or '(nothing)'}"),
            fontsize=9,
            color="black" if is_right else _WRONG,
        )
        for spine in axes.spines.values():
            spine.set_color("#cccccc" if is_right else _WRONG)
            spine.set_linewidth(0.8 if is_right else 2.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it is drawn as a box
        figure.savefig(path, dpi=120)


def distribution_bars(path: Path, title: str, distributions: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Draw bars of how often numbers come, a panel for each distribution, with the median and the 95th percentile.

    Args:
        path: a PNG file to write.
        title: of all.
        distributions: by what is counted; at least one, each of at least one pair of a number and its count, ascending.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.4 * len(distributions) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title.replace("$", r"\$"), fontsize=11)
    for axes, (name, pairs) in zip(
        figure.subplots(len(distributions), squeeze=False).flat, distributions.items(), strict=True
    ):
        first, last = pairs[0][0], pairs[-1][0]
        width = -(-(last - first + 1) // _BARS)
        counts = [0] * -(-(last - first + 1) // width)
        for number, count in pairs:
            counts[(number - first) // width] += count
        begins = [first + width * place for place in range(len(counts))]
        axes.bar(begins, counts, width=0.9 * width, align="edge", color=_TRAINING)
        for percent, style, said in ((50, "-", "median"), (95, "--", "95% are at most")):
            value = _percentile(pairs, percent)
            axes.axvline(value + 0.45, color=_EVALUATION, linestyle=style, linewidth=1.2, label=f"{said} {value:,}")
        axes.set_xlim(first - 0.02 * (last + 1 - first), last + 1 + 0.02 * (last + 1 - first))
        axes.set_xlabel(name.replace("$", r"\$"))
        axes.set_ylabel("how many")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.0f}")
            axis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)


def _percentile(pairs: Sequence[tuple[int, int]], percent: int) -> int:
    """Return the least number that at least so many percent are not above."""
    total = sum(count for _, count in pairs)
    below = itertools.accumulate(count for _, count in pairs)
    return next(number for (number, _), so_far in zip(pairs, below, strict=True) if 100 * so_far >= percent * total)


def _wrap(text: str) -> str:
    """Return text in lines that fit below an image; what the font cannot mean as markup is shown as it is."""
    shown = "".join(one if one.isprintable() or one.isspace() else "·" for one in text)
    lines = textwrap.wrap(shown, _CHARACTERS_A_LINE, max_lines=3, placeholder=" …")
    return "\n".join(lines).replace("$", r"\$")

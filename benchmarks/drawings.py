"""What a model draws that was asked for digits: whether they are read as such, how unlike they are, and whether new.

The model is `examples/digits-draw.toml`, trained here or before (``--run``). A classifier that is trained on the real
digits of the model's training reads the drawings, and digits that neither has seen. Distances are Euclidean, of pixels
from 0 to 1. Printed are the share of drawings that are read as asked, and of real digits; the spread of drawings of a
digit about their mean over that of real ones, the mean of all digits and the least of any; and the share of drawings
that are nearer to a picture of the training than 99% of the real ones that it has not seen: copies would be.
``nox -s bench -- drawings [--run FOLDER] [--sheet FILE] [--drawings N]`` prints them, and as its last line one JSON
object; ``--sheet`` keeps a picture of drawings, and real digits below them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _found import Found, report
from numpy.typing import NDArray
from PIL import Image
from sklearn.svm import SVC  # type: ignore[import-untyped]  # it ships no types

from mimo.trainer import generate_many, open_checkpoint, read_settings, resolve, train
from mimo_dataset_digits import load_split

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits-draw.toml"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = 0.2
PERCENT = 1.0
"""Of real unseen digits are as near to the training as what counts as a copy."""
ROWS, SIDE, GAP = 8, 24, 2
"""Of the sheet: rows of drawings and of real digits, and pixels of each and between them."""

Pictures = NDArray[np.float64]


def draw(run: Path, each: int, overrides: tuple[str, ...]) -> Pictures:
    """Return so many drawings of each digit, [10, each, 64]."""
    trainer = open_checkpoint(run, overrides)
    prompts = [f"draw {name}" for name in NAMES for _ in range(each)]
    answers = generate_many(trainer, prompts, max_tokens=4, batch=16)
    found = [np.asarray(raw, dtype=np.float64) / 255 for answer in answers for _, raw in answer.items[:1]]
    assert len(found) == len(prompts), "some text calls for no drawing"
    return np.stack(found).reshape(len(NAMES), each, -1)


def real(split: Any) -> tuple[Pictures, NDArray[np.int64]]:
    """Return the real digits of a split, [N, 64], and what they are [N]."""
    images, labels, _ = load_split(HELD_OUT, split)
    return images.reshape(len(images), -1) / 255, labels


def spread(pictures: Pictures) -> float:
    """Return how far pictures [N, 64] are from their mean, as a root of the mean square."""
    return float(np.sqrt(np.square(pictures - pictures.mean(0)).sum(1).mean()))


def nearest(pictures: Pictures, known: Pictures) -> NDArray[np.float64]:
    """Return the distance [N] of each picture to the nearest of others."""
    squares = np.square(pictures).sum(1)[:, None] + np.square(known).sum(1) - 2 * pictures @ known.T
    distances: NDArray[np.float64] = np.sqrt(np.maximum(squares, 0).min(1))
    return distances


def sheet(drawn: Pictures, unseen: Pictures, labels: NDArray[np.int64]) -> Image.Image:
    """Return a picture of drawings, a column each digit, and of real digits below them."""
    step = SIDE + GAP
    found = Image.new("L", (len(NAMES) * step + GAP, 2 * ROWS * step + 3 * GAP), 96)
    for digit in range(len(NAMES)):
        columns = (drawn[digit][:ROWS], unseen[labels == digit][:ROWS])
        for part, column in enumerate(columns):
            for row, picture in enumerate(column):
                image = Image.fromarray(np.rint(picture.reshape(8, 8) * 255).astype(np.uint8))
                at = (GAP + digit * step, GAP + (part * ROWS + row) * step + part * GAP)
                found.paste(image.resize((SIDE, SIDE), Image.Resampling.NEAREST), at)
    return found


def compare(drawn: Pictures) -> Found:
    """Return how drawings [10, each, 64] compare with real digits."""
    (known, labels), (unseen, truth) = real("train"), real("evaluation")
    reader = SVC(gamma=0.05).fit(known, labels)
    pictures, asked = drawn.reshape(-1, drawn.shape[2]), np.arange(len(NAMES)).repeat(drawn.shape[1])
    spreads = [spread(drawn[digit]) / spread(unseen[truth == digit]) for digit in range(len(NAMES))]
    edge = np.percentile(nearest(unseen, known), PERCENT)
    near = float((nearest(pictures, known) < edge).mean())
    return Found(
        ratios={
            "drawings read as asked": [float(reader.score(pictures, asked))],
            "real digits read right": [float(reader.score(unseen, truth))],
            "spread of drawings / real digits": [float(np.mean(spreads))],
            "spread of drawings / real digits, of the digit with the least": [min(spreads)],
            "drawings nearer to the training than 99% of real ones": [near],
        },
        aims={
            "drawings read as asked": (">=", 0.9),
            "spread of drawings / real digits": (">=", 0.7),
            "spread of drawings / real digits, of the digit with the least": (">=", 0.7),
            "drawings nearer to the training than 99% of real ones": ("<=", 0.02),
        },
    )


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--drawings", type=int, default=200)
    parser.add_argument("overrides", nargs="*", help="settings of the model that differ, as key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or train(resolve(read_settings(EXAMPLE, (f"run.directory={folder}/run",)))).directory
        drawn = draw(run, options.drawings // len(NAMES), tuple(options.overrides))
    if options.sheet is not None:
        sheet(drawn, *real("evaluation")).save(options.sheet)
    report("drawings", [compare(drawn)], rounds=1)


if __name__ == "__main__":
    main()

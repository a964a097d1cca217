"""Parity of whole image-text models: `hf-images` and a language model behind it, beside the library's model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import attrs
import torch
from oracle import Outcome as Step
from oracle import Piece
from parity import ALONE, Difference, Outcome, difference_of, forked, one_line
from parity_types import obstacle
from published_images import FOLDERS
from torch import Tensor
from whole_jobs import CLEAR, RefusedImportError, Whole, greedy_logits, world_of_grids
from whole_models import SampleLogits, load, tune

from mimo.hooks import UserError
from mimo.model import supported_axes
from mimo.model.testing import try_axes
from mimo.testing import RanksError
from mimo.trainer import read_settings, resolve
from mimo_transformers import HF_IMAGES

TOKENS = 8
"""How many are generated after an image."""
IMAGE, PROMPT = "1.png", "what is <image>so "


@attrs.frozen(kw_only=True)
class WholeOutcome(Outcome):
    """What was found of a whole model.

    Args:
        model_type: of its ``config.json``.
        language: the plugin that serves its language model.
        images: the kind of how images are prepared; empty of a type of which there is no folder.
        tokens: generated after an image, the same as the library's, as far as its choice is clear.
    """

    model_type: str
    images: str = ""
    language: str = ""
    tokens: int = 0


def whole_outcome(name: str) -> WholeOutcome:
    """Return what is found of one of `FOLDERS`, imported and measured on forked ranks, or of a type that has none."""
    if name not in FOLDERS:
        return WholeOutcome(model_type=name, problem=obstacle(name))
    folder = FOLDERS[name]
    found = WholeOutcome(model_type=folder.config["model_type"], images=folder.processing().kind)
    with tempfile.TemporaryDirectory() as path:
        try:
            return _measured(found, Whole(name, Path(path)))
        except RefusedImportError as error:
            said = one_line(str(error)).replace(f"{path}/there", "DIR")
            return attrs.evolve(found, problem=f"folder: {said}")
        except (RanksError, UserError) as error:
            return attrs.evolve(found, problem=one_line(f"fails: {str(error).strip().splitlines()[-1]}"))


def _measured(found: WholeOutcome, whole: Whole) -> WholeOutcome:
    job = resolve(read_settings(whole.settings))
    (encoder,) = job.encoders
    tried = try_axes(HF_IMAGES, encoder.config, hidden=job.row_width(job.language))
    layouts = {ALONE: whole.settings, **dict(whole.layouts())}
    differences = {
        words: _difference(whole, forked(world_of_grids(settings), tune, settings))
        for words, settings in layouts.items()
    }
    model, _ = load(whole.there)
    asked = (whole.path / "ours", model, whole.path / "data" / IMAGE, PROMPT, TOKENS)
    (pair,) = forked(1, greedy_logits, *asked)
    tokens, outputs, parted = compare_greedy(*pair)
    outputs = max(outputs, differences[ALONE].outputs or 0.0)
    differences[ALONE] = attrs.evolve(differences[ALONE], outputs=outputs)
    found_wrong = {words: one.problem_within(whole.bound) for words, one in differences.items()}
    problems = [f"{words}: {problem}" for words, problem in found_wrong.items() if problem]
    tensors, weights = _weights(whole)
    return attrs.evolve(
        found,
        problem="; ".join(f"differs: {one}" for one in [*problems, *parted]),
        refused={axis: one_line(tried[axis]) for axis in supported_axes(HF_IMAGES) if tried[axis]},
        differences=differences,
        tensors=tensors,
        weights=weights,
        language=job.language.spec.name,
        tokens=tokens,
    )


def _difference(whole: Whole, found: Sequence[tuple[Step, Sequence[SampleLogits]]]) -> Difference:
    steps, logits = zip(*found, strict=True)
    losses = [one.losses[0] for one in steps]
    pieces: dict[str, list[Piece]] = {}
    for one in steps:
        for name, piece in one.gradients.items():
            pieces.setdefault(name, []).append(piece)
    difference = difference_of(
        losses=(max(losses, key=lambda loss: abs(loss - whole.loss)), whole.loss),
        gradients=(
            {name: worst_copies(found, whole.gradients[name]) for name, found in pieces.items()},
            whole.gradients,
        ),
    )
    return attrs.evolve(difference, outputs=whole.logits_difference(chain.from_iterable(logits)))


def worst_copies(pieces: Iterable[Piece], expected: Tensor) -> Tensor:
    """Return a gradient of which each element is the worst copy that a rank holds; infinite where none does."""
    full = torch.full((expected.numel(),), torch.inf, dtype=torch.float64)
    true = expected.double().flatten()
    for piece in pieces:
        assert piece.shape == expected.shape
        places, values = torch.from_numpy(piece.places).long(), torch.from_numpy(piece.values).double()
        values = torch.where(values.isnan(), -torch.inf, values)
        held = full[places]
        is_worse = held.isposinf() | ((values - true[places]).abs() > (held - true[places]).abs())
        full[places] = torch.where(is_worse, values, held)
    return full.view(expected.shape)


def compare_greedy(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[int, float, list[str]]:
    """Return how many tokens are the library's, by how much logits differ, over the largest, and what is wrong.

    Args:
        ours: logits [V] of each token.
        theirs: the library's. Up to the first whose choice isn't clear they are compared.
    """
    outputs = 0.0
    for place, expected in enumerate(theirs):
        if place == len(ours):
            return place, outputs, [f"generation ends after {place} tokens"]
        outputs = max(outputs, float((ours[place] - expected).abs().max() / expected.abs().max()))
        first, second = expected.topk(2).values.tolist()
        if first - second <= CLEAR:
            return place, outputs, []
        if (chosen := int(ours[place].argmax())) != (wanted := int(expected.argmax())):
            return place, outputs, [f"token {place} is {chosen}, expected {wanted}"]
    more = [f"generation continues after {len(theirs)} tokens"] if len(ours) > len(theirs) else []
    return len(theirs), outputs, more


def _weights(whole: Whole) -> tuple[int, str]:
    """Return how many published tensors went in and out to the bit, or why they didn't."""
    try:
        return len(whole.export(whole.path / "back")), ""
    except AssertionError as error:
        return 0, one_line(f"another folder comes out: {error}")

"""A whole model that computes something else than its two modules do together is refused when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import here
from transformers import Gemma3ForConditionalGeneration, LlavaForConditionalGeneration
from whole_models import write_whole

EXPECTED = (
    "/there/config.json: expected a model that computes what 'hf-images' and 'decoder' compute together: text, and "
    "rows of images in its places, got LlavaForConditionalGeneration, a thin one "
)
ALONE = "What it does with images besides can't be trained. Name the part of it that is wanted: language="
THEIRS: Any = LlavaForConditionalGeneration.forward
SAMPLES = TEXT, BETWEEN, LAST = "text alone", "an image between texts", "two images of unlike sizes and no text behind"


def embedded(model: Any, ids: torch.Tensor, pixels: torch.Tensor | None, *, scale: float = 1.0) -> torch.Tensor:
    """Return the embedded rows [1, S, H] of a sample, those of images times a number."""
    rows: torch.Tensor = model.get_input_embeddings()(ids)
    if pixels is not None:
        found = model.get_image_features(pixel_values=pixels).pooler_output
        rows[ids == model.config.image_token_id] = scale * torch.cat(list(found))
    return rows


def scaled(self: Any, input_ids: torch.Tensor, *, pixel_values: Any = None, **others: Any) -> Any:
    """Compute what the library does, of image rows that are doubled."""
    return THEIRS(self, inputs_embeds=embedded(self, input_ids, pixel_values, scale=2.0), **others)


def placed(self: Any, input_ids: torch.Tensor, *, pixel_values: Any = None, **others: Any) -> Any:
    """Compute what the library does, at positions that stay what they are over the rows of an image."""
    is_row = input_ids == self.config.image_token_id
    steps = torch.ones_like(input_ids)
    steps[:, 1:] -= (is_row[:, 1:] & is_row[:, :-1]).long()
    positions = steps.cumsum(1) - 1
    rows = embedded(self, input_ids, pixel_values)
    return THEIRS(self, inputs_embeds=rows, position_ids=positions, **others)


def added(self: Any, input_ids: torch.Tensor, *, pixel_values: Any = None, **others: Any) -> Any:
    """Compute what the library does, with something added to what is text."""
    rows = embedded(self, input_ids, pixel_values)
    rows = rows + 0.01 * (input_ids != self.config.image_token_id)[..., None]
    return THEIRS(self, inputs_embeds=rows, **others)


def failing(self: Any, input_ids: torch.Tensor, **others: Any) -> Any:
    """Take no images."""
    if others.get("pixel_values") is not None:
        raise ValueError("no images")
    return THEIRS(self, input_ids, **others)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a small LLaVA."""
    path = tmp_path_factory.mktemp("whole") / "there"
    write_whole("llava", path)
    return path


def of_images(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that leaves what is embedded already to the library."""

    def made(self: Any, input_ids: Any = None, **others: Any) -> Any:
        return forward(self, input_ids, **others) if input_ids is not None else THEIRS(self, **others)

    return made


@pytest.mark.parametrize(
    ("forward", "differing", "agreeing", "fix"),
    [
        (scaled, (BETWEEN, LAST), TEXT, ALONE),
        (placed, (BETWEEN, LAST), TEXT, ALONE),
        (
            added,
            (TEXT, BETWEEN, LAST),
            "",
            "Name another plugin for its text, --plugin NAME, if one computes it, or the part ",
        ),
    ],
)
def test_another_composition_is_refused(
    there: Path,
    forward: Callable[..., Any],
    differing: tuple[str, ...],
    agreeing: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the samples of which the logits differ; nothing is printed of its settings, and nothing written."""
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", of_images(forward))
    ended = here("checkpoint", "import-hf", there, "--out", there.parent / "ours")
    assert ended.code == 2
    assert f"{EXPECTED}whose logits differ by " in ended.err
    found, _, others = ended.err.partition(", and not in ")
    assert tuple(name for name in SAMPLES if f" in {name}" in found) == differing
    assert others.startswith(f"{agreeing}. ") if agreeing else not others
    assert fix in ended.err
    assert f"vision={there}." in ended.err
    assert not ended.out
    assert not (there.parent / "ours").exists()


def test_a_model_that_cannot_be_tried_is_refused(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it fails of."""
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", of_images(failing))
    ended = here("checkpoint", "import-hf", there)
    assert ended.code == 2
    assert f"{EXPECTED}that fails with ValueError: no images. {ALONE}{there}" in ended.err


def test_settings_beside_its_section_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Gemma 3 that an image's rows see each other, which is found out by another trial and counts here."""
    write_whole("gemma3", tmp_path / "there")
    monkeypatch.setattr("mimo_transformers.whole.seeing.sees_items", lambda _config: False)
    ended = here("checkpoint", "import-hf", tmp_path / "there")
    assert ended.code == 2
    assert f"got {Gemma3ForConditionalGeneration.__name__}, a thin one whose logits differ by " in ended.err
    assert f", and not in {TEXT}. " in ended.err


def test_a_part_alone_is_read(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the message says, since nothing is composed then."""
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", of_images(scaled))
    assert here("checkpoint", "import-hf", f"language={there}").code == 0
    assert here("checkpoint", "import-hf", f"vision={there}").code == 0

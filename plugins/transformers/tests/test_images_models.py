"""What images are handed to models of the library as, which make as many rows of each as its text has."""

from __future__ import annotations

from typing import Any

import torch
from published_images import EACH, FOLDERS, SIZES, picture
from small_models import known
from torch import Tensor

from mimo_transformers.family import quiet
from mimo_transformers.images import PARITY, ImageProcessing


def _model(name: str) -> Any:
    """Return a small model of the library that a folder's config describes, without its head."""
    import transformers

    config = dict(FOLDERS[name].config)
    described = transformers.CONFIG_MAPPING[known(config.pop("model_type"))](**config)
    with quiet():
        return transformers.AutoModel.from_config(described).eval()


def _rows(model: Any, processing: ImageProcessing, sizes: list[tuple[int, int]]) -> tuple[list[int] | None, Tensor]:
    """Return the rows of all images that a model makes, and how many of each where it splits them."""
    items = [processing.prepare(picture(size)) for size in sizes]
    with torch.no_grad():
        found = model.get_image_features(**processing.collate(items, sizes)).pooler_output
    each = [len(one) for one in found] if not isinstance(found, Tensor) else None
    rows = found if isinstance(found, Tensor) else torch.cat(list(found))
    return each, rows.flatten(0, -2)


@EACH
def test_a_model_makes_as_many_rows_as_a_text_has(name: str) -> None:
    """Of images of all sizes at once, and of each alone, in which its rows are the same."""
    processing, model = FOLDERS[name].processing(), _model(name)
    assert PARITY[processing.kind]["rows"] == "library"
    wanted = [processing.rows(size) for size in SIZES]
    each, rows = _rows(model, processing, list(SIZES))
    assert len(rows) == sum(wanted)
    assert each is None or each in (wanted, [sum(wanted)])
    for size, together in zip(SIZES, rows.split(wanted), strict=True):
        if name == "mistral3" and len(together) == 1:
            continue  # a row alone the library takes for a batch of numbers, and fails
        alone = _rows(model, processing, [size])[1]
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)

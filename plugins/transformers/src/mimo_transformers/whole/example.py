"""A thin whole model of the library as a published folder, and what the library makes of samples with it.

Shapes: S tokens of a sample, rows of images included, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.hooks import ConfigError
from mimo.model import HfExample
from mimo_transformers.family import config_of, new_image_text, shrink
from mimo_transformers.model.small import affordable, stir, thin_values, trying
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.trial import draw_images, thin_whole

ROW_TYPES = ("mm_token_type_ids", "token_type_ids")
"""What tells the library's models which rows are those of images."""
_SIZES = ((64, 64), (50, 110))
"""Of images, of which families that cut tiles make few."""
_PLACEHOLDERS = ("image_token_id", "image_token_index")
_ID = re.compile(r"_token_(id|ids|index)$")
"""Keys of a ``config.json`` that say ids."""


def write_example(config: HfImagesConfig, library: Any, folder: Path) -> HfExample:
    """Write a thin model of the same family, and return what to try with it.

    Args:
        config: of the encoder.
        library: config of the whole model, as the published folder has it.
        folder: an empty one.

    Raises:
        ConfigError: no key says which token is a row of an image.
    """
    its_placeholder = _placeholder(library)
    text = library.text_config
    values = thin_whole(library, {**thin_values(text), **json.loads(json.dumps(shrink(text), default=str))})
    vocabulary = int(values["text_config"]["vocab_size"])
    if "vocab_size" in values:
        values["vocab_size"] = vocabulary
    numbers = {old: new for new, old in enumerate(sorted(set(_ids(values))))}
    small = config_of(config.model_type, _renumbered(values, numbers), where="config")
    with trying():
        model = stir(affordable(partial(new_image_text, small))).eval()
        model.save_pretrained(folder)
        images = draw_images(_SIZES)
    placeholder = numbers[its_placeholder]
    return HfExample(
        placeholder=placeholder,
        words=range(len(numbers), vocabulary),
        items=images,
        logits=partial(_logits, model, config, placeholder),
    )


def _logits(
    model: Any, config: HfImagesConfig, placeholder: int, tokens: Sequence[int], images: Sequence[Any]
) -> Tensor:
    """Return the logits [S, V] of a sample."""
    ids = torch.tensor([list(tokens)])
    takes = inspect.signature(model.forward).parameters
    is_row = (ids == placeholder).long()
    given = {key: is_row for key in ROW_TYPES if key in takes}
    with trying():
        if images:
            sizes = [(image.height, image.width) for image in images]
            given |= config.processing.collate([config.processing.prepare(image) for image in images], sizes)
        logits: Tensor = model(input_ids=ids, **given, use_cache=False).logits[0]
    return logits


def _placeholder(library: Any) -> int:
    for key in _PLACEHOLDERS:
        if isinstance(found := getattr(library, key, None), int):
            return found
    keys = " or ".join(_PLACEHOLDERS)
    raise ConfigError(f"config.json: {_PLACEHOLDERS[0]}", expected=f"{keys}, the id of one row of an image", got="none")


def _ids(values: Any, *, of_ids: bool = False) -> Iterator[int]:
    """Yield the ids that keys say, those of sections too."""
    if isinstance(values, Mapping):
        for key, one in values.items():
            yield from _ids(one, of_ids=bool(_ID.search(key)))
    elif isinstance(values, list):
        for one in values:
            yield from _ids(one, of_ids=of_ids)
    elif of_ids and type(values) is int and values >= 0:
        yield values


def _renumbered(values: Any, numbers: Mapping[int, int], *, of_ids: bool = False) -> Any:
    """Return the same values with other ids."""
    if isinstance(values, Mapping):
        return {key: _renumbered(one, numbers, of_ids=bool(_ID.search(key))) for key, one in values.items()}
    if isinstance(values, list):
        return [_renumbered(one, numbers, of_ids=of_ids) for one in values]
    return numbers[values] if of_ids and type(values) is int and values >= 0 else values

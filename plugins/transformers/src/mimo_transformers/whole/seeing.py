"""Whether rows of one image see each other in a whole model of the library: found out on a thin one.

Shapes: T rows of a sample, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mimo_transformers.family import new_image_text
from mimo_transformers.model.small import affordable, stir, trying
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.trial import refusal, thin_images

_BEFORE, _ROWS, _AFTER = 2, 3, 2
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""What tells the library's models which rows are those of images."""

_SEEN: dict[str, bool] = {}


def sees_items(config: HfImagesConfig) -> bool:
    """Return whether the first row of an image depends on its last one.

    Raises:
        ConfigError: a row depends on text behind it, which no language model here can do.
    """
    key = repr(config)
    if key not in _SEEN:
        with trying():
            _SEEN[key] = _sees_items(thin_images(config))
    return _SEEN[key]


def _sees_items(config: HfImagesConfig) -> bool:
    library = config.library()
    model = stir(affordable(partial(new_image_text, library))).eval()
    kinds = torch.tensor([[0] * _BEFORE + [1] * _ROWS + [0] * _AFTER])
    embedded = torch.randn(1, kinds.shape[1], library.text_config.hidden_size)
    last_row = _BEFORE + _ROWS - 1
    with torch.enable_grad():
        seen = _gradient(model, kinds, embedded, at=_BEFORE)
    if bool(seen[last_row + 1 :].any()):
        raise refusal(config, "rows that depend on text behind them")
    return bool(seen[last_row].any())


def _gradient(model: Any, kinds: Tensor, embedded: Tensor, *, at: int) -> Tensor:
    """Return [T, H], on what the logits of the row ``at`` depend."""
    embedded = embedded.clone().requires_grad_()
    takes = inspect.signature(model.forward).parameters
    types = {key: kinds for key in _TYPES if key in takes}
    logits = model(inputs_embeds=embedded, **types, use_cache=False).logits
    (found,) = torch.autograd.grad(logits[0, at].sum(), embedded)
    return found[0]

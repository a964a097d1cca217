"""What a whole model of the library leaves out of how its language model alone makes logits: found out on a thin one.

The class of Aya Vision, for example, doesn't scale logits as the class of its language model does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mimo_transformers.family import PLAIN_HEAD, config_of, new_image_text
from mimo_transformers.model.small import affordable, stir, trying
from mimo_transformers.whole.trial import thin_text, thin_whole

_WORDS = 3


def left_out(library: Any) -> Mapping[str, float | None]:
    """Return the keys of the language model that its logits in the whole don't depend on, as they leave these alone.

    Args:
        library: config of the whole.
    """
    text = library.text_config
    said = {key: one for key, one in PLAIN_HEAD.items() if getattr(text, key, one) != one}
    if not said:
        return {}
    values = thin_whole(library, thin_text(library))
    return _without_effect(json.dumps([library.model_type, values, said], sort_keys=True))


@cache
def _without_effect(description: str) -> Mapping[str, float | None]:
    """Return those keys with which a thin model makes the logits that it makes without them."""
    model_type, values, said = json.loads(description)
    with trying():
        wanted = _logits(model_type, values)
        return {
            key: plain
            for key, plain in said.items()
            if torch.equal(wanted, _logits(model_type, _with(values, {key: plain})))
        }


def _with(values: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "text_config": {**values["text_config"], **text}}


def _logits(model_type: str, values: Mapping[str, Any]) -> Tensor:
    """Return the logits of a few words that the same thin model makes each time."""
    torch.default_generator.manual_seed(0)
    model = stir(affordable(partial(new_image_text, config_of(model_type, values, where="config")))).eval()
    found: Tensor = model(input_ids=torch.arange(1, 1 + _WORDS)[None], use_cache=False).logits
    return found

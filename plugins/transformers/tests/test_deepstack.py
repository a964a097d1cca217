"""`hf-decoder` with rows that are added behind its first layers, beside the library's text model of Qwen3-VL."""

from typing import Any

import attrs
import pytest
import torch
from library import IMAGE, Sample, check_learning
from small_models import small
from torch import Tensor

from mimo.hooks import ConfigError
from mimo.model import Stage
from mimo.model.testing import LanguageLayout, assert_language_layouts
from mimo_transformers import HF_DECODER

HIDDEN, DEEP = 32, 3


def deep(model_type: str, **changes: Any) -> Any:
    """Return a small config of four layers, of which three add rows."""
    return attrs.evolve(small(model_type, **changes), deepstack=DEEP)


def _text_logits(text: Any, sample: Sample, rows: Tensor) -> Tensor:
    """Return the logits of the library's text model, which is given the rows that its layers add."""
    at = sample.ids == IMAGE
    own, *added = rows.split(HIDDEN, 1)
    embedded = text.model.embed_tokens(sample.ids).index_copy(0, at.nonzero().squeeze(1), own)
    found = text.model(
        inputs_embeds=embedded.unsqueeze(0),
        position_ids=sample.grid_positions.T.unsqueeze(1),
        visual_pos_masks=at.unsqueeze(0),
        deepstack_visual_embeds=added,
        use_cache=False,
    )
    logits: Tensor = text.lm_head(found.last_hidden_state)[0]
    return logits


@pytest.mark.parametrize(
    ("model_type", "stages"), [("qwen3_vl_text", 1), ("qwen3_vl_text", 4), ("qwen3_vl_moe_text", 3)]
)
def test_layers_add_rows_of_images_as_the_librarys_do(model_type: str, stages: int) -> None:
    """Packed samples with no, one and two images, also where each layer is a stage: loss, and every gradient."""
    torch.manual_seed(5)
    samples = [Sample.of(*p, width=HIDDEN * (1 + DEEP)) for p in ((5,), (2, (2, 2), 3), ((2, 3), 1, (1, 5), 2))]
    check_learning(deep(model_type), samples, stages=stages, logits=_text_logits, grids=True)


@pytest.mark.newest
def test_layouts_hand_added_rows_on() -> None:
    """Stages of a layer, and context and tensor ranks, with a tied head that isn't the library's own."""
    lanes = ((7, 3, 5),)
    layouts = [LanguageLayout(pp=4, lanes=lanes), LanguageLayout(cp=2, tp=2, lanes=lanes)]
    assert_language_layouts(HF_DECODER, layouts, config=deep("qwen3_vl_text", tie_word_embeddings=True))


def test_more_layers_than_there_are_add_nothing() -> None:
    """The setting is refused with the number of layers."""
    config = attrs.evolve(small("llama"), deepstack=5)
    with pytest.raises(ConfigError, match=r"deepstack: expected at most values.num_hidden_layers = 4, got 5"):
        HF_DECODER.build(config, Stage())

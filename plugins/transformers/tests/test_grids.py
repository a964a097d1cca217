"""`hf-decoder` with rows that turn by three positions, beside the composed models of the library that have them."""

from typing import Any

import pytest
import torch
import transformers
from library import IMAGE, Sample, check_learning
from small_models import small
from torch import Tensor

from mimo_transformers.family import is_causal
from mimo_transformers.weights import CAUSAL

WHOLE = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "glm4v_text": "glm4v",
}
"""The composed model of each text."""
PARTS = ((5,), (2, (2, 2), 3), ((2, 3), 1, (1, 5), 2))
"""Samples with no, one and two images."""


def _whole_logits(text: Any, sample: Sample, rows: Tensor) -> Tensor:
    """Return the logits of the composed model around a language model, given its embedded rows and places."""
    with torch.device("meta"):  # of which the tower isn't run
        config = transformers.AutoConfig.for_model(WHOLE[text.config.model_type], text_config=text.config.to_dict())
        whole: Any = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    whole.model.language_model, whole.lm_head = text.model, text.lm_head
    places = (sample.ids == IMAGE).nonzero().squeeze(1)
    embedded = text.model.embed_tokens(sample.ids).index_copy(0, places, rows)
    positions = sample.grid_positions.T.unsqueeze(1)
    logits: Tensor = whole(inputs_embeds=embedded.unsqueeze(0), position_ids=positions).logits[0]
    return logits


@pytest.mark.parametrize("model_type", WHOLE)
def test_texts_of_vls_learn_of_images_what_the_library_does(model_type: str) -> None:
    """Packed samples, in two stages: loss and all gradients, those of images' rows too."""
    torch.manual_seed(5)
    samples = [Sample.of(*parts, width=32) for parts in PARTS]
    check_learning(small(model_type), samples, stages=2, logits=_whole_logits, grids=True)


def test_a_text_without_a_head_of_its_own_is_written_as_itself() -> None:
    """Folders of it name the library's class; a text that reads no grids gets no head."""
    family = CAUSAL.of("qwen3_vl_text")
    assert family is not None
    assert family.architecture == "Qwen3VLTextModel"
    assert "has no class of this family that reads text alone and has a head" in family.export_note
    assert not is_causal("clip_text_model")
    assert not is_causal("siglip_text_model")

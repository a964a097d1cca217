"""`hf-decoder` with rows of images that see each other, beside the library's composed model of Gemma 3."""

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import transformers
from library import IMAGE, Sample, check_learning
from small_models import is_older, small
from torch import Tensor

from mimo.model.testing import LanguageLayout, assert_language_layouts, assert_language_model_conforms
from mimo_transformers import HF_DECODER

TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
WINDOW = 3
"""Less rows than an image has: what lies before it is hidden within an image too, since this version."""


def gemma() -> Any:
    """Return a small config whose images' rows see each other."""
    window = 8 if is_older("5.23") else WINDOW
    return attrs.evolve(small("gemma3_text", sliding_window=window), bidirectional_items=True)


def _whole_logits(text: Any, sample: Sample, rows: Tensor) -> Tensor:
    """Return the logits of the composed model around a language model, given the rows of its images."""
    config = transformers.Gemma3Config(text_config=text.config, vision_config=TOWER, image_token_index=IMAGE)
    whole: Any = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    whole.model.language_model, whole.lm_head = text.model, text.lm_head
    whole.model.get_image_features = lambda *_given, **_named: SimpleNamespace(pooler_output=rows.unsqueeze(0))
    pictures = torch.zeros(1, 3, 28, 28) if len(rows) else None
    kinds = (sample.ids == IMAGE).long().unsqueeze(0)
    logits: Tensor = whole(sample.ids.unsqueeze(0), pixel_values=pictures, token_type_ids=kinds).logits[0]
    return logits


@pytest.mark.parametrize("stages", [1, 2])
def test_gemma_3_learns_of_images_what_the_library_does(stages: int) -> None:
    """Samples with no, one and two images, packed; loss and all gradients, those of images' rows too."""
    torch.manual_seed(5)
    samples = [Sample.of(*parts, width=32) for parts in ((5,), (2, (2, 2), 3), ((2, 3), 1, (1, 5), 2))]
    check_learning(gemma(), samples, stages=stages, logits=_whole_logits)


@pytest.mark.newest
def test_layouts_see_items_as_the_whole_does() -> None:
    """Stages, tensor ranks, and context ranks that cut an item."""
    lanes = ((7, 3, 5),)
    layouts = [LanguageLayout(pp=2, tp=2, lanes=lanes), LanguageLayout(cp=2, tp=2, lanes=lanes)]
    assert_language_layouts(HF_DECODER, layouts, config=gemma())


def test_a_language_model_whose_items_are_seen_whole_keeps_its_promises() -> None:
    """A token changes nothing before its item, and a cached sample whose items are read whole is that of the whole."""
    checks = ["causality", "decode cache"]
    assert_language_model_conforms(HF_DECODER, config=gemma(), checks=checks)


def test_only_a_config_that_asks_has_items_made() -> None:
    """Others attend causally whatever a batch says."""
    assert HF_DECODER.reads_items(gemma())
    assert not HF_DECODER.reads_items(small("gemma3_text"))

"""Small configs of whole models, whose parts fit together."""

from __future__ import annotations

from typing import Any

import pytest
from small_models import known

from mimo_transformers import shrink
from mimo_transformers.family import config_of


def small_whole(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the keys of a small whole model of the library."""
    return shrink(config_of(known(model_type), {}), **changes)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("qwen2_vl", "hidden_size"), ("qwen2_5_vl", "out_hidden_size"), ("glm4v", "out_hidden_size")],
)
def test_rows_of_a_tower_are_as_wide_as_the_text(model_type: str, key: str) -> None:
    """Though the library's own configs of the two may not be."""
    keys = small_whole(model_type)
    assert keys["vision_config"][key] == keys["text_config"]["hidden_size"]


def test_layers_that_are_named_exist() -> None:
    """Those of a tower whose rows are read, and one of the language model for each of them and one more."""
    deep = small_whole("qwen3_vl")
    assert deep["vision_config"]["deepstack_visual_indexes"] == [0, 1, 2]
    assert deep["vision_config"]["depth"] == deep["text_config"]["num_hidden_layers"] == 4
    windows = small_whole("qwen2_5_vl")["vision_config"]
    assert (windows["depth"], windows["fullatt_block_indexes"]) == (2, [1])
    assert windows["window_size"] == 2 * windows["spatial_merge_size"] * windows["patch_size"]
    features = config_of("vipllava", small_whole("vipllava")).vision_feature_layers
    assert list(features) == [-2, -3, 2]  # of embedded patches and two layers


def test_each_kind_of_layers_is_there() -> None:
    """In the order of the large model, as far as so few can be."""
    kinds = {name: small_whole(name)["text_config"]["layer_types"] for name in ("qwen3_5", "gemma3")}
    assert kinds == {
        "qwen3_5": ["linear_attention", "full_attention"],
        "gemma3": ["sliding_attention", "full_attention"],
    }
    assert small_whole("lfm3_vl")["text_config"]["layer_types"] == ["conv", "sliding_attention", "full_attention"]


def test_turned_heads_have_places_in_time_down_and_across() -> None:
    """Also where a part of a head is turned."""
    for name in ("qwen2_vl", "qwen3_5", "glm4v_moe"):
        text = small_whole(name)["text_config"]
        rope = text["rope_parameters"]
        width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        assert rope["mrope_section"] == [2, 1, 1]
        assert 2 * sum(rope["mrope_section"]) == width * rope.get("partial_rotary_factor", 1)


def test_ids_differ_and_fit_the_vocabulary() -> None:
    """As those of padding, which are the first, do."""
    keys = small_whole("qwen2_vl")
    ids = [number for key, number in keys.items() if key.endswith("_token_id")]
    assert len(ids) == 4
    assert sorted({0, *ids}) == list(range(5))
    assert keys["text_config"]["vocab_size"] > 5


def test_images_are_of_a_few_patches() -> None:
    """Grids of tiles and rows of an image follow."""
    keys = small_whole("llava_next")
    assert (keys["vision_config"]["image_size"], keys["vision_config"]["patch_size"]) == (16, 4)
    assert keys["image_grid_pinpoints"] == [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
    assert small_whole("internvl")["image_seq_length"] == 4
    assert small_whole("got_ocr2")["vision_config"]["image_size"] == 64  # whose patches are joined four by four


def test_keys_of_a_part_can_be_others() -> None:
    """And lists by layer are as long as it has layers."""
    keys = small_whole("gemma3", text_config={"num_hidden_layers": 3}, vision_config={"vision_use_head": False})
    assert keys["text_config"]["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert keys["vision_config"]["vision_use_head"] is False

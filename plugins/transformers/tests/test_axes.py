"""Axes along which no model of the library is split: each is refused by its setting, before anything is built."""

from typing import Any

import pytest
from small_models import small
from test_hf_encoder import small as small_tower
from test_hf_images import config_of

from mimo.hooks import ConfigError
from mimo.model import check_module
from mimo.topology import Grid
from mimo_transformers import HF_DECODER, HF_ENCODER, HF_IMAGES


def test_rows_of_a_language_model_are_not_split_over_tensor_ranks() -> None:
    """Its layers' norms and residuals have all rows, as the library's plans have them."""
    grid = Grid(name="language", ranks=range(2), tp=2)
    text = (
        r"^modules\.language\.sequence_parallel: expected false, since language model 'hf-decoder' does not split "
        r"its rows over tensor ranks, got true\. Leave it out\.$"
    )
    with pytest.raises(ConfigError, match=text):
        check_module(HF_DECODER, small("llama"), grid=grid, sequence_parallel=True)


def test_samples_are_not_split_where_parts_read_all_rows_in_turn() -> None:
    """With the names of these parts."""
    grid = Grid(name="language", ranks=range(2), cp=2)
    text = (
        r"^modules\.language\.cp: expected 1, since this model has parts that read all rows of a sample one after "
        r"the other, got more for 'lfm2' with Lfm2ShortConv\. Leave cp out; any number"
    )
    with pytest.raises(ConfigError, match=text):
        check_module(HF_DECODER, small("lfm2", layer_types=["conv", "conv", "full_attention", "conv"]), grid=grid)


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        (
            "cp",
            r"^modules\.vision\.cp: expected 1, since encoder '{}' has no context parallelism, got 2\. Leave cp out",
        ),
        ("pp", r"^modules\.vision\.pp: expected 1, since encoder '{}' .*, got 2\."),
    ],
)
@pytest.mark.parametrize("spec", [HF_ENCODER, HF_IMAGES])
def test_towers_are_not_cut_along_other_axes(spec: Any, axis: Any, text: str) -> None:
    """Neither images nor layers of a tower are shared out."""
    grid = Grid(name="vision", ranks=range(2), **{axis: 2})
    config = small_tower("vit") if spec is HF_ENCODER else config_of("llava")
    with pytest.raises(ConfigError, match=text.format(spec.name)):
        check_module(spec, config, grid=grid)


@pytest.mark.parametrize("spec", [HF_ENCODER, HF_IMAGES])
def test_rows_of_towers_are_not_split_over_tensor_ranks(spec: Any) -> None:
    """Of either kind."""
    grid = Grid(name="vision", ranks=range(2), tp=2)
    config = (
        small_tower(
            "vit",
        )
        if spec is HF_ENCODER
        else config_of("llava")
    )
    text = rf"^modules\.vision\.sequence_parallel: expected false, since encoder '{spec.name}' does not split its rows"
    with pytest.raises(ConfigError, match=text):
        check_module(spec, config, grid=grid, sequence_parallel=True)

"""Numbers of a published ``config.json`` that mean nothing are refused by their key, by encoders' families too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mimo.hooks import ConfigError
from mimo.trainer.runtime import installed_readers

DROPPED: Mapping[str, Mapping[str, str]] = {
    "whisper": {"dropout": "dropout", "activation_dropout": "activation_dropout"},
    "radio": {"hidden_dropout_prob": "", "drop_path_rate": "drop_path"},
}
"""Keys at whose rate ours drops, by family, with the setting; none where the library drops nothing either."""
SETTINGS = {reader.family.model_type: reader.family.settings for reader in installed_readers("vision")}


@pytest.mark.parametrize(
    ("model_type", "keys", "text"),
    [
        ("siglip_vision_model", {"layer_norm_eps": 1e12}, "layer_norm_eps: expected a number above 0 and up to 0.1"),
        ("siglip_vision_model", {"image_size": 8}, "image_size: expected at least patch_size = 16, got 8"),
        ("siglip_vision_model", {"hidden_size": -768}, "hidden_size: expected at least 1, got -768"),
        ("siglip2_vision_model", {"num_patches": -4}, "num_patches: expected at least 1, got -4"),
        ("clip_vision_model", {"num_attention_heads": True}, "num_attention_heads: expected a whole number, got True"),
        ("clip_vision_model", {"num_channels": 0}, "num_channels: expected at least 1, got 0"),
        ("whisper", {"encoder_layers": 0}, "encoder_layers: expected at least 1, got 0"),
        ("whisper", {"d_model": 1 << 40}, "d_model: expected at most 2147483647"),
        ("whisper", {"dropout": 1.0}, "dropout: expected a rate of 0 or more and less than 1, got 1.0"),
        ("whisper", {"activation_dropout": True}, "activation_dropout: expected a rate of 0 or more and less than 1"),
        ("radio", {"drop_path_rate": float("nan")}, "drop_path_rate: expected a rate of 0 or more and less than 1"),
        ("radio", {"mlp_ratio": float("nan")}, "mlp_ratio: expected a number above 0 and up to 1000, got nan"),
        ("radio", {"norm_std": [0.3, 0.0, 0.3]}, "norm_std: expected a number above 0 and up to 1000, got 0.0"),
        ("radio", {"norm_mean": [float("inf")] * 3}, "norm_mean: expected a number from -1000 to 1000, got inf"),
        ("radio", {"max_img_size": 4}, "max_img_size: expected at least patch_size = 16, got 4"),
        ("radio", {"num_registers": -1}, "num_registers: expected at least 0, got -1"),
    ],
)
def test_numbers_that_mean_nothing_to_an_encoder_are_refused(model_type: str, keys: dict[str, Any], text: str) -> None:
    """By their key, beside what the family's other keys mean where they are left out."""
    SETTINGS[model_type]({})
    with pytest.raises(ConfigError) as caught:
        SETTINGS[model_type](keys)
    assert str(caught.value).startswith(f"config.json: {text}")


@pytest.mark.parametrize("reader", installed_readers("vision"), ids=lambda reader: reader.family.model_type)
def test_every_key_that_drops_can_be_set_aside(reader: Any) -> None:
    """The family says which they are; each is refused as long as it is there, but what is dropped or means nothing."""
    family = reader.family
    for key in family.dropout:
        if key in DROPPED.get(family.model_type, {}):
            ours = DROPPED[family.model_type][key]
            assert family.settings({key: 0.1}) == {**family.settings({}), **({ours: 0.1} if ours else {})}
            continue
        text = rf"config\.json: {key}: expected 0\.0, as .* or --ignore {key}\."
        with pytest.raises(ConfigError, match=text):
            family.settings({key: 0.1})
        assert family.settings({key: 0.0}) == family.settings({})

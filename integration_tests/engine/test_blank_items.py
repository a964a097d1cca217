"""What encoders put in the place of an item that can't be decoded."""

from __future__ import annotations

import pytest

from mimo.hooks import discover
from mimo.model import ENCODERS


@pytest.mark.parametrize("name", ["vit", "siglip", "radio", "whisper"])
@pytest.mark.parametrize("size", [(7, 5), (300, 16_000)])
def test_encoders_give_a_blank_item_of_any_size(name: str, size: tuple[int, int]) -> None:
    """It is measured as that size, as what it stands for was."""
    spec = discover(ENCODERS).find(name, where="modules.vision.plugin")
    assert spec.blank is not None
    assert tuple(spec.measure(spec.blank(size))) == size

"""What an encoder delivers must be what it said, or nobody's placeholders would fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mimo.data import PlacedItem
from mimo.hooks import ItemInfo, RunError
from mimo.trainer._programs import take_rows

JOB: Any = SimpleNamespace(hidden=4)
EYE: Any = SimpleNamespace(name="eye", modality="image", spec=SimpleNamespace(name="tiles"))


def items(*samples: int) -> list[PlacedItem]:
    """Return an item of six rows of each sample."""
    return [
        PlacedItem(info=ItemInfo(sample=sample, index=0, modality="image", size=(2, 3)), start=0, rows=6)
        for sample in samples
    ]


def test_rows_of_any_precision_are_taken_in_one() -> None:
    """They travel as fp32."""
    rows = torch.ones(12, 4, dtype=torch.bfloat16)
    assert torch.equal(take_rows(JOB, EYE, items(3, 8), rows), torch.ones(12, 4))


@pytest.mark.parametrize(("shape", "samples"), [((11, 4), (3, 8)), ((13, 4), (3, 8)), ((12, 5), (3, 8)), ((1, 4), ())])
def test_rows_that_do_not_match_the_placeholders_are_refused(shape: tuple[int, int], samples: tuple[int, ...]) -> None:
    """Too few, too many, too wide, or any where there is no item: modality, samples and both counts are named."""
    with pytest.raises(RunError) as raised:
        take_rows(JOB, EYE, items(*samples), torch.zeros(shape))
    text = str(raised.value)
    assert text.startswith(f"modules.eye: expected {6 * len(samples)} rows of width 4 for {len(samples)} items of mod")
    assert "modality 'image', one for each of their placeholders, as rows() of encoder 'tiles' said" in text
    assert all(f"6 for item 0 of sample {sample} of size (2, 3)" in text for sample in samples)
    assert f"got a tensor of shape {shape} from its forward(). Make them agree." in text


def test_a_long_list_of_items_is_shortened() -> None:
    """A few are enough to find the mistake."""
    with pytest.raises(RunError, match=r"of sample 1 of .* of sample 4 of size \(2, 3\), \.\.\.\)"):
        take_rows(JOB, EYE, items(1, 2, 3, 4, 5), torch.zeros(29, 4))

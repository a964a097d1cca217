"""The decoder over tensor ranks and pipeline stages against itself on one rank (design law 1)."""

from __future__ import annotations

import attrs
import pytest

from mimo.model import DECODER, DecoderConfig
from mimo.model.testing import LanguageLayout, assert_language_layouts

SMALL = DecoderConfig(
    vocabulary=11, hidden=12, layers=3, heads=6, kv_heads=2, intermediate=10, attention_bias=True, mlp_bias=True
)
WIDE = attrs.evolve(SMALL, hidden=16, heads=12, kv_heads=3, head_dim=4)
NORMED = attrs.evolve(
    WIDE,
    query_key_norm=True,
    attention_bias=False,
    qkv_bias=True,
    sliding_window=4,
    mrope_section=(1, 1, 0),
    mrope_interleaved=True,
)


LANES = ((6, 0, 3, 5),)
LAYOUTS = {
    "small": [
        LanguageLayout(pp=3, lanes=LANES),
        LanguageLayout(tp=2, lanes=LANES),
        LanguageLayout(tp=2, sequence_parallel=True, lanes=LANES),
        LanguageLayout(tp=3, lanes=LANES),
        LanguageLayout(tp=3, pp=2, sequence_parallel=True, lanes=LANES),
    ],
    "small tied": [
        LanguageLayout(pp=2, lanes=LANES),
        LanguageLayout(tp=2, pp=3, sequence_parallel=True, lanes=LANES),
    ],
    "wide": [
        LanguageLayout(tp=2, lanes=LANES),
        LanguageLayout(tp=4, pp=2, lanes=LANES),
        LanguageLayout(tp=4, sequence_parallel=True, lanes=LANES),
    ],
    "wide tied": [
        LanguageLayout(tp=4, sequence_parallel=True, lanes=LANES),
    ],
    "narrow vocabulary": [
        LanguageLayout(tp=4, sequence_parallel=True, lanes=LANES),
    ],
    "normed": [
        LanguageLayout(tp=3, pp=2, lanes=LANES),
        LanguageLayout(tp=2, sequence_parallel=True, lanes=LANES),
        LanguageLayout(tp=4, pp=2, sequence_parallel=True, lanes=LANES),
    ],
    "deep": [
        LanguageLayout(pp=3, lanes=LANES),
        LanguageLayout(cp=3, lanes=LANES),
        LanguageLayout(tp=2, pp=3, sequence_parallel=True, lanes=LANES),
    ],
}
CONFIGS = {
    "small": SMALL,
    "small tied": attrs.evolve(SMALL, tied=True),
    "wide": WIDE,
    "wide tied": attrs.evolve(WIDE, tied=True, attention_bias=False),
    "normed": NORMED,
    "deep": attrs.evolve(SMALL, deepstack=2),
    "narrow vocabulary": attrs.evolve(WIDE, vocabulary=5, intermediate=5),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layout_changes_nothing(name: str) -> None:
    """Initial weights bitwise, losses, argmax and every gradient within law 1, with uneven and empty pieces too."""
    assert_language_layouts(DECODER, LAYOUTS[name], config=CONFIGS[name])


def test_layout_of_next_to_nothing() -> None:
    """No rows, or a single one with the rest padding, runs on all tensor ranks."""
    layouts = [
        LanguageLayout(tp=2, pp=2, sequence_parallel=splits, lanes=(lengths,))
        for splits in (False, True)
        for lengths in ((), (0,), (1,))
    ]
    assert_language_layouts(DECODER, layouts, config=SMALL)

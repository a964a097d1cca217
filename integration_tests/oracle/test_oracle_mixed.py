"""Two or three encoders of unlike families, each in a grid of its own, before either language model, in the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from cases import Modules, in_turn
from oracle import Oracle
from tables import EVEN_EPS, Table, table
from test_oracle import SP, on
from test_oracle_audio import CONFIGS as WHISPER
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_radio import CONFIGS as RADIO
from test_oracle_vision import GREY, SMALL

NATIVE = {**SMALL, "mode": "native", "enlarge": True, "max_patches": 12}
ENCODERS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "vision": (
        {"plugin": "siglip", "config": {**NATIVE, "table": 2}},
        {"plugin": "clip", "config": {**NATIVE, **GREY, "projector": {"shuffle": 2}}},
    ),
    "audio": (
        {"plugin": "whisper", "config": WHISPER["silence heard"]},
        {"plugin": "whisper", "config": WHISPER["clips alone"]},
    ),
    "radio": (
        {"plugin": "radio", "config": RADIO["patches joined"]},
        {"plugin": "radio", "config": RADIO["class tokens kept"]},
    ),
}
"""Of each module two kinds; pictures are taken at their own sizes."""
LAYOUTS: Mapping[str, Modules] = {
    "vision tp2, audio lanes 2, language pp2 cp2": {
        "vision": on(0, 1, tp=2),
        "audio": on(2, 3),
        "language": on(4, 7, pp=2, cp=2),
    },
    "vision cp2 and radio tp2 sp, colocated with language tp2 ep2": {
        "vision": on(0, 1, cp=2),
        "radio": on(2, 3, tp=2, **SP),
        "language": on(0, 3, tp=2, ep=2, **SP),
    },
    "three in a row, overlapping": {
        "vision": on(0, 2),
        "audio": on(1, 2, pp=2),
        "radio": on(2, 4, tp=3),
        "language": on(4, 7, cp=2, tp=2, ep=2, **SP),
    },
    "lanes 3 and 1 to 2": {
        "audio": on(0, 2, recompute="selective"),
        "radio": on(3, 3, batch_factor=2),
        "language": on(4, 5, ep=2),
    },
    "three on all ranks of language pp3 tp2": {
        "vision": on(0, 5, cp=3, tp=2, **SP),
        "audio": on(0, 5, tp=2, pp=3),
        "radio": on(0, 5, pp=2, recompute="full"),
        "language": on(0, 5, pp=3, tp=2, **SP),
    },
    "vision pp2 tp2, its projector alone trains, language lanes 3": {
        "vision": on(0, 3, pp=2, tp=2, frozen=["encoder"]),
        "audio": on(1, 2, cp=2),
        "language": on(3, 5),
    },
}
LANGUAGES: Mapping[str, Mapping[str, Any]] = {"decoder": {}, "hybrid": {"plugin": "hybrid", "config": HYBRID}}
CASES = {
    f"{language}, {'first' if kind == 0 else 'other'} kinds": (language, kind)
    for kind, language in product([0, 1], LANGUAGES)
}


def settings_of(layout: str, language: str, kind: int, **more: Any) -> Table:
    """Return the settings of a layout, with one kind of each of its encoders."""
    modules = {name: {**keys, **ENCODERS[name][kind]} for name, keys in LAYOUTS[layout].items() if name != "language"}
    grid = {**LAYOUTS[layout]["language"], **LANGUAGES[language]}
    if language == "decoder":
        grid.pop("ep", None)  # it has no experts
    return table({**modules, "language": grid}, eps=EVEN_EPS, **more)


@pytest.mark.parametrize(("layout", "case"), in_turn(LAYOUTS, [*CASES]))
def test_encoders_of_unlike_families_in_one_model(layout: str, case: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with 0 to 5 pictures of all sizes and 0 to 2 clips a sample."""
    settings = settings_of(layout, *CASES[case], microbatches=2, pictures="many")
    assert oracle.check(oracle.clear(settings)) == ""


@pytest.mark.parametrize(("language", "layout"), in_turn(LANGUAGES, [*LAYOUTS]))
def test_lanes_with_nothing_to_see_or_hear_are_ordinary(language: str, layout: str, oracle: Oracle) -> None:
    """Nothing hangs or changes where one sample of a step has pictures and clips."""
    settings = settings_of(layout, language, 0, microbatches=4, pictures="first")
    assert oracle.check(oracle.clear(settings)) == ""

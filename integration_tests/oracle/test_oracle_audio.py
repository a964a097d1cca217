"""The encoder ``whisper`` before a language model, in the oracle: every layout agrees with one plain process."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from cases import Modules, in_turn
from oracle import Oracle
from tables import EVEN_EPS, Table, table
from test_oracle import SP, on
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_radio import CONFIGS as RADIO

SMALL = {"mels": 5, "width": 24, "layers": 3, "heads": 6, "intermediate": 37, "positions": 12}
JOINED = {"kind": "mlp", "hidden": 20, "norm": "layer"}
RESAMPLED = {"kind": "resampler", "hidden": 12, "heads": 6, "queries": 3, "layers": 1}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "clips alone": SMALL,
    "silence heard": {**SMALL, "silence": "hear", "stack": 2, "projector": JOINED},
    "silence kept": {**SMALL, "silence": "keep", "stack": 3},
    "resampled": {**SMALL, "stack": 2, "projector": RESAMPLED},
}
LAYOUTS: Mapping[str, Modules] = {
    "cp2 tp2 sp to cp2": {"audio": on(0, 3, cp=2, tp=2, **SP), "language": on(4, 5, cp=2)},
    "lanes 3 to 2": {"audio": on(0, 2, recompute="selective"), "language": on(3, 4)},
    "pp2 tp2 sp, overlapping": {"audio": on(0, 3, pp=2, tp=2, **SP), "language": on(2, 5, tp=2)},
    "tp2 sp, colocated": {"audio": on(0, 3, tp=2, **SP), "language": on(0, 3, tp=2, **SP)},
    "cp3 pp2, overlapping": {"audio": on(0, 5, cp=3, pp=2, recompute="full"), "language": on(4, 7, pp=2)},
    "pp3, its projector alone trains": {"audio": on(0, 2, pp=3, frozen=["encoder"]), "language": on(3, 3)},
}


def settings_of(modules: Modules, config: str, **more: Any) -> Table:
    """Return the settings of a layout whose module ``audio`` is a whisper with one of `CONFIGS`."""
    audio = {"plugin": "whisper", "config": CONFIGS[config], **modules["audio"]}
    return table({**modules, "audio": audio}, **more)


@pytest.mark.parametrize(("layout", "case"), in_turn(LAYOUTS, [*product([4, 1], CONFIGS)]))
def test_layout_changes_nothing(layout: str, case: tuple[int, str], oracle: Oracle) -> None:
    """Convolutions, layers and projector learn alike wherever rows are cut, with 0, 1 or 3 clips a sample."""
    microbatches, config = case
    assert oracle.check(settings_of(LAYOUTS[layout], config, microbatches=microbatches)) == ""


@pytest.mark.parametrize(("clips", "layout"), in_turn(["first", "none"], list(LAYOUTS)))
def test_lanes_and_steps_without_clips_are_ordinary(clips: str, layout: str, oracle: Oracle) -> None:
    """Nothing hangs or changes where hardly a sample has a clip, or none has."""
    assert oracle.check(settings_of(LAYOUTS[layout], "silence heard", microbatches=4, pictures=clips)) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("microbatches", "config"), in_turn([4], list(CONFIGS)))
def test_clips_beside_pictures_in_three_grids(microbatches: int, config: str, oracle: Oracle) -> None:
    """One lane of clips overlaps three of pictures and two of text; either may be missing from a sample."""
    modules = {"vision": on(0, 2), "audio": on(2, 5, pp=2, tp=2, **SP), "language": on(4, 7, tp=2)}
    assert oracle.check(settings_of(modules, config, microbatches=microbatches)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("microbatches", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_whisper_and_radio_before_hybrid(microbatches: int, oracle: Oracle) -> None:
    """Two encoders of unlike families feed Mamba layers and experts over all ranks of the language model."""
    modules = {
        "vision": {**on(0, 1, tp=2), "plugin": "radio", "config": RADIO["patches joined"]},
        "audio": on(1, 2),
        "language": {**on(3, 6, tp=2, ep=4, **SP), "plugin": "hybrid", "config": HYBRID},
    }
    settings = settings_of(modules, "clips alone", microbatches=microbatches, eps=EVEN_EPS)
    assert oracle.check(oracle.clear(settings)) == ""

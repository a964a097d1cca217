"""Our own plugins before the conformance kit, by the command's own way: installed, with settings as words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import pytest

from mimo.trainer.runtime import check_plugin

SMALL = ("width=16", "heads=2", "layers=2", "intermediate=12")
ENCODERS: Mapping[str, Sequence[str]] = {
    "siglip": (*SMALL, "size=24", "patch=6", "projector.shuffle=2"),
    "whisper": (*SMALL, "mels=80", "stack=2"),
    "radio": (*SMALL, "patch=4", "max_patches=40", "projector.shuffle=2"),
    "vit": (*SMALL, "patch=4", "max_patches=40"),
    "clip": (*SMALL, "size=24", "patch=6", "feature_layer=-2"),
}
ORDINARY = ("siglip",)
FLOW = ("height=8", "width=12", "patch=4", "hidden=24", "layers=2", "heads=6", "intermediate=20", "steps=2")


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ORDINARY else [pytest.mark.soak]) for name in ENCODERS]
)
def test_our_encoders_keep_every_promise(name: str) -> None:
    """Nothing is broken, and nothing is left out: each brings all that a spec may have."""
    verdicts = list(check_plugin(name, ENCODERS[name]))
    assert [str(verdict) for verdict in verdicts if verdict.broken is not None] == []
    skipped = {verdict.check for verdict in verdicts if verdict.skipped is not None}
    assert skipped == ({"published weights"} if name == "vit" else set())


@pytest.mark.parametrize(
    ("name", "words", "first"),
    [("decoder", (), ("defaults", "limits", "build")), ("flow", FLOW, ("defaults", "limits", "measure"))],
)
def test_settings_of_ours_have_limits(name: str, words: Sequence[str], first: Sequence[str]) -> None:
    """What the command looks at before the kit, whose promises tests of each package show every time."""
    verdicts = list(islice(check_plugin(name, words), len(first)))
    assert [(verdict.check, verdict.broken, verdict.skipped) for verdict in verdicts] == [
        (check, None, None) for check in first
    ]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["decoder", "hybrid"])
def test_our_language_models_keep_every_promise_with_sizes_made_small(name: str) -> None:
    """Settings are looked at, and all of the model but what the defaults don't have."""
    verdicts = list(check_plugin(name, ()))
    assert [str(verdict) for verdict in verdicts if verdict.broken is not None] == []
    skipped = {verdict.check for verdict in verdicts if verdict.skipped is not None}
    assert skipped == {"expert ranks"} | ({"published weights"} if name == "hybrid" else set())


@pytest.mark.soak
def test_our_generator_keeps_every_promise() -> None:
    """Nothing is broken, and nothing is left out but published weights, which it has no table of."""
    verdicts = list(check_plugin("flow", FLOW))
    assert [str(verdict) for verdict in verdicts if verdict.broken is not None] == []
    assert [verdict.check for verdict in verdicts if verdict.skipped is not None] == ["published weights"]
    assert {"losses", "generation", "tensor ranks", "recompute"} <= {verdict.check for verdict in verdicts}

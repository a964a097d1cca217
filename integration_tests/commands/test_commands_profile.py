"""`mimo profile`: what a job's computations take on this machine, written down and used."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import here, succeed

SETTINGS = """
run = {name = "tiny", steps = 2, global_batch = 8, micro_batch = 2}
data = {plugin = "digits", held_out = 0.9, max_tokens = 32}

[tokenizer]
plugin = "word"
words = ["the", "digit", "is", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

[modules.vision]
plugin = "vit"
ranks = "0"
config = {patch = 4, channels = 1, width = 16, layers = 1, heads = 2, intermediate = 32}

[modules.language]
plugin = "decoder"
ranks = "0-1"
pp = 2
config = {hidden = 16, layers = 2, heads = 2, intermediate = 32}
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Return a file of settings in a folder of its own."""
    file = tmp_path / "tiny.toml"
    file.write_text(SETTINGS)
    return file


def stage(profile: Mapping[str, Any], module: str, number: int) -> Mapping[str, Any]:
    """Return one stage of a profile."""
    (found,) = (one for one in profile["stages"] if (one["module"], one["stage"]) == (module, number))
    return dict(found)


def test_what_is_measured_can_be_planned_with(settings: Path) -> None:
    """A profile of two processes names every stage and edge, fits its job, and no other; no run directory is left."""
    folder = settings.parent
    printed = succeed("profile", settings, "modules.vision.recompute=full", "--out", folder / "costs.json", cwd=folder)
    assert printed == f"{folder / 'costs.json'}: costs of 3 stages; set schedule.profile to it\n"
    assert sorted(path.name for path in folder.iterdir()) == ["costs.json", "tiny.toml"]

    profile = json.loads((folder / "costs.json").read_text())
    assert profile["version"] == 1
    assert {one["name"] for one in profile["edges"]} == {"vision->language", "language.0-1"}
    local, sent = sorted(profile["edges"], key=lambda one: float(one["bytes"]))
    assert (local["name"], local["bytes"], "bandwidth" in local) == ("vision->language", 0, False)
    assert sent["latency"] >= 0 < sent["bandwidth"]
    for module, number in (("vision", 0), ("language", 0), ("language", 1)):
        found = stage(profile, module, number)
        assert [one["samples"] for one in found["passes"]] == [1, 2]
        for one in found["passes"]:
            assert min(one[kind] for kind in ("forward", "backward", "input_gradient", "weight_gradient")) > 0
        assert found["activations"] > 0
        assert found["weight_inputs"] > 0
        assert (found["recomputed"] > 0) == (module == "vision")

    chosen = f"schedule.profile={folder / 'costs.json'}"
    shown = here("check", settings, "modules.vision.recompute=full", chosen, cwd=folder).printed
    assert "each rank reads all 8 samples of a step, " in shown
    assert re.search(rf"that is \S+ of the \S+ \w+ of a step, simulated by the profile {folder}/costs.json\n", shown)
    refused = here("check", settings, chosen, cwd=folder)
    assert refused.refused("schedule.profile", 'modules.vision.recompute is "none"', 'where it is "full"')


def test_what_cannot_be_written_is_refused_before_anything_runs(settings: Path) -> None:
    """Nobody measures for minutes to learn that the file can't be written."""
    for out, text in (
        (settings.parent / "none" / "costs.json", "a folder that exists"),
        (settings.parent, "a file that can be written"),
        (settings, "another file than the settings"),
    ):
        assert here("profile", settings, "--out", out, cwd=settings.parent).refused("--out", text)

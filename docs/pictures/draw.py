"""Draws the pictures of docs/schedules.md; run it as `python docs/pictures/draw.py [FOLDER]`.

Each is the page that `mimo.schedule.write_page` writes, photographed by a browser without a screen. The pages stay in
FOLDER, where one is given, to be looked at by hand.
"""  # noqa: INP001 -- a program, in no package

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

from mimo.hooks import discover
from mimo.schedule import SCHEDULES, Costs, Link, Seconds, StageCost, Timeline, check, simulate, write_page
from mimo.topology import Grid, Module, ModuleGraph, StageId

HERE = Path(__file__).parent
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
MICROBATCHES = 8
PICTURES = ("1f1b", "zero-bubble")
"""Schedules, each of which a picture is named after."""
SIZE = "1280,930"


def graph() -> ModuleGraph:
    """Return two encoders side by side before a language model of four stages: eight ranks, each with one stage."""
    vision = Module(grid=Grid(name="vision", ranks=(0, 1), dp=2), trains=(True,))
    audio = Module(grid=Grid(name="audio", ranks=(2, 3), pp=2), trains=(True, True))
    language = Module(grid=Grid(name="language", ranks=(4, 5, 6, 7), pp=4), trains=(True,) * 4)
    return ModuleGraph(modules=(vision, audio, language), arrows=(("vision", "language"), ("audio", "language")))


def costs(modules: ModuleGraph) -> Costs:
    """Return made-up costs: language stages take 30 ms a microbatch, those of encoders less, messages 1 ms."""
    forward = {"vision": 0.007, "audio": 0.005, "language": 0.010}
    mebibytes = {"vision": 300, "audio": 150, "language": 400}

    def cost(stage: StageId) -> StageCost:
        each = Seconds(each=forward[stage.module])
        kept = mebibytes[stage.module] * 2**20
        return StageCost(
            forward=each,
            input_gradient=each,
            weight_gradient=each,
            reduce=0.004,
            activations=kept,
            weight_inputs=kept // 2,
        )

    found = Costs(
        stages={stage: cost(stage) for stage in modules.stages},
        message_bytes={edge.name: 10**7 for edge in modules.edges},
        link=Link(latency=0, bandwidth=1e10),
    )
    return found.trained(modules)


def timeline(name: str) -> Timeline:
    """Return a simulated step by the schedule of this name."""
    modules = graph()
    schedule = discover(SCHEDULES).find(name, where="schedule.plugin")
    priced = costs(modules)
    plan = schedule.generate(modules, MICROBATCHES, schedule.config(), priced)
    check(plan, modules)
    return attrs.evolve(simulate(plan, modules, priced).timeline, name=f"{name}, simulated")


def main() -> None:
    """Write pages, and a picture of each."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in PICTURES:
            page = folder / f"{name}.html"
            write_page(page, [timeline(name)], title="Two encoders and a language model")
            options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=2000")
            size = (f"--window-size={SIZE}", "--force-device-scale-factor=1.25")
            shot = f"--screenshot={HERE / name}.png"
            subprocess.run([browser, *options, *size, shot, page.resolve().as_uri()], check=True, capture_output=True)  # noqa: S603 -- found above
            print(HERE / f"{name}.png")


if __name__ == "__main__":
    main()

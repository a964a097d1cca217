"""Source files of ours that run from a data file to the loss, from a gradient to the step, and into a checkpoint.

One process trains a small model on pictures for three steps and saves the last; Python reports each function that is
called. What belongs to what is cut by events that carry no name of ours: a picture is opened, a backward begins, an
optimizer of torch has stepped, the file `latest` is replaced. ``nox -s bench -- files_touched [--show]`` prints a
table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

LOSS, STEP, CHECKPOINT = "from data file to loss", "from gradient to step", "from tensor to checkpoint"
AIMS = {LOSS: 62, STEP: 42, CHECKPOINT: 59}
"""What it was before packages had rooms: `results/files_touched_before.json`."""
STEPS, SAMPLES = 3, 4
SETTINGS = f"""
[run]
name = "touched"
steps = {STEPS}
global_batch = {SAMPLES}
micro_batch = {SAMPLES}
directory = "run"
[data]
plugin = "jsonl"
path = "train.jsonl"
workers = 0
[checkpoint]
interval = {STEPS}
asynchronous = false
[modules.vision]
plugin = "vit"
ranks = "0"
config = {{ patch = 4, channels = 3, width = 16, layers = 1, heads = 2, intermediate = 16 }}
[modules.language]
plugin = "decoder"
ranks = "0"
config = {{ hidden = 16, layers = 1, heads = 2, intermediate = 16 }}
"""
OURS = ("/packages/", "/plugins/")


class Watch:
    """Which files run in which stretch of a step; the first step, which makes much for the first time, is left out."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = defaultdict(set)
        self._stretch = ""
        self._stepped = 0

    def call(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a function that is called; for `sys.setprofile`."""
        file = frame.f_code.co_filename
        if self._stretch and event == "call" and any(part in file for part in OURS):
            self.files[self._stretch].add(file)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Notice files that are opened and replaced; for `sys.addaudithook`."""
        if event == "open" and str(arguments[0]).endswith(".png") and self._stepped and not self._stretch:
            self._stretch = LOSS
        elif event == "os.rename" and Path(os.fsdecode(arguments[1])).name == "latest":
            self._stretch = ""

    def begins(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's backward, before which the loss is there."""

        def watched(*args: Any, **keys: Any) -> Any:
            if self._stretch == LOSS:
                self._stretch = STEP
            return backward(*args, **keys)

        return watched

    def stepped(self, optimizer: torch.optim.Optimizer, *_given: object) -> None:
        """Notice that an optimizer has stepped; for torch's hook."""
        del optimizer
        self._stepped += 1
        if self._stepped == 2 * STEPS:  # one for each module
            self._stretch = CHECKPOINT
        elif self._stepped % 2 == 0:
            self._stretch = ""


def write(folder: Path) -> Path:
    """Write settings and data, and return the settings' file."""
    from PIL import Image

    lines = []
    for number in range(STEPS * SAMPLES):
        Image.new("RGB", (8 + 4 * (number % 3), 8), (number, 2 * number, 3 * number)).save(folder / f"{number}.png")
        lines.append(json.dumps({"images": [f"{number}.png"], "text": f"<image> is {number}"}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "touched.toml"
    path.write_text(SETTINGS)
    return path


def train(folder: Path, watch: Watch) -> None:
    """Train in this process, as one that torchrun has started."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {**here, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = write(folder)
    os.chdir(folder)
    (command,) = entry_points(group="console_scripts", name="mimo")
    main = command.load()
    name = "_engine_run_backward"  # which all of torch's functions of a backward call
    backward = watch.begins(getattr(torch.autograd.graph, name))
    for module in (torch.autograd, torch.autograd.graph):
        setattr(module, name, backward)
    register_optimizer_step_post_hook(watch.stepped)
    sys.addaudithook(watch.audit)
    sys.argv[1:] = ["train", str(path)]
    threading.setprofile(watch.call)
    sys.setprofile(watch.call)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def main() -> None:
    """Train, count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the files too")
    given = parser.parse_args()
    watch, before = Watch(), Path.cwd()
    with TemporaryDirectory() as folder:
        train(Path(folder), watch)
        os.chdir(before)
    counts = {what: len(watch.files[what]) for what in AIMS}
    for what, count in counts.items():
        print(f"{count:4} {what}")
        for file in sorted(watch.files[what]) if given.show else ():
            print(f"     {file}")
    result = {
        "bench": "files_touched",
        "ratios": counts,
        "aims": {what: ["<=", most] for what, most in AIMS.items()},
        "runs": 1,
        "spread": {what: [count, count] for what, count in counts.items()},
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # what a run leaves in its process, which it expects to end, would be waited for


if __name__ == "__main__":
    main()

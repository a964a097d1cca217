"""Commands whose processes are fresh interpreters, as GPUs want them; here they compute on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from commands import start, write_lines
from PIL import Image

from mimo.testing import Ended, script

PROGRAM = """
import sys

if __name__ == "__main__":  # what follows is the launcher's alone: the interpreters that it starts know nothing of it
    import mimo.launch.runtime

    mimo.launch.runtime.start_method = lambda device: "spawn"
    for name in [name for name in sys.modules if name.startswith("mimo.trainer")]:
        del sys.modules[name]  # modules that were imported before have the other function
    from mimo.trainer.commands.main import run

    sys.exit(run(sys.argv[1:]))
"""
SETTINGS = """
[run]
name = "pictures"
steps = 2
global_batch = 4
[data]
plugin = "jsonl"
path = "train.jsonl"
evaluation_path = "train.jsonl"
[modules.vision]
plugin = "vit"
ranks = "0-1"
config = { patch = 4, channels = 1, width = 16, layers = 1, heads = 2, intermediate = 16 }
[modules.language]
plugin = "decoder"
ranks = "0-1"
config = { hidden = 16, layers = 1, heads = 2, intermediate = 16 }
"""


def spawned(folder: Path, *words: str) -> Ended:
    """Run ``mimo`` with these words in a folder, its processes spawned."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with start(*words, cwd=folder, call=partial(script, str(program))) as started:
        return started.wait()


def test_every_command_runs_in_fresh_interpreters(tmp_path: Path) -> None:
    """Train in two, evaluate and write in one: tasks, settings and prompts survive the way there as plain bytes."""
    (tmp_path / "pictures.toml").write_text(SETTINGS)
    write_lines(tmp_path / "train.jsonl", [{"images": ["grey.png"], "text": f"<image>grey {n}"} for n in range(4)])
    Image.new("L", (8, 8), 128).save(tmp_path / "grey.png")
    trained = spawned(tmp_path, "train", "pictures.toml", "run.directory=run")
    assert (trained.code, trained.err) == (0, "")
    (at_end,) = (line for line in trained.out.splitlines() if line.startswith("evaluation at step 2"))
    evaluated = spawned(tmp_path, "evaluate", "run")
    assert (evaluated.code, evaluated.out, evaluated.err) == (0, f"{at_end}\n", "")
    written = spawned(tmp_path, "generate", "run", "--image", "grey.png", "--max-tokens", "3")
    assert (written.code, written.err) == (0, "")
    assert written.out.endswith("\n")

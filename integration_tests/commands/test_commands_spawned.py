"""Commands whose processes are fresh interpreters, as GPUs want them; here they compute on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from commands import start
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
SHORT = (
    "examples/digits.toml",
    "modules.vision.ranks=0-1",
    "modules.language.ranks=0-1",
    "run.steps=2",
    "run.global_batch=8",
    "run.micro_batch=4",
    "data.held_out=0.01",
    "optimizer.lr_warmup_steps=0",
    "optimizer.lr_decay_steps=2",
)


def spawned(program: Path, *words: str | Path) -> Ended:
    """Run ``mimo`` with these words, its processes spawned."""
    program.write_text(PROGRAM)
    with start(*words, call=partial(script, str(program))) as started:
        return started.wait()


def test_every_command_runs_in_fresh_interpreters(tmp_path: Path) -> None:
    """Train in two, evaluate and write in one: tasks, settings and prompts survive the way there as plain bytes."""
    program, run = tmp_path / "program.py", tmp_path / "run"
    trained = spawned(program, "train", *SHORT, f"run.directory={run}")
    assert (trained.code, trained.err) == (0, "")
    (at_end,) = (line for line in trained.out.splitlines() if line.startswith("evaluation at step 2"))
    evaluated = spawned(program, "evaluate", run)
    assert (evaluated.code, evaluated.out, evaluated.err) == (0, f"{at_end}\n", "")
    digit = tmp_path / "digit.png"
    Image.new("L", (8, 8), 128).save(digit)
    written = spawned(program, "generate", run, "--image", digit, "--max-tokens", "3")
    assert (written.code, written.err, written.out.count("\n")) == (0, "", 1)

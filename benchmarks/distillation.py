"""What a teacher is worth: a student of half the layers taught by a reader of digits, beside the same one alone.

The teacher is `examples/digits.toml` with dropout, trained once. Student and steps are those of
`examples/digits-distil.toml`; alone it learns by labels only, and its divergence from the teacher is measured and not
learned from. The student trains on 359 images, a quarter of the teacher's. Both are compared on 359 that no training
sees, for each seed: the loss by labels, and the divergence, taught over alone; and by how much the loss is lower, in
nats a token.
``nox -s bench -- distillation [--seeds N]`` prints them, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _found import Found, report

from mimo.hooks import EvaluationInfo
from mimo.trainer import evaluate, read_settings, resolve, train

EXAMPLES = Path(__file__).parent.parent / "examples"
DROPS = (
    "modules.vision.config.drop_path=0.1",
    "modules.language.config.hidden_dropout=0.2",
    "modules.language.config.embedding_dropout=0.1",
)
"""What the teacher is trained with, as the example says."""
ALONE = ("modules.teacher.loss_weight=0", "modules.language.loss_weight=1")
UNSEEN = ("data.held_out=0.2",)
DIVERGENCE = "teacher.divergence"
ONE_PROCESS = ("modules.{name}.ranks=0", "modules.{name}.tp=1")


def run(name: str, directory: Path, *overrides: str) -> Path:
    """Train an example on one process, and return its run directory."""
    file = EXAMPLES / f"{name}.toml"
    where = [f"run.directory={directory}", "logging.console=false", "run.evaluation_interval=0"]
    layout = [text.format(name=module) for module in read_settings(file).modules for text in ONE_PROCESS]
    return train(resolve(read_settings(file, overrides=(*where, *layout, *overrides)))).directory


def compare(folder: Path, seeds: int) -> Iterator[tuple[EvaluationInfo, EvaluationInfo]]:
    """Yield what the student comes to with the teacher and alone, for each seed."""
    teacher = run("digits", folder / "teacher", *DROPS)
    for seed in range(seeds):
        more = (f"load.finetune={teacher}", f"run.seed={seed}")
        taught, alone = (
            evaluate(run("digits-distil", folder / f"{how}-{seed}", *more, *overrides), overrides=UNSEEN)
            for how, overrides in (("taught", ()), ("alone", ALONE))
        )
        for how, found in (("taught", taught), ("alone", alone)):
            print(f"seed {seed}, {how}: {show(found)}", flush=True)
        yield taught, alone


def show(found: EvaluationInfo) -> str:
    """Return what was found in words."""
    return f"loss {found.loss:.4f}, divergence {found.losses[DIVERGENCE]:.4f}, {found.exact_match:.1%} right"


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        pairs = list(compare(Path(folder), seeds))
    found = Found(
        ratios={
            "held-out loss, taught / alone": [taught.loss / alone.loss for taught, alone in pairs],
            "divergence from the teacher, taught / alone": [
                taught.losses[DIVERGENCE] / alone.losses[DIVERGENCE] for taught, alone in pairs
            ],
            "held-out loss, alone - taught": [alone.loss - taught.loss for taught, alone in pairs],
        },
        aims={
            "held-out loss, taught / alone": ("<", 1.0),
            "divergence from the teacher, taught / alone": ("<", 1.0),
        },
    )
    gaps = found.ratios["held-out loss, alone - taught"]
    better = sum(
        taught.loss < alone.loss and taught.losses[DIVERGENCE] < alone.losses[DIVERGENCE] for taught, alone in pairs
    )
    print(
        f"closer and lower in {better} of {seeds}; lower by {statistics.mean(gaps):.4f} ± {statistics.pstdev(gaps):.4f}"
    )
    report("distillation", [found], rounds=seeds)


if __name__ == "__main__":
    main()

"""`mimo train` from a checkpoint as a user types it: resuming, finetuning, and what is refused beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import TEXT, here, install, losses, mimo, places, succeed

FAILS_ONCE = """
import gc
import os
from mimo.checkpoint import Manifest
from mimo.hooks import hookimpl

@hookimpl
def mimo_step_end(run, info):
    if info.step == run.first_step:
        if any(one is run for one in gc.get_objects()):
            raise RuntimeError("garbage is looked for among what was there before")
        gc.unfreeze()  # frozen objects aren't among all
        if any(isinstance(one, Manifest) for one in gc.get_objects()):
            raise RuntimeError("a manifest is kept")
    if info.step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first attempt is not the last")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that reads text alone, and a run of it that has ended; runs go into other directories."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(9)))
    (folder / "text.toml").write_text(TEXT)
    assert succeed("train", "text.toml", cwd=folder).startswith("text: 4 steps with 1 processes, in run\n")
    return folder


def fail_and_restart(*words: str, cwd: Path, path: Path) -> str:
    """Run a worker of torchrun that fails and is begun again once, and return what both attempts printed."""
    environs = [places(1, TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT=count)[0] for count in "01"]
    first, second = (mimo(*words, cwd=cwd, path=path, environ=environ) for environ in environs)
    assert (first.code, second.code) == (3, 0), (first, second)
    return first.out + second.out


def test_a_run_resumes_in_another_directory_and_names_what_differs(folder: Path) -> None:
    """The losses are those of the run that it resumes."""
    words = ("checkpoint.load=run/checkpoints/step_00000002", "run.directory=further", "optimizer.weight_decay=0.0")
    first, second, *_ = succeed("train", "text.toml", *words, cwd=folder).splitlines()
    assert first == "text: step 3 to 4 with 1 processes, in further"
    assert second == (
        "text: step 2 loaded from run/checkpoints/step_00000002; optimizer of language.weight_decay 0.0 (was 0.01)"
    )
    assert losses(folder / "further")[0] == losses(folder / "run")[2]


def test_finetuning_begins_a_run_and_a_restart_resumes_it(folder: Path) -> None:
    """From its own checkpoint, not from the weights that it began with; neither manifest is kept while it trains."""
    path = install(folder / "site", "fails_at_three", FAILS_ONCE, "mimo.lifecycle")
    words = ("train", "text.toml", "--finetune", "run", "run.directory=tuned")
    printed = [
        line
        for line in fail_and_restart(*words, cwd=folder, path=path).splitlines()
        if "loaded" in line or "processes" in line
    ]
    assert printed == [
        "text: 4 steps with 1 processes, in tuned",
        "text: weights of step 4 loaded from run/checkpoints/step_00000004",
        "text: step 3 to 4 with 1 processes, in tuned",
        "text: step 2 loaded from tuned/checkpoints/step_00000002",
    ]
    assert losses(folder / "tuned")[0] < losses(folder / "run")[0]
    straight = succeed(*words[:-1], "run.directory=straight", cwd=folder)
    assert "weights of step 4 loaded" in straight
    assert losses(folder / "tuned") == losses(folder / "straight")


def test_a_restart_goes_back_to_where_its_job_went_back(folder: Path) -> None:
    """Not to the newest step in its directory, which was given up."""
    path = install(folder / "other_site", "fails_at_three", FAILS_ONCE, "mimo.lifecycle")
    succeed("train", "text.toml", "run.directory=back", cwd=folder)
    words = ("train", "text.toml", "run.directory=back", "checkpoint.load=back/checkpoints/step_00000002")
    printed = [
        line
        for line in fail_and_restart(*words, cwd=folder, path=path).splitlines()
        if "processes" in line or "loaded" in line
    ]
    assert (
        printed
        == [
            "text: step 3 to 4 with 1 processes, in back",
            "text: step 2 loaded from back/checkpoints/step_00000002",
        ]
        * 2
    )
    assert losses(folder / "back") == losses(folder / "run")


def test_a_damaged_metrics_file_keeps_no_run_from_resuming(folder: Path) -> None:
    """Fifty bytes of zeros, as after a power failure: the lines that they are in are left out, and saved beside."""
    run = folder / "damaged"
    words = ("train", "text.toml", "run.directory=damaged")
    succeed(*words, cwd=folder)
    (run / "loss.png").unlink()
    metrics = run / "metrics.jsonl"
    data = bytearray(metrics.read_bytes())
    data[20:70] = bytes(50)
    metrics.write_bytes(data)
    lost, *rest = bytes(data).splitlines(keepends=True)
    ended = mimo(*words, "run.steps=6", "checkpoint.load=latest", cwd=folder)
    assert ended.code == 0, ended
    assert ended.err == (
        "mimo: damaged/metrics.jsonl: expected a JSON object with a step in each line, got 1 line that can't be read. "
        "It is left out, and saved in damaged/metrics.unreadable.\n"
    )
    assert (run / "metrics.unreadable").read_bytes() == lost
    assert metrics.read_bytes().startswith(b"".join(rest[:3]))
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [2, 3, 4, 5, 6]
    assert (run / "loss.png").is_file()


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--finetune", "nowhere"], ["load.finetune: expected the folder of a checkpoint or of a run, got 'nowhere'."]),
        (
            ["--finetune", "run", "run.directory=run"],
            ["run.directory: expected a directory without a run in it, got 'run', which holds one."],
        ),
        (
            ["--finetune", "run", "checkpoint.load=run"],
            ["load.finetune: expected nothing beside checkpoint.load, which names another checkpoint to begin with"],
        ),
        (["--finetune", "run", "load.rng=false"], ["load.rng: expected true, as load.finetune takes weights alone"]),
        (["load.optimizer=false"], ["load.optimizer: expected nothing, as no checkpoint is loaded"]),
        (["load.optimiser=false"], ["load.optimiser: expected a known key, got an unknown one.", "'optimizer'?"]),
        (["checkpoint.load=run", "run.seed=3"], ["run.seed: expected 0, as in the run that", "or load.rng = false"]),
        (
            ["checkpoint.load=run", "run.global_batch=2"],
            ["run.global_batch: expected 4, as in the run that", "load.data = false"],
        ),
    ],
)
def test_what_cannot_resume_is_refused_before_it_starts(words: list[str], texts: list[str], folder: Path) -> None:
    """By the path of the setting, with what to do; no directory is made."""
    directory = [] if any(word.startswith("run.directory") for word in words) else ["run.directory=never"]
    assert here("train", "text.toml", *words, *directory, cwd=folder).refused(*texts)
    assert not (folder / "never").exists()

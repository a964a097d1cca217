"""The demo from training to writing: what `mimo train`, `evaluate`, `generate` and `checkpoint` leave and print."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from commands import SCRIPT, TORCHRUN, here, losses, mimo, read_metrics, succeed, write_lines
from house import ROOT
from PIL import Image
from tokenizers import Tokenizer, models

from mimo.data import SplitName
from mimo.schedule import Plan
from mimo.testing import Ended
from mimo_dataset_spoken_digits._clips import clips_of

STEPS = 20

DIGITS = (
    "examples/digits.toml",
    f"run.steps={STEPS}",
    "run.global_batch=32",
    "run.micro_batch=8",
    "run.evaluation_interval=10",
    "data.held_out=0.02",
    "optimizer.lr_warmup_steps=0",
    f"optimizer.lr_decay_steps={STEPS}",
    "checkpoint.interval=10",
    "logging.interval=1",
    "logging.edges=true",
)
"""A demo that is short enough: fewer, smaller steps and few held-out images; it learns to write a caption."""

OTHER_LAYOUT = (
    "modules.vision.ranks=0-2",
    "modules.language.ranks=1-2",
    "modules.language.pp=2",
    "modules.language.tp=1",
)
"""Three lanes of the encoder, two stages of the language model, overlapping."""

KEYS = {"step", "loss", "grad_norm", "lr", "label_tokens", "rows", "seconds", "tokens_per_second"}


def half_done(run: Path, directory: Path) -> Path:
    """Return a copy of a run that ended between its two checkpoints."""
    shutil.copytree(run, directory)
    shutil.rmtree(directory / "checkpoints" / f"step_{STEPS:08d}")
    (directory / "checkpoints" / "latest").unlink()
    return directory


@pytest.fixture(scope="module")
def digits_ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The run directory of a short demo on four processes, and how its command ended, executed as a shell does."""
    directory = tmp_path_factory.mktemp("digits") / "run"
    return directory, mimo("train", *DIGITS, f"run.directory={directory}", program=[SCRIPT])


@pytest.fixture(scope="module")
def digits_run(digits_ended: tuple[Path, Ended]) -> Path:
    """The run directory of a short demo on four processes, which must not be written into."""
    directory, ended = digits_ended
    assert ended.code == 0, ended.err
    return directory


@pytest.fixture(scope="module")
def digit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture of a handwritten digit."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it ships no types

    path = tmp_path_factory.mktemp("pictures") / "digit.png"
    Image.fromarray((load_digits().images[0] * (255 / 16)).astype("uint8")).save(path)
    return path


def test_training_shows_its_progress(digits_ended: tuple[Path, Ended]) -> None:
    """A line for each step with loss, tokens a second, time left and waits for data, then the evaluation; no stderr."""
    directory, ended = digits_ended
    assert (ended.code, ended.err) == (0, "")
    first, *lines, last = ended.out.splitlines()
    assert first == f"digits: {STEPS} steps with 4 processes, in {directory}"
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == STEPS
    for line in steps:
        counts = r"step [ \d]\d/20  loss  \d\.\d{4}  +[\d,]+ tokens/s"
        assert re.fullmatch(rf"{counts}  \d+:\d\d left  data \d+\.\d\d s", line), line
    assert re.fullmatch(r"evaluation at step 20: loss \d\.\d{4}, \d+\.\d% of 36 samples exactly right", lines[-1])
    assert re.fullmatch(rf"digits: done in \d+:\d\d, step {STEPS} is saved in {re.escape(str(directory))}", last)


def test_a_run_directory_holds_config_plan_metrics_pictures_and_checkpoints(digits_run: Path) -> None:
    """Each in the form that others read."""
    config = tomllib.loads((digits_run / "config.toml").read_text())
    assert config["run"]["steps"] == STEPS
    assert config["run"]["tf32"] is False, "what decides how products round belongs to the record"
    assert config["modules"]["language"]["tp"] == 2
    assert Plan.from_json((digits_run / "plan.json").read_text()).actors
    for name in ("loss.png", "captions.png"):
        with Image.open(digits_run / name) as picture:
            assert len(set(picture.convert("L").tobytes())) > 10, f"{name} is blank"
    for step in (10, STEPS):
        manifest = json.loads((digits_run / "checkpoints" / f"step_{step:08d}" / "manifest.json").read_text())
        assert manifest["body"]["config"]["run"]["tf32"] is False
        common = manifest["body"]["common"]
        assert {key: value for key, value in common.items() if key.startswith("progress.")} == {
            "progress.step": step,
            "progress.seed": 0,
            "progress.global_batch": 32,
            "progress.samples": 1761,
            "progress.data_begun": 0,
            "progress.schedule_begun": 0,
            "progress.order": {
                "version": 2,
                "parts": {"": {"samples": 1761, "shards": ""}},
                "changes": [{"step": 1, "weights": {"": 1761.0}}],
            },
        }
        assert {entry["module"] for entry in manifest["body"]["owned"].values()} == {"vision", "language"}
    assert not (digits_run / "error.txt").exists()


def test_metrics_hold_one_object_a_step_and_one_an_evaluation(digits_run: Path) -> None:
    """With norms and times of each module, and with what each rank sent on each edge; the loss falls."""
    steps, evaluations = read_metrics(digits_run)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert line.keys() >= KEYS
        assert line["rows"].keys() == line["norms"].keys() == line["module_seconds"].keys() == {"vision", "language"}
        assert line["label_tokens"] == line["label_weight"] == 32 * 5
        assert line["rows"]["vision"] == 32 * 16
        assert line["edges"] == {
            "vision->language": {
                "rows_sent": [256, 256, 0, 0],
                "bytes_sent": [256 * 64 * 4, 256 * 64 * 4, 0, 0],
                "rows_in_place": [0, 0, 0, 0],
                "gradient_rows_sent": [0, 0, 256, 256],
                "gradient_bytes_sent": [0, 0, 256 * 64 * 4, 256 * 64 * 4],
            }
        }
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert [line["step"] for line in evaluations] == [10, STEPS]
    for line in evaluations:
        assert line["evaluation"] is True
        assert line.keys() >= {"loss", "exact_match"}


@pytest.mark.soak
def test_resuming_in_the_same_layout_is_never_having_stopped(digits_run: Path, tmp_path: Path) -> None:
    """To the bit; lines of steps that are done again are replaced, and more steps than before may be asked for."""
    directory = half_done(digits_run, tmp_path / "run")
    words = (*DIGITS, f"run.directory={directory}", "checkpoint.load=latest", f"run.steps={STEPS + 1}")
    out = succeed("train", *words)
    assert out.startswith(f"digits: step 11 to {STEPS + 1} with 4 processes")
    assert losses(directory)[:STEPS] == losses(digits_run)
    assert [line["step"] for line in read_metrics(directory)[0]] == list(range(1, STEPS + 2))


def test_resuming_in_another_layout_follows_the_straight_run(digits_run: Path, tmp_path: Path) -> None:
    """Every loss within rounding, evaluation included; doing it once more finds nothing left to do."""
    directory = half_done(digits_run, tmp_path / "run")
    words = ("train", *DIGITS, *OTHER_LAYOUT, f"run.directory={directory}", "checkpoint.load=latest", "run.steps=14")
    assert "step 11 to 14 with 3 processes" in succeed(*words)
    assert losses(directory) == pytest.approx(losses(digits_run)[:14], rel=1e-5)
    assert succeed(*words).startswith("digits: nothing left to train, step 14 of 14 was loaded, with 3 processes")
    assert len(losses(directory)) == 14


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(digits_run: Path, tmp_path: Path) -> None:
    """The same word resumes all others; where there is no run at all, it is refused."""
    directory = tmp_path / "run"
    words = ("train", *DIGITS, f"run.directory={directory}", "checkpoint.load=latest", "run.steps=1")
    assert here(*words).refused("checkpoint.load: expected a run in", "to go on with, got none. Check run.directory")
    shutil.copytree(digits_run, directory, ignore=shutil.ignore_patterns("step_*", "latest"))
    assert succeed(*words).startswith("digits: no checkpoint yet, so all 1 steps with 4 processes")
    assert losses(directory) == losses(digits_run)[:1]


@pytest.mark.soak
def test_processes_of_torchrun_join(tmp_path: Path) -> None:
    """The run is the same as with processes of our own, to the bit."""
    words = ("train", *DIGITS, "modules.vision.ranks=0-1", "modules.language.ranks=0-1", "run.steps=2")
    succeed(*words, f"run.directory={tmp_path / 'ours'}")
    torchrun = (*TORCHRUN, "--nproc-per-node=2", SCRIPT)
    ended = mimo(*words, f"run.directory={tmp_path / 'torchrun'}", program=torchrun)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("digits: 2 steps with 2 processes")
    assert losses(tmp_path / "torchrun") == losses(tmp_path / "ours")


def test_a_run_directory_in_use_is_refused(digits_run: Path) -> None:
    """Nothing is overwritten, and the way out is named."""
    before = (digits_run / "metrics.jsonl").read_bytes()
    assert here("train", *DIGITS, f"run.directory={digits_run}").refused(
        "run.directory: expected a directory without a run in it, got", "Resume it with checkpoint.load=latest"
    )
    assert (digits_run / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_has_the_same_evaluation_in_one_process_and_in_any_layout(
    digits_run: Path, digits_ended: tuple[Path, Ended]
) -> None:
    """The same line as at the end of training."""
    at_end = next(line for line in digits_ended[1].out.splitlines() if line.startswith(f"evaluation at step {STEPS}"))
    assert succeed("evaluate", digits_run) == f"{at_end}\n"
    step = digits_run / "checkpoints" / f"step_{STEPS:08d}"
    layout = ("modules.vision.ranks=1", "modules.language.ranks=0-1", "modules.language.tp=2")
    assert succeed("evaluate", step, *layout) == f"{at_end}\n"


def test_a_checkpoint_writes_the_caption_of_a_picture(digits_run: Path, digit: Path) -> None:
    """From the picture alone, and on from a text with a placeholder for it."""
    written = succeed("generate", digits_run, "--image", digit)
    assert re.fullmatch(r"the digit is \w+\n", written)
    continued = succeed("generate", digits_run, "--image", digit, "--text", "<image> the digit", "--max-tokens", "2")
    assert f"the digit {continued}" == written


def test_tensor_ranks_write_what_one_process_does(digits_run: Path, digit: Path) -> None:
    """Drawn tokens too, by a seed; another one draws others."""
    words = ("generate", digits_run, "--image", digit, "--max-tokens", "20", "--temperature", "3", "--top-p", "0.99")
    drawn = succeed(*words, "--seed", "3")
    assert succeed(*words, "--seed", "3", "--tp", "2") == drawn
    assert succeed(*words, "--seed", "4") != drawn


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--image", "{digit}", "--text", "the digit"),
            "the prompt: expected one <image> in the text for each item of --image, got 0 for 1 item. Write it where",
        ),
        (("--text", "<image>"), "the prompt: expected one <image> in the text for each item of --image, got 1 for 0"),
        (("--audio", "{digit}"), "--audio: expected a model that reads it, got no encoder of 'audio'. This one takes"),
        (("--item", "{digit}"), "--item: expected MODALITY=FILE, got"),
        (("--text", "the cow"), "--text: expected text that the tokenizer can write, got the word 'cow' is not among"),
        (("--text", "the", "--tp", "3"), "modules.language.tp: expected a divisor of heads = 4, got 3."),
        (("--text", "the", "--tp", "0"), "--tp: expected 1 or more, got 0."),
        (("--text", "the", "--top-p", "0"), "--top-p: expected a number above 0, to 1, got 0.0."),
        (("--text", "the " * 300), "the prompt: expected at most data.max_tokens = "),
    ],
    ids=["no placeholder", "no image", "no encoder", "no file", "no word", "tp 3", "tp 0", "top-p 0", "too long"],
)
def test_a_prompt_that_does_not_fit_is_refused(
    digits_run: Path, digit: Path, words: tuple[str, ...], text: str
) -> None:
    """Before a process is started, by the option."""
    ended = here("generate", digits_run, *(word.format(digit=digit) for word in words))
    assert ended.refused(text), ended.err


def test_a_checkpoint_is_inspected_and_verified(digits_run: Path) -> None:
    """What it holds, and that every byte is as it was written."""
    shown = here("checkpoint", "inspect", digits_run).printed
    assert f"step {STEPS}" in shown
    assert re.search(r"^language\.embedding\.weight +F32 +15 x 64 +2", shown, re.MULTILINE)
    assert succeed("checkpoint", "verify", digits_run).endswith(": as they were written\n")


def test_the_generator_in_the_written_settings_can_be_run(tmp_path: Path) -> None:
    """What `mimo init` writes of one is a comment; without its marks it draws the digits of half of the samples."""
    head, mark, after = here("init").printed.partition("# [modules.drawer]\n")
    own, gap, rest = after.partition("\n\n")
    whole = head + "\n".join(line.removeprefix("# ") for line in (mark + own).splitlines()) + gap + rest
    (tmp_path / "new.toml").write_text(whole, encoding="utf-8")
    words = json.dumps(["draw", *tomllib.loads(whole)["tokenizer"]["words"]])
    shown = here("check", "new.toml", "data.task=both", f"tokenizer.words={words}", cwd=tmp_path).printed
    assert re.search(r"^language->drawer +all +[1-9]", shown, re.MULTILINE), shown


def test_the_written_settings_and_the_example_can_be_run(digits_run: Path, tmp_path: Path) -> None:
    """What `mimo init` writes, for the plugins that come along, is accepted from anywhere."""
    assert "mimo check FILE" in here("init").printed
    assert here("init", "new.toml", cwd=tmp_path).printed == ""
    shown = here("check", "new.toml", cwd=tmp_path).printed
    assert "ranks 0-1: F0" in shown
    assert list(tmp_path.iterdir()) == [tmp_path / "new.toml"]
    splits: tuple[SplitName, ...] = ("train", "evaluation")
    for split in splits:  # as if the clips of the spoken digits had been made
        (tmp_path / split).mkdir()
        sizes = {clip.file: (18_000, 22_050) for clip in clips_of(split)}
        (tmp_path / split / "index.json").write_text(json.dumps(sizes))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<|im_end|>", "<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_lines(tmp_path / "lines.jsonl", [{"text": "as if emoji had been drawn"}])
    made = {
        "digits-see-and-hear": (f"data.folder={tmp_path}",),
        "digits-distil": (f"load.finetune={digits_run}",),
        "emoji": (
            f"tokenizer.path={tmp_path / 'tokenizer.json'}",
            *(f"data.{key}={tmp_path / 'lines.jsonl'}" for key in ("path", "evaluation_path")),
        ),
    }
    for file in (ROOT / "examples").glob("*.toml"):
        assert "F0 " in here("check", file.relative_to(ROOT), *made.get(file.stem, ())).printed


def test_all_plugins_are_listed() -> None:
    """Name, distribution and version; the built-in ones like any other."""
    lines = [line.split() for line in here("plugins").printed.splitlines() if line.startswith("mimo.")]
    for name, distribution in {
        "vit": "mimo-encoder-vision",
        "whisper": "mimo-encoder-audio",
        "decoder": "mimo-model",
        "adamw": "mimo-optimizer",
        "1f1b": "mimo-schedule",
        "digits": "mimo-dataset-digits",
        "jsonl": "mimo-data",
        "console": "mimo-trainer",
        "pictures": "mimo-logger-pictures",
        "tensorboard": "mimo-logger-tensorboard",
    }.items():
        assert any(line[1] == name and distribution in line and "0.1.0" in line for line in lines), name

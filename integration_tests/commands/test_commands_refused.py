"""What is wrong before launch: refused by the path of the setting, with code 2, before anything is started."""

from __future__ import annotations

import os
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from commands import TEXT, here, install, mimo
from house import ROOT

EXAMPLE = "examples/digits.toml"


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (
            ["modules.language.config.hiden=64"],
            ["modules.language.config.hiden: expected a known key, got an unknown one. Did you mean 'hidden'?"],
        ),
        (["steps=3"], ["steps: expected a key with its section, got one without. Write run.steps=3."]),
        (["run.steps"], ["'run.steps': expected key=value, got something else. For example: run.steps=50."]),
        (["run.steps=many"], ["run.steps: expected a whole number, got 'many'."]),
        (
            ["modules.vision.plugin=vitt"],
            ["modules.vision.plugin: expected an installed encoder (", "vit", "got 'vitt'. Did you mean \"vit\"?"],
        ),
        (
            ["optimizer.plugin=sgd"],
            ["optimizer.plugin: expected an installed optimizer (adamw", "got 'sgd'. It may be misspelled or not"],
        ),
        (
            ["modules.vision.dp=3"],
            ["modules.vision: expected sizes that multiply to its 2 ranks, got pp 1 x dp 3 x cp 1 x tp 1 = 3."],
        ),
        (
            ['optimizer.patterns."*.nrom.*".lr=1'],
            [
                'optimizer.patterns."*.nrom.*": expected a pattern that matches trained parameters, got one that',
                ".norm.",
            ],
        ),
        (
            ["modules.language.ranks=0-2"],
            ["modules.language: expected sizes that multiply to its 3 ranks, got pp 1 x dp 1 x cp 1 x tp 2 = 2."],
        ),
        (["modules.language.ranks=[]"], ["modules.language.ranks: expected", "got"]),
        (["modules.audio.plugin=vit"], ["modules.audio.ranks: expected", "got nothing. Set it."]),
        (
            ["modules.language.tp=3", "modules.language.ranks=2-4"],
            ["modules.language.tp: expected a divisor of heads = 4, got 3."],
        ),
        (
            ["modules.language.pp=3", "modules.language.tp=1", "modules.language.ranks=1-3"],
            ["modules.language.pp: expected at most its layers = 2, got 3."],
        ),
        (
            ["modules.language.config.experts=3", "modules.language.ep=2"],
            ["modules.language.ep: expected a divisor of experts = 3, got 2. Set it to 1 or 3."],
        ),
        (["modules.vision.ep=2"], ["modules.vision.ep: expected 1, since encoder 'vit' has no experts, got 2."]),
        (
            ["modules.language.etp=3"],
            ["modules.language: expected ep x etp that divides the 2 ranks of a stage", "got ep 1 x etp 3 = 3."],
        ),
        (["run.global_batch=30"], ["run.global_batch: expected a multiple of", "got 30"]),
        (["data.plugin=jsonl", "data.held_out=0.1"], ["data.held_out: expected a known key"]),
        (["run.steps=5"], ["optimizer.lr_warmup_steps: expected fewer than run.steps = 5"]),
        (
            ["checkpoint.load=best"],
            ['checkpoint.load: expected "none", "latest" or the folder of a checkpoint, got \'best\'.'],
        ),
        (["run.directory=LICENSE"], ["run.directory: expected a folder, got 'LICENSE', which is a file."]),
        (["run.world=3"], ["run.world: expected 4 or more, as modules.language.ranks names rank 3, got 3."]),
    ],
    ids=lambda value: value[0].partition(":")[0] if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_refused(words: list[str], texts: list[str]) -> None:
    """In one line, with what was expected and what was got."""
    ended = here("train", EXAMPLE, *words)
    assert ended.refused(*texts), ended


DECIDED = {
    "load": (
        ["checkpoint.load=lates"],
        'checkpoint.load: expected "none", "latest" or the folder of a checkpoint, got',
    ),
    "latest": (["checkpoint.load=latest", "run.directory={free}"], "checkpoint.load: expected a run in "),
    "finetune": (["load.finetune=/nonexistent"], "load.finetune: expected the folder of a checkpoint or of a run, got"),
    "file": (["run.directory=LICENSE"], "run.directory: expected a folder, got 'LICENSE', which is a file."),
    "below a file": (
        ["run.directory=LICENSE/x/y"],
        "run.directory: expected a folder, got 'LICENSE/x/y', but 'LICENSE' is a",
    ),
    "fifo": (["run.directory={fifo}"], "run.directory: expected a folder, got '{fifo}', which is a fifo."),
    "link": (["run.directory={link}"], "run.directory: expected a folder, got '{link}', which is a link to nothing."),
    "proc": (
        ["run.directory=/proc/x"],
        "run.directory: expected a folder that can be made and written, got '/proc/x': No",
    ),
    "sys": (
        ["run.directory=/proc/sys"],
        "run.directory: expected a folder that can be made and written, got '/proc/sys': ",
    ),
    "long": (["run.directory={long}"], "run.directory: expected a folder that can be made and written, got 'xxxxx"),
    "null": (['run.directory="a\\u0000b"'], "run.directory: expected text without control characters"),
    "run": (
        ["run.directory={run}"],
        "run.directory: expected a directory without a run in it, got '{run}', which holds one.",
    ),
    "timeout": (["run.timeout=1e10"], "run.timeout: expected at most 1000000000, got 10000000000.0."),
    "timeout without end": (["run.timeout=1e300"], "run.timeout: expected a number of at most 1e+30, got 1e+300."),
    "gpus": (
        ["run.device=cuda"],
        "run.device: expected a GPU for each of the 4 processes on this machine, got 0 that it can",
    ),
}
"""What both train and check refuse: words, and how the refusal begins."""


@pytest.mark.parametrize(("words", "begins"), DECIDED.values(), ids=DECIDED)
def test_check_refuses_what_train_does(
    words: list[str], begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same words; and what can't be made is refused before anything is launched."""
    names = {name: str(tmp_path / name) for name in ("free", "fifo", "link", "run")} | {"long": "x" * 300}
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()

    def never(*_args: object, **_named: object) -> None:
        pytest.fail("it was launched")

    monkeypatch.setattr(BaseProcess, "start", never)
    trained, checked = (
        here(command, EXAMPLE, *(word.format(**names) for word in words)) for command in ("train", "check")
    )
    assert trained.refused(begins.format(**names)), trained
    assert checked == trained


def test_a_broken_lifecycle_plugin_is_refused_by_check_and_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by every rank, once all have started."""
    monkeypatch.syspath_prepend(install(tmp_path, "broken_ear", "import not_installed_here\n", "mimo.lifecycle"))
    for command in ("train", "check"):
        ended = here(command, EXAMPLE, f"run.directory={tmp_path / 'run'}")
        assert ended.refused("plugin 'broken_ear' of broken_ear 1.0", "No module named 'not_installed_here'"), ended
    assert not (tmp_path / "run").exists()


def test_check_leaves_to_another_machine_what_only_that_one_can_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names what it leaves out; settings that are wrong by themselves are still refused."""
    monkeypatch.syspath_prepend(install(tmp_path, "broken_ear", "import not_installed_here\n", "mimo.lifecycle"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = (
        "run.directory=/proc/x",
        "checkpoint.load=/there/step_00000007",
        "run.device=cuda",
        "logging.tensorboard=true",
    )
    printed = here("check", EXAMPLE, *words, "--elsewhere").printed
    assert "ranks 2-3: " in printed
    assert printed.splitlines()[-1] == (
        "not looked at, as only the machine that trains can answer it: run.directory, checkpoint.load and "
        "load.finetune, GPUs, the processes that torchrun or Slurm starts, lifecycle plugins, and logging.tensorboard"
    )
    assert here("check", EXAMPLE, *words, "run.world=3", "--elsewhere").refused("run.world: expected 4 or more")


def test_check_shows_a_plan_where_the_data_are_not(tmp_path: Path) -> None:
    """The data lie on the machine that trains; traffic can't be computed without them."""
    (tmp_path / "text.toml").write_text(TEXT)
    refused = here("check", "text.toml", cwd=tmp_path)
    assert refused.refused("data.path: expected an existing jsonl file, got 'train.jsonl'."), refused
    printed = here("check", "text.toml", "--elsewhere", cwd=tmp_path).printed
    assert "ranks 0: F0 B0" in printed
    assert "jsonl, none samples to train on, none held out" in printed
    assert printed.rstrip().endswith("; the data, which are not here, so that samples of text alone stand for them")


def test_check_makes_nothing(tmp_path: Path) -> None:
    """A run directory that could be made is not."""
    assert here("check", EXAMPLE, f"run.directory={tmp_path / 'a' / 'b'}").printed
    assert list(tmp_path.iterdir()) == []


def test_a_missing_dataset_file_is_refused(tmp_path: Path) -> None:
    """Before anybody waits for a run to begin."""
    (tmp_path / "text.toml").write_text(
        '[run]\nname = "text"\nsteps = 1\nglobal_batch = 1\n[data]\nplugin = "jsonl"\npath = "train.jsonl"\n'
        '[modules.language]\nplugin = "decoder"\nranks = "0"\n'
    )
    ended = here("train", "text.toml", cwd=tmp_path)
    assert ended.refused("data.path: expected an existing jsonl file, got 'train.jsonl'. Check the path;"), ended
    assert [path.name for path in tmp_path.iterdir()] == ["text.toml"]


def test_a_plugin_that_fails_to_import_is_named_with_its_reason(tmp_path: Path) -> None:
    """The message names plugin, version and reason; `mimo plugins` shows it as a row."""
    path = install(tmp_path, "broken_eye", "import not_installed_here\n", "mimo.encoders")
    ended = mimo("train", EXAMPLE, "modules.vision.plugin=broken_eye", path=path)
    assert ended.code == 2
    assert ended.err.startswith("mimo: modules.vision.plugin: plugin 'broken_eye' of broken_eye 1.0")
    assert "No module named 'not_installed_here'" in ended.err
    assert "Traceback" not in ended.err
    listed = mimo("plugins", path=path)
    assert "not_installed_here" in listed.out
    assert "decoder" in listed.out


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        (["train"], 2, ["FILE requires an argument"]),
        (["train", "."], 2, ["mimo: .: expected a readable file, got a folder. Write one with: mimo init FILE."]),
        (["train", "no.toml"], 2, ["no.toml: expected a readable file, got nothing: there is no such file."]),
        (["check", "LICENSE"], 2, ["mimo: LICENSE: expected a TOML file, got one that is broken:"]),
        (["check", "pyproject.toml"], 2, ["mimo: tool: expected a known key"]),
        (["trian", EXAMPLE], 2, ['Did you mean "train"?']),
        (["train", EXAMPLE, "--run.steps=3"], 2, ["settings are written as key=value, without dashes: run.steps=3"]),
        (["generate", "runs"], 2, ["mimo: --text: expected a prompt, got nothing."]),
    ],
)
def test_a_wrong_command_line_is_refused_plainly(words: list[str], code: int, texts: list[str]) -> None:
    """Without a traceback."""
    ended = here(*words)
    assert ended.code == code, ended
    for text in texts:
        assert text in ended.err
    assert "Traceback" not in ended.err


def test_help_shows_what_is_typed() -> None:
    """Placeholders and defaults of the prompt included."""
    ended = mimo("generate", "--help")
    assert "with a placeholder such as <image> for each image" in ended.out
    assert (ROOT / EXAMPLE).is_file()

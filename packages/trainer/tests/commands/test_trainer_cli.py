"""The command: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mimo.trainer.commands.main import run

SETTINGS = """
[run]
name = "text"
steps = 2
global_batch = 2
directory = "{directory}"
[data]
plugin = "jsonl"
path = "{directory}/train.jsonl"
[modules.language]
plugin = "decoder"
ranks = "0-3"
tp = 2
config = {{ hidden = 16, layers = 1, heads = 2, intermediate = 16 }}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A settings file of a model that reads text alone, over two lanes of two tensor ranks."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 4)
    path = tmp_path / "text.toml"
    path.write_text(SETTINGS.format(directory=tmp_path))
    return str(path)


def test_help_and_version_answer_without_torch() -> None:
    """Importing torch takes seconds; the command's help must not wait for it."""
    program = (
        "import sys; from mimo.trainer.commands.main import run; code = run(['--help']) or run(['--version'])\n"
        "heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    ended = subprocess.run(  # noqa: S603 -- the test's own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    for word in ("train", "check", "simulate", "evaluate", "generate", "plugins", "models", "init", "checkpoint"):
        assert word in ended.stdout


def test_check_shows_grids_memory_and_plan(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank's place, and what each actor does in a step."""
    assert run(["check", file]) == 0
    out = capsys.readouterr().out
    assert "2 samples = 1 microbatches x 1 x 2 lanes" in out
    assert "3     pp 0 dp 1 cp 0 tp 1  about" in out
    assert "ranks 0-3: F0 B0 R" in out


def test_check_says_what_is_compiled(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How many layers with what, and what inside of them isn't; nothing if none is."""
    experts = ["modules.language.config.experts=2", "modules.language.config.layers=3"]
    assert run(["check", file, "run.compile=true", *experts]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "compiled language: 3 Layer by inductor; Moe in them stays eager, as which rows go where is known" in out
    assert run(["check", file]) == 0
    assert "compiled" not in capsys.readouterr().out


def test_check_shows_the_expert_view_of_modules_with_experts(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the others it is left out."""
    assert run(["check", file, "modules.language.config.experts=4", "modules.language.ep=2"]) == 0
    out = capsys.readouterr().out
    assert "ranks  pp  dp  cp  tp  ep  etp  frozen" in out
    assert "0-3    1   2   1   2   2   1    -" in out
    assert "3     pp 0 dp 1 cp 0 tp 1 ep 1 etp 0  about" in out
    assert run(["check", file]) == 0
    assert not {"ep", "etp"} & set(capsys.readouterr().out.split())


def test_check_shows_what_ranks_send_on_each_edge(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Six rows of 16 elements go to the next stage's rank, and their gradients back; there is no boundary."""
    pipeline = ("modules.language.pp=2", "modules.language.config.layers=2", "run.micro_batch=2")
    assert run(["check", file, *pipeline]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("language.0-1")]
    assert rows == [
        ["language.0-1", "0", "12", "768", "0", "0", "0"],
        ["language.0-1", "1", "12", "768", "0", "0", "0"],
        ["language.0-1", "2", "0", "0", "0", "12", "768"],
        ["language.0-1", "3", "0", "0", "0", "12", "768"],
        ["language.0-1", "all", "24", "1,536", "0", "24", "1,536"],
    ]
    assert run(["check", file]) == 0
    assert "gradient rows" not in capsys.readouterr().out


def test_check_shows_the_rest_where_data_cannot_be_read(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Grids, memory and plan need no data; the unreadable file and line are named after them."""
    (tmp_path / "train.jsonl").write_text('{"text": 5}\n' * 4)
    assert run(["check", file, "modules.language.pp=2", "modules.language.config.layers=2"]) == 3
    printed = capsys.readouterr()
    assert "3     pp 1 dp 0 cp 0 tp 1  about" in printed.out
    assert "ranks 0-1: F0 s0 F1 s1 r0 B0" in printed.out
    assert re.search(r"train\.jsonl:\d: expected", printed.err)


def test_check_estimates_what_a_rank_holds_of_a_split_module(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen bytes for a number that trains, four for a frozen one; two tensor ranks hold nearly half each."""

    def first_rank(*overrides: str) -> float:
        assert run(["check", file, *overrides]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("0 "))
        return float(line.partition("about ")[2].split()[0])

    wide = ("modules.language.config.hidden=512", "modules.language.config.layers=2")
    whole = first_rank("modules.language.ranks=0", "modules.language.tp=1", *wide)
    assert 0.45 < first_rank(*wide) / whole < 0.55


def test_refusals_are_printed_once_on_stderr_with_code_2(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Plainly, without a traceback."""
    assert run(["train", file, "run.stepz=3"]) == 2
    assert capsys.readouterr() == (
        "",
        "mimo: run.stepz: expected a known key, got an unknown one. Did you mean 'steps'?\n",
    )
    assert run(["train", file, "modules.language.tp=3", "modules.language.ranks=0-2"]) == 2
    assert capsys.readouterr().err.startswith("mimo: modules.language.tp: expected a divisor of heads = 2, got 3.")


def test_a_run_directory_in_use_is_refused(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is launched."""
    (tmp_path / "metrics.jsonl").touch()
    assert run(["train", file]) == 2
    assert "run.directory: expected a directory without a run in it" in capsys.readouterr().err


def test_a_world_other_than_torchruns_is_refused(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where this process was started as one of a number of processes that the modules don't have."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["train", file]) == 2
    assert "run.world: expected 2, the number of processes that were started, got 4." in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train"], ["fly"], ["check", "a.toml", "--loud"]])
def test_a_wrong_command_line_ends_with_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the parser's own words."""
    assert run(words) == 2
    assert "Error" in "".join(capsys.readouterr())


def test_ctrl_c_before_launch_ends_with_130(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """While the data is opened, for example."""

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mimo.trainer.config.toml.read_settings", interrupted)
    assert run(["check", file]) == 130


def test_a_bug_shows_its_traceback_and_ends_with_3(
    monkeypatch: pytest.MonkeyPatch, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the user cannot act on is shown in full."""

    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("mimo.trainer.config.toml.read_settings", broken)
    assert run(["check", file]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_place_for_temporary_files_is_missed_by_its_name(file: str) -> None:
    """As where no file may grow, or no disk has room; torch needs one as it is imported."""
    words = shlex.join([sys.executable, "-m", "mimo.trainer", "check", file])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
    ended = subprocess.run(  # noqa: S603 -- the test's own command
        ["/bin/sh", "-c", f"ulimit -f 0; exec {words}"], capture_output=True, text=True, check=False, env=environ
    )
    wanted = (
        r"mimo: TMPDIR: expected a directory in which temporary files can be written, got No usable .*\. Free room on "
        r"the disk, raise the limit of file sizes \(`ulimit -f`\), or set TMPDIR to a directory of another disk\.\n"
    )
    assert ended.returncode == 3
    assert re.fullmatch(wanted, ended.stderr)


def test_plugins_are_listed_with_their_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    """Built-ins are listed like third-party plugins."""
    assert run(["plugins"]) == 0
    lines = {tuple(line.split()[:2]): line for line in capsys.readouterr().out.splitlines()}
    assert "mimo-model" in lines["mimo.language_models", "decoder"]
    assert "mimo_evaluated" in lines["mimo.lifecycle", "metrics"]


def test_init_writes_a_new_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints the same text without one."""
    path = tmp_path / "new.toml"
    assert run(["init", str(path)]) == 0
    assert run(["init"]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert run(["init", str(path)]) == 2
    assert "expected a new file, got one that exists" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its place is named."""
    assert run(["evaluate", str(tmp_path / "none")]) == 2
    assert f"mimo: {tmp_path / 'none'}: expected" in capsys.readouterr().err


def test_generation_needs_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image or a text."""
    assert run(["generate", str(tmp_path)]) == 2
    assert "--text: expected a prompt, got nothing." in capsys.readouterr().err


def test_an_image_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model is loaded."""
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert run(["generate", str(tmp_path), "--image", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err.startswith(
        f"mimo: --image: expected an image that can be read, got {str(tmp_path / 'a.png')!r}: it is no image"
    )


def test_words_with_escape_sequences_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever would name them, ours or the parser of the command line, would send them to the terminal."""
    assert run(["check", "\x1b[2Jrun.toml"]) == 2
    assert run(["\x1b[31mcheck"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mimo: word 2: expected text without control characters, got '\\x1b' in '\\x1b[2Jrun.toml'.")
    assert "\x1b" not in err


def test_models_lists_families_and_tries_one(capsys: pytest.CaptureFixture[str]) -> None:
    """In tables or as JSON; the exit code of a trial says whether it can be trained."""
    assert run(["models"]) == 0
    shown = capsys.readouterr().out
    axes = "dp tp sequence_parallel cp pp ep etp"
    assert re.search(rf"^qwen3_moe +decoder +language +{axes} +transformers 5\.", shown, re.MULTILINE)
    assert run(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"model_type", "plugin", "part", "first", "named", "axes", "tested"} == set(listed[0])
    assert run(["models", "mamba2"]) == 0
    shown = capsys.readouterr().out
    assert "mamba2: hybrid, language; recorded as in the library: transformers 5." in shown
    assert re.search(r"^ep +no +expected 1, since language model 'hybrid' has no experts, got 2", shown, re.MULTILINE)
    assert run(["models", "qwen3_moee"]) == 2
    assert "Did you mean 'qwen3_moe'?" in capsys.readouterr().err

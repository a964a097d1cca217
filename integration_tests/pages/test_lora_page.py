"""The commands that docs/lora.md shows, run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import here, mimo, succeed
from house import ROOT
from published import TOKENS, adapted_logits_of, llama, logits_of

from mimo.checkpoint import latest, read_manifest
from mimo.testing import Ended

PAGE = (ROOT / "docs" / "lora.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
_, LORA, ALONE = (block for language, block in BLOCKS if language == "toml")
RUN = """
[run]
name = "tuned"
steps = 1
global_batch = 2
evaluation_interval = 0
directory = "runs/tuned"
[data]
plugin = "jsonl"
path = "train.jsonl"
[tokenizer]
plugin = "word"
words = ["a", "b"]
[optimizer]
lr = 0.1
"""


def run_one(line: str, folder: Path) -> Ended:
    """Run a command of the page, one that resumes for a step more, one that trains in a process of its own."""
    words = shlex.split(line, comments=True)
    assert words[0] == "mimo"
    more = ["run.steps=2"] if "checkpoint.load=latest" in words else []
    return (mimo if words[1] == "train" else here)(*words[1:], *more, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands of the page have been run in order, beside a small published model."""
    found = tmp_path_factory.mktemp("page") / "here"
    llama(found / "llama")
    (found / "llama" / "tokenizer_config.json").write_text("{}")
    (found / "train.jsonl").write_text('{"text": "a b b a"}\n' * 2)
    tables = here("checkpoint", "import-hf", "llama", "--out", "llama-ours", cwd=found).printed
    settings = RUN + tables.replace("[modules.language]", '[modules.language]\nranks = "0"')
    (found / "my.toml").write_text(settings + LORA.partition("[modules.vision")[0] + ALONE)
    ended = {line: run_one(line, found) for line in COMMANDS}
    assert len(ended) == len(COMMANDS) == 5
    assert {line: one for line, one in ended.items() if one.code or one.err} == {}
    return found


def test_the_page_of_lora_shows_commands_that_work(folder: Path) -> None:
    """Merged, exported and as an adapter, the run is the same model, which is not the published one any more."""
    exported = logits_of(folder / "exported", TOKENS)
    adapter = adapted_logits_of(folder / "llama", folder / "adapter", TOKENS)
    assert (adapter - exported).norm() <= 1e-5 * exported.norm()
    assert (logits_of(folder / "llama", TOKENS) - exported).norm() > 1e-3 * exported.norm()
    step = latest(folder / "merged")
    assert step is not None
    assert read_manifest(step).step == 2


def test_a_run_knows_the_published_folder_it_began_with(folder: Path) -> None:
    """The same holds after a resume: files of the tokenizer come along by themselves, and the run generates."""
    assert (folder / "exported" / "tokenizer_config.json").is_file()
    printed = [
        succeed("generate", one, "--text", "a b", "--max-tokens", "4", cwd=folder) for one in ("runs/tuned", "merged")
    ]
    assert printed[0] == printed[1]


def test_a_run_and_what_it_began_with_may_move_together(folder: Path) -> None:
    """Where the absolute path leads nowhere, the relative one does."""
    moved = folder.with_name("moved")
    folder.rename(moved)
    try:
        ended = here("checkpoint", "merge", "runs/tuned", "again", cwd=moved)
        (moved / "llama-ours").rename(moved / "hidden")
        gone = here("checkpoint", "merge", "runs/tuned", "none", cwd=moved)
        (moved / "hidden").rename(moved / "llama-ours")
    finally:
        moved.rename(folder)
    assert ended.printed.strip() == "again/step_00000002"
    assert gone.err.startswith(f"mimo: {folder / 'llama-ours' / 'step_00000000'}: expected the checkpoint with the ")


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (("--beside", "llama"), "--beside: expected nothing, as --adapter copies no files, got 'llama'."),
        (("--shard-bytes", "9000"), "--shard-bytes: expected nothing, as --adapter writes one file, got 9000."),
    ],
)
def test_what_an_adapter_does_not_do_is_refused(word: tuple[str, str], text: str, folder: Path) -> None:
    """It takes no files along, and is never cut."""
    ended = here("checkpoint", "export-hf", "runs/tuned", "other", "--adapter", *word, cwd=folder)
    assert (ended.code, ended.err) == (2, f"mimo: {text}\n")

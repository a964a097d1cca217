"""The page of conversations: its samples are shown as it says, and trained equally in any layout."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from commands import here, losses, mimo, read_metrics
from house import ROOT
from PIL import Image

TEXT = (ROOT / "docs" / "conversations.md").read_text(encoding="utf-8")
APART = ("modules.vision.ranks=0-2", "modules.language.ranks=1-4", "modules.language.pp=2", "modules.language.cp=2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files."""
    for name, kind in (("train.jsonl", "json"), ("chat.toml", "toml")):
        block, *_ = re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block)
    Image.radial_gradient("L").convert("RGB").resize((20, 30)).save(tmp_path / "zebra.png")
    return tmp_path


def test_the_page_shows_what_the_command_prints(folder: Path) -> None:
    """Of the sample that it asks for; the other one has a picture."""
    (command,) = re.findall(r"^mimo (data show .*)$", TEXT, re.MULTILINE)
    (shown,) = re.findall(r"^```\n(sample.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    ended = here(*command.split(), cwd=folder)
    assert [line.rstrip() for line in ended.out.splitlines()] == shown.splitlines()
    ended = here("data", "show", "chat.toml", cwd=folder)
    assert re.search(r"^56-67 +image +30 x 20: 12 rows *$", ended.out, re.MULTILINE)


def test_conversations_are_learnt_equally_in_any_layout(folder: Path) -> None:
    """What is learnt counts, not what is read; losses agree with those of one process."""
    for name, words in (("chat", ()), ("apart", APART)):
        ended = mimo("train", "chat.toml", f"run.directory=runs/{name}", *words, cwd=folder)
        assert ended.code == 0, ended.err
    assert losses(folder / "runs" / "apart") == pytest.approx(losses(folder / "runs" / "chat"), rel=1e-6)
    steps, _ = read_metrics(folder / "runs" / "apart")
    assert [(step["label_tokens"], step["label_weight"]) for step in steps] == [(18 + 23, 18 + 23)] * 4
    (line,) = re.findall(r"^mimo (generate .*--message.*)$", TEXT, re.MULTILINE)
    ended = mimo(*shlex.split(line), "--max-tokens", "3", cwd=folder)
    assert (ended.code, ended.err) == (0, ""), ended
    # Without --message the text says it all.
    prompt = "<|im_start|>user\n<image>What is it?<|im_end|>\n<|im_start|>assistant\n"
    asked = ("generate", "runs/chat", "--image", "zebra.png", "--max-tokens", "3")
    assert mimo(*asked, "--text", prompt, cwd=folder).printed == ended.out
    assert here(*asked, "--text", "a", "--message", "b", cwd=folder).refused(
        "--message: expected either --text or --message, got both"
    )
    refused = here(*asked, "--message", "a", "b", cwd=folder)
    assert "--message: expected turns that the chat template takes, got 2 turns, of which the user" in refused.err
    check_prompts(folder, prompt, ended.out)
    (line,) = re.findall(r"^mimo (evaluate .*)$", TEXT, re.MULTILINE)
    printed = mimo(*shlex.split(line), "--max-tokens", "2", cwd=folder).printed
    assert re.search(
        r"^evaluation at step 4: loss .* samples exactly right, answers normalised 0\.0000, contains 0\.", printed
    )
    wrong = here("evaluate", "runs/chat", "--batch", "2", cwd=folder)
    assert wrong.refused("--batch: expected --answers METRIC beside it, got none. Leave it out.")
    assert (
        "--answers: expected an installed metric of answers" in here(*shlex.split(line), "--answers=f1", cwd=folder).err
    )


def check_prompts(folder: Path, prompt: str, said: str) -> None:
    """A file of prompts is answered as each by itself, and options that don't go together are refused."""
    (block,) = re.findall(r"^```json\n(.*?)^```$", TEXT.partition("## Asking")[2], re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^mimo (generate .*--prompts.*)$", TEXT, re.MULTILINE)
    same = json.dumps({"images": ["zebra.png"], "text": prompt})
    (folder / "prompts.jsonl").write_text(f"{block}\n{same}\n")
    words = (*shlex.split(line), "--max-tokens", "3")
    printed = mimo(*words, "--json", cwd=folder).printed
    assert printed == (folder / "answers.jsonl").read_text()
    answers = [json.loads(answer) for answer in printed.splitlines()]
    assert [list(answer) for answer in answers] == [["prompt", "text", "tokens", "ended"]] * 3
    assert [answer["prompt"] for answer in answers] == [1, 2, 4]
    assert [answers[0]["text"], answers[2]["text"]] == [said.removesuffix("\n")] * 2
    alone = mimo("generate", "runs/chat", "--text", "to be", "--max-tokens", "3", "--json", cwd=folder).printed
    assert json.loads(alone) == {**answers[1], "prompt": 1}
    for more, text in {
        (): "--out: expected a file that is not there yet, got 'answers.jsonl'. Name another, or move it.",
        ("--text", "a"): "--prompts: expected either a file of prompts or one prompt, got --text too",
        ("--batch", "0"): "--batch: expected 1 or more, got 0",
    }.items():
        assert text in here(*words, *more, cwd=folder).err
    asked = ("generate", "runs/chat")
    (folder / "prompts.jsonl").write_text('{"text": "a"}\n{"images": ["/zebra.png"], "text": "<image>"}\n')
    for given, text in {
        ("--prompts", "prompts.jsonl"): "--prompts: expected --out FILE beside it, or --json, got neither",
        ("--prompts", "prompts.jsonl", "--out", "none/b"): "--out: expected a file in an existing folder, got 'none/b'",
        ("--text", "a", "--out", "b"): "--out: expected --prompts beside it, got none",
        ("--text", "a", "--batch", "2"): "--batch: expected --prompts beside it, got none",
        ("--prompts", "prompts.jsonl", "--json"): "prompts.jsonl:2: expected paths relative to the file and inside its",
    }.items():
        assert text in here(*asked, *given, cwd=folder).err

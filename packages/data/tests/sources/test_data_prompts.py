"""Prompts of a file: samples that are open at their end, and every refusal with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mimo.data import Chat, ChatSettings, PromptLines, open_prompts
from mimo.data.text import byte_tokenizer
from mimo.hooks import ConfigError, DataError

TOKENIZER = byte_tokenizer.build(byte_tokenizer.ByteConfig(), ["image"])


def chat() -> Chat:
    """Return what writes conversations."""
    return Chat(ChatSettings(template="chatml"), TOKENIZER)


def prompts(folder: Path, *lines: Any) -> PromptLines:
    """Return the prompts of a file of these lines."""
    path = folder / "prompts.jsonl"
    path.write_text("".join("\n" if line is None else json.dumps(line) + "\n" for line in lines))
    return open_prompts(path, TOKENIZER, chat, where="--prompts")


def test_prompts_have_no_end(tmp_path: Path) -> None:
    """A text as it stands, a conversation up to where the next answer begins; lines are counted with blank ones."""
    asked = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b."},
        {"role": "user", "content": "c?"},
    ]
    found = prompts(tmp_path, {"text": "to be"}, None, {"messages": asked})
    assert [found.number(sample) for sample in range(len(found))] == [1, 3]
    assert TOKENIZER.decode(list(found.tokens(0))) == "to be"
    assert TOKENIZER.end not in found.tokens(0)
    text = TOKENIZER.decode(list(found.tokens(1)))
    assert text == chat().ask(["a?", "b.", "c?"])
    assert text.endswith("<|im_start|>assistant\n")


def test_no_template_is_asked_for_where_all_are_texts(tmp_path: Path) -> None:
    """The data of a model that generates may have none."""

    def refuse() -> Chat:
        raise AssertionError

    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}')
    found = open_prompts(tmp_path / "prompts.jsonl", TOKENIZER, refuse, where="--prompts")
    assert list(found.tokens(0)) == list(TOKENIZER.encode("a"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ({"text": "a", "weight": 2}, "expected a prompt, of which nothing is learnt, got one with 'weight'"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the last message has the role 'assistant'"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "'chatml' does not read 'mood'"),
        ({"txt": "a"}, "Did you mean 'text'?"),
        ({"images": ["../a.png"], "text": "<image>"}, "which leaves it"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_with_its_line(tmp_path: Path, line: Any, text: str) -> None:
    """Not passed over."""
    found = prompts(tmp_path, {"text": "a"}, line)
    with pytest.raises(DataError) as caught:
        print(found.tokens(1), found.infos(1))
    assert caught.value.where.endswith("prompts.jsonl:2")
    assert text in str(caught.value)


def test_a_file_that_has_none_is_refused(tmp_path: Path) -> None:
    """By the option that names it."""
    with pytest.raises(
        ConfigError, match=r"--prompts: expected a jsonl file with at least one prompt, got .* is empty"
    ):
        prompts(tmp_path)
    with pytest.raises(ConfigError, match=r"--prompts: expected an existing jsonl file, got '.*none\.jsonl'"):
        open_prompts(tmp_path / "none.jsonl", TOKENIZER, chat, where="--prompts")

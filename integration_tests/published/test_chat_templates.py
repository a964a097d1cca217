"""Conversations as transformers encodes them: token by token, and what the assistant says mask by mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mimo.data import TOKENIZERS, Chat, ChatSettings, Conversation, named_template, named_templates, parse_conversation
from mimo.hooks import DataError, JsonNode, JsonSource, discover

SPECIAL: tuple[str, ...] = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)
SPECIAL += ("<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|image_pad|>")
TURNS = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What   is it?\n"},
    {"role": "assistant", "content": "A zebra \N{ZEBRA FACE} of naïve œuvre."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A zebra."}]},
]
SEVERAL = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer as transformers saves it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    backend.train_from_iterator([turn["content"] for turn in TURNS], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)  # noqa: S106
    return folder


def conversation(turns: Any) -> Conversation:
    """Return a parsed one."""
    return parse_conversation(JsonNode(turns, JsonSource(where="here", error=DataError)))


def ours(folder: Path, turns: Any, **settings: Any) -> tuple[list[int], list[int]]:
    """Return the ids of turns and which of them are learnt."""
    spec = discover(TOKENIZERS).find("file", "tokenizer.plugin")
    config = spec.config(path=str(folder / "tokenizer.json"), placeholders={"image": "<|image_pad|>"})
    tokens = Chat(ChatSettings(**settings), spec.build(config, ["image"])).encode(conversation(turns))
    assert tokens.weights is not None
    return tokens.ids, [int(weight) for weight in tokens.weights]


@pytest.mark.parametrize("name", named_templates())
def test_marked_templates_give_the_ids_and_masks_of_transformers(folder: Path, name: str) -> None:
    """Of each template that has a name, by that name and beside the tokenizer."""
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    source = named_template(name).source
    encoded = theirs.apply_chat_template(
        TURNS, chat_template=source, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    assert ours(folder, TURNS, template=name) == (encoded["input_ids"], encoded["assistant_masks"])
    assert 0 < sum(encoded["assistant_masks"]) < len(encoded["input_ids"])
    (folder / "chat_template.jinja").write_text(source)
    try:
        assert ours(folder, TURNS) == (encoded["input_ids"], encoded["assistant_masks"])
    finally:
        (folder / "chat_template.jinja").unlink()


def test_a_template_without_marks_gives_the_ids_and_masks_of_transformers(folder: Path) -> None:
    """Each answer is learnt, from behind the text that asks for it; an item is the template's own token."""
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)

    def encoded(turns: Any, **settings: Any) -> Any:
        return theirs.apply_chat_template(turns, chat_template=SEVERAL, tokenize=True, return_dict=False, **settings)

    config = folder / "tokenizer_config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "chat_template": SEVERAL}))
    try:
        for turns in (TURNS, PARTS):
            ids, learnt = ours(folder, turns)
            assert ids == encoded(turns)
            expected = [0] * len(ids)
            for index in (index for index, turn in enumerate(turns) if turn["role"] == "assistant"):
                prompt, answered = encoded(turns[:index], add_generation_prompt=True), encoded(turns[: index + 1])
                assert prompt + answered[len(prompt) :] == answered == ids[: len(answered)]
                expected[len(prompt) : len(answered)] = [1] * (len(answered) - len(prompt))
            assert learnt == expected
        assert theirs.convert_tokens_to_ids("<|image_pad|>") in ids
    finally:
        config.write_text(before)

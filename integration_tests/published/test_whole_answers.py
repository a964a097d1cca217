"""A whole image-text model that was imported and exported answers through `transformers` as `mimo generate` does."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import some
from commands import here, succeed
from PIL import Image
from published_images import FOLDERS
from test_whole_models import WHOLE
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from whole_models import save, write_conversations, write_whole

from mimo_transformers.images import ImageProcessing

TOKENS = 12
_LARGER = 4.0
_SEEDS = {"gemma3": 3, "hyperclovax_vision_v2": 2}
"""Of weights by which what is answered depends on the images, where those of 0 say the same of all."""
ASKED = "so <image>what<image>?"


def write_decided(name: str, path: Path) -> None:
    """Write a folder of a model that says letters, each a token, and others of other images.

    Its layers' weights are large enough for that, and no other token is likely.
    """
    model = write_whole(name, path, seed=_SEEDS.get(name, 0))
    words = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    head = model.get_output_embeddings().weight
    is_letter = torch.zeros(len(head), 1)
    is_letter[[number for word, number in words.items() if len(word) == 1 and word.isascii()]] = 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(_LARGER if parameter.ndim > 1 and parameter is not head else 1)
        head.mul_(is_letter)
    save(model, path)


def library_answer(folder: Path, images: ImageProcessing, paths: list[Path]) -> str:
    """Return the greedy answer of the library's model in a folder, its prompt and pixels made by hand.

    Args:
        folder: exported.
        images: how the published model prepares images.
        paths: of the images.
    """
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of its progress
        model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = ASKED.split("<image>")
    parts = [{"type": "text", "text": texts[0]}]
    for text in texts[1:]:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    turns = [{"role": "user", "content": parts}]
    before, *behind = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True).split(
        images.marker
    )
    opened = [Image.open(path) for path in paths]
    sizes = [(image.height, image.width) for image in opened]
    prompt = before + "".join(images.text(size) + text for size, text in zip(sizes, behind, strict=True))
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    rows = (given["input_ids"] == tokenizer.convert_tokens_to_ids(images.placeholder)).long()
    takes = inspect.signature(model.forward).parameters
    kinds = {key: rows for key in ("mm_token_type_ids", "token_type_ids") if key in takes}
    pixels = images.collate([images.prepare(image) for image in opened], sizes)
    with torch.no_grad():
        written = model.generate(
            **{**given, **kinds, **pixels},
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
        )
    new = written[0, rows.shape[1] :].tolist()
    answer: str = tokenizer.decode(new[:-1] if new[-1] == tokenizer.eos_token_id else new)
    return answer


@pytest.mark.parametrize("name", some(WHOLE, {"qwen2_5_vl"}))
def test_transformers_answers_about_images_as_we_do(name: str, tmp_path: Path) -> None:
    """In the same tokens, of two images of unlike sizes between text; and of other images in others."""
    write_decided(name, tmp_path / "there")
    write_conversations(tmp_path / "data", count=1)
    settings = ("--settings", tmp_path / "my.toml")
    assert here("checkpoint", "import-hf", tmp_path / "there", "--out", tmp_path / "ours", *settings).code == 0
    assert here("checkpoint", "export-hf", tmp_path / "ours", tmp_path / "back").code == 0
    answers = set()
    for numbers in ((1, 3), (4, 2)):
        paths = [tmp_path / "data" / f"{number}.png" for number in numbers]
        words = ("--message", ASKED, "--max-tokens", str(TOKENS))
        ours = succeed("generate", tmp_path / "ours", "--image", *paths, *words)
        assert ours == library_answer(tmp_path / "back", FOLDERS[name].processing(), paths) + "\n"
        answers.add(ours)
    assert len(answers) == 2

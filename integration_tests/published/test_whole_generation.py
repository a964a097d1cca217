"""Imported image-text models generate what the library does, after one prompt or several at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import here
from whole_models import library_inputs, write_conversations, write_whole

from mimo.testing import Pool
from mimo.trainer import Job, Prompt, generate, generate_many, open_checkpoint, prompt_of, read_settings, resolve

TOKENS = 10
ASKED = (("what? ", 0), ("see <image>?", 1), ("<image> to <image>?", 2))
"""Texts of prompts, and how many images each shows.

None ends with an image: `transformers` 5.23 then generates from the places of the image's last row, not behind all.
"""
GEMMA: Mapping[str, Any] = {"seed": 189, "sliding_window": 6}
"""A window on one layer; of this seed what is written hangs on it that rows of an image see each other."""
DEEP: Mapping[str, Any] = {"seed": 5}
"""Of this seed many letters are written."""
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "rows that see each other": ("gemma3", "hf-decoder", GEMMA),
    "places, and rows for the first layers": ("qwen3_vl", "decoder", DEEP),
    "places, by the library's class": ("qwen3_vl", "hf-decoder", DEEP),
    "text between rows": ("mistral3", "decoder", {}),
    "places alone": ("qwen2_vl", "decoder", {}),
    "tiles with text between": ("idefics3", "decoder", {}),
}
QUICK = ("rows that see each other",)


def prompts_of(job: Job, images: Path) -> list[Prompt]:
    """Return the prompts, with images of unlike sizes."""
    files = [images / f"{number}.png" for number in (1, 4, 3)]
    return [prompt_of(job, text, {"image": files[-count:]} if count else {}) for text, count in ASKED]


def write(rank: int, folder: str, images: str, tp: int, pp: int, rows: int) -> list[list[str]]:
    """Return what is generated after the prompts: each alone without a cache, then several at once with it.

    A forward reads at most so many ``rows`` of new prompts, so that some begin while others wait.
    """
    trainer = open_checkpoint(Path(folder), [f"data.max_tokens={rows}"], rank=rank, tp=tp, pp=pp)
    prompts = prompts_of(trainer.job, Path(images))
    alone = [generate(trainer, prompt, max_tokens=TOKENS, use_cache=False) for prompt in prompts]
    batches: Sequence[tuple[int, bool]] = ((1, True), (2, True), (3, True), (3, False))
    return [
        alone,
        *(
            [
                answer.text
                for answer in generate_many(trainer, prompts, max_tokens=TOKENS, batch=batch, use_cache=use_cache)
            ]
            for batch, use_cache in batches
        ),
    ]


def library_text(model: Any, job: Job, prompt: Prompt, *, causal: bool = False) -> str:
    """Return what the library's model writes after a prompt; ``causal`` hides rows of an image from earlier ones."""
    layout = job.lay_out(prompt, 0)
    given = library_inputs(model, job, layout, [raw for _, raw in prompt.items])
    ids = given["input_ids"]
    given |= {"token_type_ids": torch.zeros_like(ids)} if causal else {}
    end = job.tokenizer.end
    with torch.no_grad():
        found = model.generate(
            **given,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end,
        )
    written = [token for token in found[0, ids.shape[1] :].tolist() if token != end]
    return job.tokenizer.decode(written)


@pytest.mark.parametrize("what", [pytest.param(one, marks=() if one in QUICK else pytest.mark.soak) for one in MODELS])
def test_prompts_with_images_are_continued_as_the_library_does(what: str, tmp_path: Path, pool: Pool) -> None:
    """Without an image, with one, with two: alone and at once, with a cache and without; from one process and two."""
    name, plugin, keys = MODELS[what]
    model = write_whole(name, there := tmp_path / "there", stir=0.5, **keys)
    data = write_conversations(images := tmp_path / "data")
    file = tmp_path / "my.toml"
    words = ("--out", tmp_path / "ours", "--settings", file, "--plugin", plugin)
    assert not here("checkpoint", "import-hf", there, *words).err
    settings = tomllib.loads(file.read_text())
    assert settings["modules"]["language"]["plugin"] == plugin
    job = resolve(read_settings({**settings, "data": {**settings["data"], "path": str(data)}}))
    prompts = prompts_of(job, images)
    rows = max(len(job.lay_out(prompt, 0).tokens) for prompt in prompts)
    expected = [library_text(model, job, prompt) for prompt in prompts]
    assert len(set(expected)) == len(expected)
    assert len(set("".join(expected))) > 2 * len(expected)
    if name == "gemma3":
        causal = [library_text(model, job, prompt, causal=True) for prompt in prompts]
        assert [one == other for one, other in zip(expected, causal, strict=True)] == [True, False, False]
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        for found in pool.run(tp * pp, write, str(tmp_path / "ours"), str(images), tp, pp, rows):
            assert found == [expected] * 5

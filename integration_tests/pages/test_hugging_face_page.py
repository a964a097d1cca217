"""The commands that docs/hugging-face.md shows, run as they stand there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import published
import transformers
from commands import here, mimo
from house import ROOT
from PIL import Image
from published import logits_of
from whole_models import load, write_conversations, write_whole

from mimo.testing import Ended
from mimo.trainer.runtime import installed_readers
from mimo_transformers import shrink

PAGE = (ROOT / "docs" / "hugging-face.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
RUN = """
[run]
name = "tuned"
steps = 1
global_batch = 2
evaluation_interval = 0
[data]
plugin = "jsonl"
path = "train.jsonl"
[tokenizer]
plugin = "word"
words = ["a", "b"]
"""


def run_all(folder: Path) -> dict[str, Ended]:
    """Run all commands of the page in a folder, in order, and return how each ended."""
    return {line: run_one(line, folder) for line in COMMANDS}


def run_one(line: str, folder: Path) -> Ended:
    """Run a command of the page; one that launches ranks in a process of its own."""
    words = shlex.split(line, comments=True)
    assert words[0] == "mimo"
    return (mimo if words[1] in {"train", "generate"} else here)(*words[1:], cwd=folder)


def test_the_page_of_hugging_face_names_all_families() -> None:
    """Of installed plugins."""
    readers = [*installed_readers("language"), *installed_readers("vision")]
    assert [one.family.model_type for one in readers if f"`{one.family.model_type}`" not in PAGE] == []


def test_the_page_of_hugging_face_shows_commands_that_work(tmp_path: Path) -> None:
    """With small folders of these names, and with the tables that the first command prints pasted as the page says."""
    published.llama(tmp_path / "llama")
    published.siglip(tmp_path / "siglip")
    mixture = transformers.AutoConfig.for_model("gpt_oss", **shrink(transformers.AutoConfig.for_model("gpt_oss")))
    published.publish(transformers.AutoModelForCausalLM.from_config(mixture), tmp_path / "gpt-oss")
    tower = transformers.AutoConfig.for_model("dinov2", **shrink(transformers.AutoConfig.for_model("dinov2")))
    published.publish(transformers.AutoModel.from_config(tower), tmp_path / "dinov2")
    write_whole("llava", tmp_path / "llava")
    write_conversations(tmp_path).rename(tmp_path / "chat.jsonl")
    Image.new("L", (4, 4), 128).save(tmp_path / "a.png")
    (tmp_path / "train.jsonl").write_text('{"images": ["a.png"], "text": "a <image> b"}\n' * 2)
    both = here("checkpoint", "import-hf", "language=llama", "vision=siglip", cwd=tmp_path).printed
    assert tomllib.loads(both)["modules"].keys() == {"language", "vision"}
    (tmp_path / "my.toml").write_text(RUN + re.sub(r"(plugin = .*)", r'\1\nranks = "0"', both))
    ended = run_all(tmp_path)
    assert len(ended) == len(COMMANDS) > 6
    assert {line: one for line, one in ended.items() if one.code or one.err} == {}
    assert ended[COMMANDS[0]].out.partition("# ")[0].strip() == both.partition("\n[modules.vision]")[0].strip()
    assert "new: weights of vision (" in next(one.out for line, one in ended.items() if "--finetune both" in line)
    assert (tmp_path / "checked" / "step_00000000").is_dir()
    assert logits_of(tmp_path / "exported", published.TOKENS).shape == (11, published.VOCABULARY)
    assert (tmp_path / "tower" / "config.json").exists()
    shown = next(one.out for line, one in ended.items() if "--settings" in line)
    assert "# vision: llava from llava for hf-images, " in shown
    assert "# language: llama from llava (text_config) for decoder, " in shown
    trained = next(one.out for line, one in ended.items() if "train whole.toml" in line)
    assert "weights of step 0 loaded from whole/step_00000000" in trained
    _, loading = load(tmp_path / "tuned-llava")
    assert not any(loading.values()), loading
    left = next(block for kind, block in BLOCKS if kind == "text" and "llava" in block)
    assert left in here("checkpoint", "import-hf", "llava", "--part", "language", cwd=tmp_path).printed

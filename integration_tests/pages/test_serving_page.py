"""The commands and programs that docs/serving.md shows, run as they stand there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers
from commands import here, mimo
from house import ROOT
from published import adapted_logits_of, logits_of
from whole_models import write_conversations, write_whole

from mimo.testing import Ended
from mimo.testing.comparison import tensors_of

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
TEXT, LLAVA, QWEN, PEFT = (block for language, block in BLOCKS if language == "python")
FAMILIES = {"llava": "llava_next", "qwen": "qwen2_5_vl"}
LORA = 'modules.language.lora={rank=2,targets=["*.query"]}'
TOKENS = torch.arange(11)
ASKED = ("Once upon a time", "To be")


def run_one(line: str, folder: Path) -> Ended:
    """Run a command of the page; one that computes in a process of its own."""
    words = shlex.split(line, comments=True)
    assert words[0] == "mimo"
    return (mimo if words[1] == "generate" else here)(*words[1:], cwd=folder)


def printed(program: str, folder: Path) -> str:
    """Return what a program of the page prints."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(program, str(ROOT / "docs" / "serving.md"), "exec"), {})  # noqa: S102 - our own page
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the three runs of the page are: two imports, and a step with LoRA of a language model of one of them."""
    found = tmp_path_factory.mktemp("page")
    data = write_conversations(found, count=1)
    (found / "4.png").rename(found / "cat.png")
    (found / "asked.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ASKED))
    for run, name in FAMILIES.items():
        write_whole(name, found / run)
        tokens = json.loads((found / run / "tokenizer_config.json").read_text())
        (found / run / "chat_template.jinja").write_text(tokens.pop("chat_template"))
        (found / run / "tokenizer_config.json").write_text(json.dumps(tokens))
        words = ("--out", f"runs/{run}", "--settings", f"{run}.toml")
        assert here("checkpoint", "import-hf", run, *words, cwd=found).code == 0
    part = ("--part", "language", "--out", "text", "--settings", "text.toml")
    assert here("checkpoint", "import-hf", "llava", *part, cwd=found).code == 0
    settings = [f"data.path={data}", "run.steps=1", "run.global_batch=1", "run.directory=runs/text", "optimizer.lr=0.1"]
    assert mimo("train", "text.toml", "--finetune", "text", *settings, LORA, cwd=found).code == 0
    assert here("checkpoint", "export-hf", "text", "llama", cwd=found).code == 0
    return found


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """How all commands of the page ended, run in order."""
    return {line: run_one(line, folder) for line in COMMANDS}


def test_the_page_of_serving_shows_commands_that_work(folder: Path, ended: dict[str, Ended]) -> None:
    """Folders have the type that is asked for, and all files of the published ones as they were."""
    assert {line: one for line, one in ended.items() if one.code or one.err} == {}
    assert len(ended) == 9
    assert len((folder / "answers.jsonl").read_text().splitlines()) == len(ASKED)
    assert json.loads((folder / "small-model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors_of(folder / "small-model").values()} == {torch.bfloat16}
    for run in FAMILIES:
        files = {file.name: file.read_bytes() for file in (folder / run).iterdir() if not file.name.startswith("model")}
        assert files.keys() >= {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"}
        del files["config.json"]
        assert {name: (folder / f"{run}-model" / name).read_bytes() for name in files} == files


@pytest.mark.parametrize(("run", "program"), [("text", TEXT), ("llava", LLAVA), ("qwen", QWEN)])
def test_transformers_answers_as_we_do(run: str, program: str, folder: Path, ended: dict[str, Ended]) -> None:
    """The same greedy text: of a language model, and of an image by the library's processor and without it."""
    (ours,) = (one.out for line, one in ended.items() if re.match(f"mimo generate runs/{run} --(text|image)", line))
    assert len(ours) > 8
    assert printed(program, folder) == ours


@pytest.mark.soak
def test_an_adapter_fits_what_its_run_began_with(folder: Path, ended: dict[str, Ended]) -> None:
    """And makes of it the model that was exported."""
    assert all(one.code == 0 for one in ended.values())
    base, adapter = re.findall(r'from_pretrained\("(\w+)"\), "(\w+)"\)', PEFT)[0]
    exported = logits_of(folder / "text-model", TOKENS)
    adapted = adapted_logits_of(folder / base, folder / adapter, TOKENS)
    assert (adapted - exported).norm() <= 1e-5 * exported.norm()
    assert (logits_of(folder / base, TOKENS) - exported).norm() > 1e-3 * exported.norm()


@pytest.mark.parametrize("run", FAMILIES)
def test_exported_settings_are_those_that_the_library_writes(run: str, folder: Path, ended: dict[str, Ended]) -> None:
    """Key by key but for those that it takes from elsewhere, and for positions as older versions have them.

    A width of heads that follows from others is said, and no vocabulary of a tower, which reads none.
    """
    assert all(one.code == 0 for one in ended.values())
    theirs, ours = (flat(json.loads((folder / name / "config.json").read_text())) for name in (run, f"{run}-model"))
    older = {"rope_theta", "rope_scaling", "tie_word_embeddings", "head_dim"}
    assert {key for key in ours.keys() - theirs.keys() if not older & set(key.split("."))} == set()
    unsaid = {"transformers_version", "use_cache", "initializer_range", "pretraining_tp", "layer_types"}
    left_out = theirs.keys() - ours.keys() - {"vision_config.vocab_size"}
    assert {key for key in left_out if not unsaid & set(key.split("."))} == set()
    # Layers without a window begin behind the last one.
    assert {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]} <= {"text_config.max_window_layers"}
    loaded = [transformers.AutoConfig.from_pretrained(folder / name) for name in (run, f"{run}-model")]
    assert loaded[0].text_config.eos_token_id == loaded[1].text_config.eos_token_id


def flat(described: dict[str, object], before: str = "") -> dict[str, object]:
    """Return the values of tables inside each other by their paths."""
    found: dict[str, object] = {}
    for key, value in described.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) and value else {f"{before}{key}": value}
    return found

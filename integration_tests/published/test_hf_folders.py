"""`mimo checkpoint import-hf` and `export-hf` with folders of `transformers`: there and back, composed, trained."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from commands import here
from published import TOKENS, VOCABULARY, logits_of, same_tensors
from resuming import resume_and_save, resume_run, same_bits
from tables import table
from test_oracle import on

from mimo.checkpoint import latest, load, read_manifest, reshard
from mimo.model import DECODER, DecoderConfig, Stage
from mimo.model.runtime import LanguageBatch
from mimo.testing import Pool
from mimo.testing.comparison import tensors_of

TRAINED: Mapping[str, Any] = {
    "vocabulary": VOCABULARY,
    "hidden": 24,
    "layers": 3,
    "heads": 6,
    "kv_heads": 2,
    "intermediate": 37,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model, a vision tower, and both in one."""
    folder = tmp_path_factory.mktemp("folders")
    published.llama(folder / "llama", shards="10KB")
    published.siglip(folder / "siglip")
    published.llava(folder / "llava")
    return folder


def checkpoint(*words: str | Path) -> str:
    """Run `mimo checkpoint` in this process and return what it printed."""
    return here("checkpoint", *words).printed


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_what_is_imported_and_exported_is_the_same_to_the_bit(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    """In other shards, with biases, another rotary base and small files beside it."""
    keys = {"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}
    there = published.llama(tmp_path / "there", dtype=dtype, shards="20KB", **keys)
    name = str(dtype).removeprefix("torch.")
    assert f"llama from {there} for decoder, " in (out := checkpoint("import-hf", there, "--out", tmp_path / "ours"))
    assert f" tensors, {name} there and float32 here\n" in out
    entries = read_manifest(tmp_path / "ours" / "step_00000000").tensors.values()
    assert {entry.dtype for entry in entries} == {"F32"}
    words = (tmp_path / "ours", tmp_path / "back", "--dtype", name, "--shard-bytes", "9000")
    assert "copied: generation_config.json" in checkpoint("export-hf", *words)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert same_tensors(there, tmp_path / "back")
    assert torch.equal(logits_of(tmp_path / "back", TOKENS), logits_of(there, TOKENS))


def test_the_settings_of_a_folder_are_printed_and_mean_it(folders: Path, tmp_path: Path) -> None:
    """As tables that a file of settings has; nothing is written."""
    tables = tomllib.loads(checkpoint("import-hf", f"language={folders / 'llama'}", f"vision={folders / 'siglip'}"))
    assert tables["modules"]["language"]["plugin"] == "decoder"
    config = DecoderConfig(**tables["modules"]["language"]["config"])
    assert (config.hidden, config.key_value_heads, config.rope_theta, config.vocabulary) == (24, 2, 500.0, VOCABULARY)
    assert tables["modules"]["vision"]["plugin"] == "siglip"
    assert tables["modules"]["vision"]["config"]["patch"] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("plugin", ["decoder", "hf-decoder"])
def test_programs_of_a_folder_are_never_run(folders: Path, tmp_path: Path, plugin: str) -> None:
    """Though its files say that they are the model; nor are they written back."""
    there, marker = tmp_path / "there", tmp_path / "was-run"
    shutil.copytree(folders / "llama", there)
    (there / "modeling.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    names = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    config = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps({**config, "auto_map": names, "trust_remote_code": True}))
    checkpoint("import-hf", there, "--plugin", plugin, "--out", tmp_path / "ours")
    checkpoint("export-hf", tmp_path / "ours", tmp_path / "back")
    assert not marker.exists()
    assert not (tmp_path / "back" / "modeling.py").exists()
    assert same_tensors(there, tmp_path / "back")


def test_a_composed_folder_holds_several_modules(folders: Path, tmp_path: Path) -> None:
    """All that plugins can read, or one of them: the same bits as where each has a folder of its own."""
    out = checkpoint("import-hf", folders / "llava", "--plugin", "siglip", "--out", tmp_path / "all")
    assert f"siglip: siglip_vision_model from {folders / 'llava'} (vision_config) for siglip" in out
    checkpoint("import-hf", f"vision={folders / 'llava'}", "--out", tmp_path / "one")
    held = read_manifest(tmp_path / "one" / "step_00000000").tensors
    assert {name.partition(".")[0] for name in held} == {"vision"}
    for name, module in (("one", "vision"), ("all", "siglip"), ("all", "language")):
        checkpoint("export-hf", tmp_path / name, tmp_path / f"{name}-{module}", "--module", module)
    whole = tensors_of(folders / "llava")
    prefixes = {"one-vision": "vision_tower.", "all-siglip": "vision_tower.", "all-language": "language_model."}
    for folder, before in prefixes.items():
        found = tensors_of(tmp_path / folder)
        assert len(found) > 15
        assert all(torch.equal(whole[f"{before}{name}"], tensor) for name, tensor in found.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """The run directory of a language model that four ranks have trained a step, cut in two ways."""
    settings = table({"vision": on(0, 0), "language": on(0, 3, pp=2, tp=2)}, language=TRAINED)
    settings["run"]["directory"] = str(tmp_path_factory.mktemp("trained"))
    pool.run(4, resume_and_save, settings, 1, 1)
    return Path(settings["run"]["directory"])


def test_a_checkpoint_of_any_layout_is_exported(trained: Path, tmp_path: Path) -> None:
    """`transformers` computes the logits that ours does, from any pieces."""
    step = latest(trained / "checkpoints")
    assert step is not None
    out = checkpoint("export-hf", trained, tmp_path / "out")
    assert f"{tmp_path / 'out'}: language as LlamaForCausalLM, 30 tensors of float32\nno tokenizer files" in out
    model: Any = DECODER.build(DecoderConfig(**TRAINED), Stage())
    load(step, {"language": {name: tensor.detach() for name, tensor in model.named_parameters()}})
    batch = LanguageBatch.of(TOKENS, TOKENS, torch.arange(11), lengths=(11,))
    ours = model.logits(model(batch, {}, None))
    assert (logits_of(tmp_path / "out", TOKENS) - ours).norm() <= 1e-5 * ours.norm()
    checkpoint("export-hf", reshard(step, tmp_path / "pieces", parts=5), tmp_path / "again")
    assert same_tensors(tmp_path / "out", tmp_path / "again")


def test_what_no_family_has_is_refused(trained: Path, tmp_path: Path) -> None:
    """A module of the checkpoint, a family of the plugin, settings that the family can say."""
    other = here("checkpoint", "export-hf", trained, tmp_path / "out", "--module", "audio")
    assert other.code == 3
    assert "expected a checkpoint with the module 'audio', got one with language, vision. Name another one" in other.err
    assert here("checkpoint", "export-hf", trained, tmp_path / "out", "--module", "vision").refused(
        "modules.vision.plugin: expected one with a table of published weights, `hf` of its spec, got encoder 'vit', "
        "which has none."
    )
    assert here("checkpoint", "export-hf", trained, tmp_path / "out", "--model-type", "bert").refused(
        "--model-type: expected one that 'decoder' knows: llama, "
    )
    wrong = here("checkpoint", "export-hf", trained, tmp_path / "out", "--model-type", "qwen3")
    assert wrong.code == 2
    assert "got none of 1 that can say them:\n  qwen3: modules.language.config.query_key_norm: " in wrong.err
    assert not (tmp_path / "out").exists()


def composed(folders: Path, out: Path, **language: Any) -> dict[str, Any]:
    """Import a language model and a vision tower, and return the settings of a run that begins with them."""
    words = (f"language={folders / 'llama'}", f"vision={folders / 'siglip'}")
    tables = tomllib.loads(checkpoint("import-hf", *words, "--out", out))
    settings = table({"vision": on(0, 0), "language": on(0, 0)})
    settings["run"]["directory"] = str(out / "run")
    for name, found in tables["modules"].items():
        settings["modules"][name] |= found
    settings["modules"]["language"]["config"] |= language
    return settings | {"load": {"finetune": str(out)}}


def test_a_run_begins_with_modules_of_several_folders(folders: Path, tmp_path: Path, pool: Pool) -> None:
    """Language and tower are the folders', the projector is that of a run without them; the summary says so."""
    settings = composed(folders, tmp_path)
    fresh = {key: value for key, value in settings.items() if key != "load"}
    (found,), (new,) = (pool.run(1, resume_run, one, 1, 1) for one in (settings, fresh))
    assert found.summary == (
        f"weights of step 0 loaded from {tmp_path / 'step_00000000'}; "
        f"new: weights of vision ({sum(name.startswith('vision.projector.') for name in found.began)} entries)"
    )
    weights = {name: value for name, value in found.began.items() if name.startswith(("vision.", "language."))}
    projector = {name for name in weights if name.startswith("vision.projector.")}
    held = {name: torch.zeros_like(value) for name, value in weights.items() if name not in projector}
    load(tmp_path / "step_00000000", held)
    assert same_bits(held, {name: weights[name] for name in held})
    assert same_bits(*({name: one.began[name] for name in projector} for one in (found, new)))


def test_settings_that_are_not_the_folders_are_named_by_a_run(folders: Path, tmp_path: Path, pool: Pool) -> None:
    """Only of what a folder decides: it has no say in a projector."""
    settings = composed(folders, tmp_path, rope_theta=700.0)
    (found,) = pool.run(1, resume_run, settings, 1, 1)
    assert found.summary.endswith("entries); modules.language.config.rope_theta 700.0 (was 500.0)")


def config_file(folder: Path, tables: dict[str, Any]) -> Path:
    """Write settings of a run that reads text, with these modules."""
    text = '[run]\nname = "x"\nsteps = 1\nglobal_batch = 1\n[data]\nplugin = "jsonl"\npath = "none.jsonl"\n'
    for name, module in tables.items():
        text += f'[modules.{name}]\nplugin = "{module["plugin"]}"\nranks = "0"\n[modules.{name}.config]\n'
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in module["config"].items())
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def test_settings_are_compared_with_folders(folders: Path, tmp_path: Path) -> None:
    """All that differ, with the first shapes; the vocabulary of a tokenizer too."""
    word = f"language={folders / 'llama'}"
    tables = tomllib.loads(checkpoint("import-hf", word))["modules"]
    language = tables["language"]["config"]
    # The tokenizer of bytes has more ids than the folder's model reads.
    ended = here("checkpoint", "import-hf", word, "--config", config_file(tmp_path, tables))
    assert ended.refused("modules.language.config.vocabulary: expected at least the tokenizer's 25")
    language |= {"vocabulary": 0, "hidden": 36, "rope_theta": 1e4}
    ended = here("checkpoint", "import-hf", word, "--config", config_file(tmp_path, tables), "--out", tmp_path / "out")
    assert ended.code == 2
    published = folders / "llama" / "config.json"
    assert f"modules.language.config: expected what {published} says, got others:\n" in ended.err
    for line in (
        f"\n  modules.language.config.vocabulary: expected {VOCABULARY}, as {published} says, got 25",
        f"\n  modules.language.config.hidden: expected 24, as {published} says, got 36.\n",
        f"\n  modules.language.config.rope_theta: expected 500.0, as {published} says, got 10000.0.\n",
        f"\n  model.embed_tokens.weight: shape [{VOCABULARY}, 24] there, [25",
        f"`mimo checkpoint import-hf {folders / 'llama'}` prints the settings that go with it.",
    ):
        assert line in ended.err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_with_the_settings_of_a_run_can_be_used_at_once(tmp_path: Path) -> None:
    """Text is written by it; without settings it has to begin a run first."""
    word = published.llama(tmp_path / "llama", vocab_size=300)
    tables = tomllib.loads(checkpoint("import-hf", word))["modules"]
    checkpoint("import-hf", word, "--out", tmp_path / "weights")
    out = checkpoint("import-hf", word, "--config", config_file(tmp_path, tables), "--out", tmp_path / "run")
    assert out.startswith(f"language: llama from {word} for decoder, 21 tensors, float32 there and float32 here\n")
    manifest = read_manifest(tmp_path / "run" / "step_00000000")
    assert manifest.config["run"]["name"] == "x"
    ended = here("generate", tmp_path / "weights", "--text", "a")
    assert "expected a checkpoint with the settings of a run, got one of weights alone. Import them with" in ended.err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "t5"}, "config.json model_type: expected a family that can be read here: "),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {}}, "expected weights in a floating type, got a quantization_config."),
        ({"num_attention_heads": "many"}, "num_attention_heads: expected a whole number, got 'many'."),
        ({"rope_parameters": [1]}, "expected the settings of a llama model, got others ("),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight: missing"),
        ({"num_hidden_layers": 1000}, "expected tensors of 1000 layers, got "),
        ({"tie_word_embeddings": True}, "lm_head.weight: not equal to model.embed_tokens.weight, though line 1 "),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight: read by nothing"),
        ({"vocab_size": 41}, "model.embed_tokens.weight: shape [40, 24] there, [41, 24] here"),
    ],
    ids=[
        "family",
        "setting",
        "quantized",
        "text",
        "malformed",
        "more layers",
        "too many layers",
        "tied",
        "fewer layers",
        "size",
    ],
)
def test_folders_that_do_not_fit_are_refused(folders: Path, tmp_path: Path, change: dict[str, Any], text: str) -> None:
    """Of another family, with settings that ours can't do, or with other tensors than its settings mean."""
    there = tmp_path / "there"
    there.mkdir()
    for file in (folders / "llama").iterdir():
        (there / file.name).symlink_to(file)
    (there / "config.json").unlink()
    config = json.loads((folders / "llama" / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(config | change))
    ended = here("checkpoint", "import-hf", there, "--out", tmp_path / "out")
    assert (ended.code in {2, 3}, text in ended.err) == (True, True), ended
    assert str(there) in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "folders: expected at least one, as DIR or module=DIR, got none."),
        (["nowhere"], "'nowhere': expected a folder, or module=folder, got nothing there."),
        (["llama", "language=llama"], "'language=llama': expected each module once, got language from llama too."),
        (["audio=llama"], "llama/config.json model_type: expected a family that can be read here: "),
    ],
)
def test_words_that_mean_nothing_are_refused(folders: Path, words: list[str], text: str) -> None:
    """With what was expected."""
    assert here("checkpoint", "import-hf", *words, cwd=folders).refused(text)

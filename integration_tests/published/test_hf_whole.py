"""Folders of whole models of pictures or sound and text: what is taken of them, and what is left, is said."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import published
import pytest
import torch
import transformers
from commands import here
from published import publish
from safetensors.torch import save_file
from whole_models import write_whole

from mimo.checkpoint import read_manifest
from mimo.testing.comparison import tensors_of

SIZES = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 40, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
PICTURES = {**SIZES, "image_size": 8, "patch_size": 2}
SOUND = {"d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 36, "num_mel_bins": 8}
TURNED = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
QWEN2_VL = {**SIZES, "vocab_size": 40, "num_key_value_heads": 2, "rope_parameters": TURNED}
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"text_config": TEXT, "vision_config": PICTURES, "mm_tokens_per_image": 4},
    "paligemma": {
        "text_config": {**TEXT, "model_type": "gemma"},
        "vision_config": {**PICTURES, "model_type": "siglip_vision_model"},
        "projection_dim": 24,
    },
    "idefics3": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": PICTURES,
        "scale_factor": 2,
    },
    "smolvlm": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": PICTURES,
        "scale_factor": 2,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**PICTURES, "model_type": "pixtral", "head_dim": 6},
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**SIZES, "image_size": [8, 8], "patch_size": [2, 2]},
    },
    "qwen2_vl": {
        "text_config": QWEN2_VL,
        "vision_config": {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 24, "patch_size": 2},
    },
    "qwen2_audio": {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": SOUND},
}
PART = {
    "gemma3": ("siglip", "siglip_vision_model", "text_config (gemma3_text)", "language_model.* (28 tensors)"),
    "paligemma": ("siglip", "siglip_vision_model", "text_config (gemma)", "language_model.* (20 tensors)"),
    "idefics3": ("language", "llama", "vision_config (idefics3_vision)", "model.vision_model.* (37 tensors)"),
    "smolvlm": ("language", "llama", "vision_config (smolvlm_vision)", "model.vision_model.* (37 tensors)"),
    "mistral3": ("language", "mistral", "vision_config (pixtral)", "vision_tower.* (20 tensors)"),
    "internvl": ("language", "qwen2", "vision_config (internvl_vision)", "vision_tower.* (34 tensors)"),
    "qwen2_vl": ("language", "qwen2_vl_text", "vision_config (qwen2_vl_vision)", "visual.* (31 tensors)"),
    "qwen2_audio": ("language", "qwen2", "audio_config (qwen2_audio_encoder)", "audio_tower.* (37 tensors)"),
}
"""Of each, the module and the family of what is read; the model and some tensors that are not."""
QUICK = ("gemma3", "idefics3")


def checkpoint(*words: str | Path) -> Any:
    """Run `mimo checkpoint` in this process."""
    return here("checkpoint", *words)


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in QUICK else pytest.mark.soak) for one in WHOLE])
def test_a_whole_model_is_refused_until_its_part_is_named(kind: str, tmp_path: Path) -> None:
    """Whether settings are printed or weights are written: one decision. Of the part, what it leaves behind is said."""
    model: Any = transformers.AutoModelForImageTextToText
    if kind == "qwen2_audio":
        model = transformers.Qwen2AudioForConditionalGeneration
        made = model(transformers.AutoConfig.for_model(kind, **WHOLE[kind]))
    else:
        made = model.from_config(transformers.AutoConfig.for_model(kind, **WHOLE[kind]))
    there = publish(made, tmp_path / "there")
    name, family, unread, tensors = PART[kind]
    tower = ("--plugin", "siglip")  # which reads nothing beside its tower
    for more in (tower, (*tower, "--out", tmp_path / "out")):
        assert checkpoint("import-hf", there, *more).refused(
            f"{there}/config.json: expected models that are all read here, as no module is named, got {unread} too, "
            f"which would be left behind. Name the module for which a part of it is wanted: {name}={there} reads its "
            f"{family}."
        )
    assert not (tmp_path / "out").exists()
    shown = checkpoint("import-hf", f"{name}={there}").printed
    assert f"# {name}: {family} from {there}" in shown
    (left,) = (line for line in shown.splitlines() if line.startswith("# left behind"))
    assert left.startswith(f"# left behind in {there}: {unread}, ")
    assert tensors in left
    written = checkpoint("import-hf", f"{name}={there}", "--out", tmp_path / "out").printed
    assert written == f"{shown}# {tmp_path / 'out' / 'step_00000000'}\n"


def test_a_folder_of_which_all_models_are_read_needs_no_name(tmp_path: Path) -> None:
    """Its projector is left behind, and said to be; so are both of its models where one is asked for."""
    there = published.llava(tmp_path / "llava")
    tower = ("--plugin", "siglip")
    projector, head = "multi_modal_projector.* (4 tensors)", "vision_tower.head.* (11 tensors)"
    assert f"\n# left behind in {there}: {projector}, {head}\n" in checkpoint("import-hf", there, *tower).printed
    shown = checkpoint("import-hf", f"vision={there}").printed
    assert (
        f"\n# left behind in {there}: text_config (llama), language_model.* (21 tensors), {projector}, {head}\n"
        in shown
    )
    both = checkpoint("import-hf", f"vision={there}", f"language={there}").printed
    assert f"\n# left behind in {there}: {projector}, {head}\n" in both
    alone = published.siglip(tmp_path / "siglip")
    (shown,) = (line for line in checkpoint("import-hf", alone).printed.splitlines() if "left behind" in line)
    assert shown == f"# left behind in {alone}: head.* (11 tensors)"


@pytest.mark.parametrize("words", [(), ("vision={0}", "language={0}")])
def test_plugins_of_each_kind_are_named_at_once(words: tuple[str, ...], tmp_path: Path) -> None:
    """Each is for the modules of its kind, and reads parts of a composed folder that it doesn't name."""
    there = published.llava(tmp_path / "llava")
    folders = [word.format(there) for word in words] or [str(there)]
    for tower, language in (("siglip", "hf-decoder"), ("hf-encoder", "decoder"), ("hf-encoder", "hf-decoder")):
        shown = tomllib.loads(checkpoint("import-hf", *folders, "--plugin", tower, "--plugin", language).printed)
        modules = shown["modules"]
        assert modules.pop("language")["plugin"] == language
        assert [module["plugin"] for module in modules.values()] == [tower]
    assert checkpoint("import-hf", f"vision={there}", "--plugin", "decoder").refused("--plugin: expected one of ")


def test_a_part_is_read_where_another_cannot_be(tmp_path: Path) -> None:
    """Of a model whose images are prepared otherwise, the language model; the refusal names the option for it."""
    there = tmp_path / "there"
    write_whole("llava", there)
    file = there / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_processor_type": "OtherImageProcessor"}))
    ended = checkpoint("import-hf", there)
    assert ended.code == 2
    assert f"{file}: image_processor_type: expected one of " in ended.err
    assert ended.err.rstrip().endswith("`--part language` reads that alone.")
    assert "# language: llama from " in checkpoint("import-hf", there, "--part", "language").printed
    assert checkpoint("import-hf", there, "--part", "vision").refused(f"{file}: image_processor_type: expected one of ")


def test_tensors_are_left_behind_only_by_who_names_parts(tmp_path: Path) -> None:
    """Of a model whose type nobody knows, towers and language models are read; their projector is none of these."""
    there = published.llava(tmp_path / "llava")
    file = there / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "other"}))
    projector = "multi_modal_projector.* (4 tensors)"
    assert checkpoint("import-hf", there, "--out", tmp_path / "out").refused(
        f"{there}: expected tensors that are all read here, as no part is named, got {projector}, "
    )
    assert not (tmp_path / "out").exists()
    shown = checkpoint("import-hf", there, "--part", "siglip", "--part", "language").printed
    assert f"# left behind in {there}: {projector}, " in shown


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a language model."""
    return published.llama(tmp_path_factory.mktemp("llama") / "there")


def changed(
    llama: Path, folder: Path, change: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """Write the folder anew with other keys and tensors."""
    folder.mkdir()
    config = json.loads((llama / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}, indent=2))
    save_file({**tensors_of(llama), **(tensors or {})}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("bad", ["nan", "-inf"])
def test_weights_that_are_no_finite_numbers_are_refused_by_name(llama: Path, tmp_path: Path, bad: str) -> None:
    """With the file and the place in the tensor; nothing is left of what was written."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = tensors_of(llama)[name].clone()
    tensor[7, 3] = float(bad)
    there = changed(llama, tmp_path / "there", {}, {name: tensor})
    ended = checkpoint("import-hf", there, "--out", tmp_path / "out")
    assert ended.code == 3
    assert f"{there}/model.safetensors: {name}: expected finite numbers, got {bad} at [7, 3]. The weights" in ended.err
    assert not list(tmp_path.glob("out/step_*"))


def test_the_line_that_ties_a_head_is_named(llama: Path, tmp_path: Path) -> None:
    """A head that equals the embedding is fine beside a tied config; of one that differs, config.json is quoted."""
    embedding = tensors_of(llama)["model.embed_tokens.weight"]
    tied = {"tie_word_embeddings": True}
    equal = changed(llama, tmp_path / "equal", tied, {"lm_head.weight": embedding.clone()})
    assert checkpoint("import-hf", equal, "--out", tmp_path / "out").code == 0
    assert not any("head" in name for name in read_manifest(tmp_path / "out" / "step_00000000").tensors)
    there = changed(llama, tmp_path / "there", tied)
    lines = (there / "config.json").read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, start=1) if "tie_word_embeddings" in text)
    for more in ((), ("--out", tmp_path / "other")):
        ended = checkpoint("import-hf", there, *more)
        assert ended.code == 3
        assert (
            "\n  lm_head.weight: not equal to model.embed_tokens.weight, though "
            f'line {line} of config.json, "tie_word_embeddings": true, makes them one; where both count, it must say '
            "false\n"
        ) in ended.err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rms_norm_eps": 1e12}, "rms_norm_eps: expected a number above 0 and up to 0.1, got 1000000000000.0."),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number above 0 and up to 0.1, got nan."),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window: expected at least 1, got -1."),
        ({"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor of num_attention_heads = 6, got 4."),
    ],
)
def test_keys_that_mean_nothing_are_refused(llama: Path, tmp_path: Path, change: dict[str, Any], text: str) -> None:
    """By the file and the key, before settings are printed."""
    there = changed(llama, tmp_path / "there", change)
    assert checkpoint("import-hf", there).refused(f"{there}/config.json: {text}")


def test_what_serves_a_model_comes_back_from_its_config(llama: Path, tmp_path: Path) -> None:
    """Ids that begin and end a text, and its longest one, which the layers compute without; nothing that isn't one."""
    ids = {"bos_token_id": None, "eos_token_id": [5, 7], "max_position_embeddings": 96}
    there = changed(llama, tmp_path / "there", {**ids, "pad_token_id": {"a": 1}})
    checkpoint("import-hf", there, "--out", tmp_path / "out")
    checkpoint("export-hf", tmp_path / "out", tmp_path / "back")
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: described[key] for key in ids} == ids
    assert "pad_token_id" not in described


def test_a_key_that_drops_is_set_aside_by_name(llama: Path, tmp_path: Path) -> None:
    """On the command line, from where it goes into the printed settings, or in settings; an export has it again."""
    there = changed(llama, tmp_path / "there", {"attention_dropout": 0.25})
    assert checkpoint("import-hf", there).refused(
        f"{there}/config.json: attention_dropout: expected 0.0, as ours drops nothing of that kind at random, got 0.25."
        ' To train without: ignore = ["attention_dropout"] in the module\'s settings, or --ignore attention_dropout.'
    )
    ended = checkpoint("import-hf", there, "--ignore", "attention_dropout", "--out", tmp_path / "out").printed
    assert ended.count("set aside: attention_dropout = 0.25\n") == 1
    assert 'plugin = "decoder"\nignore = [\n    "attention_dropout",\n]\n' in ended
    text = '[run]\nname = "x"\nsteps = 1\nglobal_batch = 1\n[data]\nplugin = "jsonl"\npath = "none.jsonl"\n'
    settings = text + ended.partition("# ")[0].replace('"decoder"\n', '"decoder"\nranks = "0"\n')
    (tmp_path / "my.toml").write_text(settings)
    printed = checkpoint("import-hf", there, "--config", tmp_path / "my.toml")
    assert printed.refused("modules.language.config.vocabulary: expected at least the tokenizer's")  # all else fits
    checkpoint("export-hf", tmp_path / "out", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["attention_dropout"] == 0.25
    assert checkpoint("import-hf", llama, "--ignore", "attention_dropout").refused(
        "--ignore: expected a key of attention_dropout, other than 0 in a config.json of these folders, got "
    )
    (tmp_path / "my.toml").write_text(settings.replace('"attention_dropout"', '"rms_norm_eps"'))
    assert here("check", tmp_path / "my.toml").refused(
        "modules.language.ignore: expected keys that drop at random, of what 'decoder' reads: attention_dropout, got "
        "'rms_norm_eps'."
    )

"""Families that no plugin names go in and out by `hf-decoder`, are trained in a layout of their own, and load again."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import transformers
from commands import here, losses, succeed
from house import ROOT
from published import publish

from mimo.testing.comparison import tensors_of
from mimo_transformers import shrink

VOCABULARY = 15
"""Ids of the digits' tokenizer."""


def published(model_type: str, folder: Path) -> Any:
    """Write a small model of the library, and return its class."""
    keys = shrink(transformers.AutoConfig.for_model(model_type), vocab_size=VOCABULARY)
    config = transformers.AutoConfig.for_model(model_type, **keys)
    made = transformers.AutoModelForCausalLM.from_config(config)
    publish(made, folder)
    return type(made)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "llama"])
def test_a_family_goes_in_and_out_to_the_bit(tmp_path: Path, model_type: str) -> None:
    """As files, by the commands; of one that another plugin names where that is asked for."""
    made = published(model_type, tmp_path / "there")
    imported = here("checkpoint", "import-hf", tmp_path / "there", "--plugin", "hf-decoder", "--out", tmp_path / "ours")
    assert f"language: {model_type} from {tmp_path / 'there'} for hf-decoder, " in imported.printed
    exported = here("checkpoint", "export-hf", tmp_path / "ours", tmp_path / "back", "--shard-bytes", "9000")
    assert f"language as {made.__name__}, " in exported.printed
    before, after = tensors_of(tmp_path / "there"), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].equal(tensor) for name, tensor in after.items())
    _, loading = made.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(loading.values()), loading


@pytest.mark.soak
def test_a_mixture_is_tuned_beside_an_encoder_and_loads_again(tmp_path: Path) -> None:
    """Tensor and expert ranks learn what one process does; all that was learnt is in the folder, and nothing else."""
    made = published("deepseek_v3", tmp_path / "there")
    printed = here("checkpoint", "import-hf", tmp_path / "there", "--out", tmp_path / "ours").printed
    settings = tmp_path / "tuned.toml"
    settings.write_text(tomli_w.dumps(settings_of(printed)), encoding="utf-8")
    found = []
    for name, ranks, size in (("spread", "1-4", 2), ("alone", "0", 1)):
        grid = [f"modules.language.{word}" for word in (f"ranks={ranks}", f"tp={size}", f"ep={size}")]
        run = tmp_path / name
        succeed("train", settings, "--finetune", tmp_path / "ours", f"run.directory={run}", *grid)
        found.append(losses(run))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    here("checkpoint", "export-hf", tmp_path / "spread", tmp_path / "out")
    _, loading = made.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values()), loading
    before, after = tensors_of(tmp_path / "there"), tensors_of(tmp_path / "out")
    same = {name for name, tensor in before.items() if tensor.equal(after[name])}
    biases = {name for name in before if name.endswith("e_score_correction_bias")}  # which no gradient trains
    assert biases <= same
    assert {name for name in same - biases if ".experts." not in name} == set()  # an expert may have had no row


def settings_of(printed: str) -> dict[str, Any]:
    """Return the settings of a short run on digits with the language model that an import has printed."""
    settings = tomllib.loads((ROOT / "examples" / "digits.toml").read_text(encoding="utf-8"))
    settings["run"] |= {"steps": 3, "global_batch": 8, "micro_batch": 4, "evaluation_interval": 0}
    settings["data"] |= {"held_out": 0.01}
    settings["optimizer"] |= {"lr_schedule": "constant", "lr_min": 0.0, "lr_warmup_steps": 0}
    settings["modules"]["vision"] |= {"ranks": "0"}
    settings["modules"]["language"] = tomllib.loads(printed)["modules"]["language"]
    settings["logging"] = {"interval": 1}
    return settings

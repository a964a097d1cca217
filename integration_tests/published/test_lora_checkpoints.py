"""LoRA through checkpoints: begun on a model's weights, resumed, merged, exported; what cannot be is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Modules
from commands import here
from jobs import find, make_job
from published import TOKENS, VOCABULARY, logits_of
from resuming import check_trajectory, resume_and_save, resume_run, run_and_save, run_steps, same_bits
from tables import Table, table
from test_oracle import SP, on
from torch import Tensor

from mimo.checkpoint import latest, load, read_manifest, reshard
from mimo.hooks import ConfigError
from mimo.launch import ProcessInfo
from mimo.model import DECODER, DecoderConfig, Stage, lora_linear
from mimo.model.runtime import LanguageBatch
from mimo.testing import Pool
from mimo.testing.comparison import tensors_of
from mimo.trainer import resolve
from mimo.trainer.runtime import check_source, find_source, load_model, settings_of

DECODERS: Mapping[str, Any] = {
    "vocabulary": VOCABULARY,
    "hidden": 24,
    "layers": 3,
    "heads": 6,
    "kv_heads": 2,
    "intermediate": 37,
}
LORA: Mapping[str, Any] = {"rank": 2, "alpha": 32.0, "targets": ["layers.*"]}
FOUR: Modules = {"vision": on(0, 1, tp=2), "language": on(0, 3, pp=2, tp=2, **SP)}
ONE: Modules = {"vision": on(0, 0), "language": on(0, 0)}


def adapted(modules: Modules, directory: Path, **keys: Any) -> Table:
    """Return settings of a run of which both modules are adapted."""
    settings = table(modules, language=DECODERS)
    settings["run"]["directory"] = str(directory)
    settings["optimizer"]["lr"] = 0.02
    settings["modules"]["language"]["lora"] = {**LORA, "targets": ["layers.*", "head"]}
    settings["modules"]["vision"]["lora"] = dict(LORA)
    return settings | keys


def weights_of(run: Path) -> dict[str, Tensor]:
    """Return all that the newest checkpoint holds of the language model."""
    step = latest(run / "checkpoints") or run
    found = {
        name: torch.zeros(entry.shape)
        for name, entry in read_manifest(step).tensors.items()
        if name.startswith("language.")
    }
    load(step, dict(found))
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """A run of a step without LoRA."""
    settings = table(ONE, language=DECODERS)
    settings["run"]["directory"] = str(tmp_path_factory.mktemp("plain"))
    pool.run(1, resume_and_save, settings, 1, 1)
    return Path(settings["run"]["directory"])


@pytest.fixture(scope="module")
def loaded(plain: Path, tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> tuple[Path, str]:
    """A run of three steps on four ranks that begins with those weights and is adapted, and its summary."""
    run = tmp_path_factory.mktemp("adapted")
    found = pool.run(4, resume_and_save, adapted(FOUR, run, load={"finetune": str(plain)}), 1, 3)
    return run, found[0].summary


@pytest.fixture(scope="module")
def trained(loaded: tuple[Path, str]) -> Path:
    """That run's directory."""
    return loaded[0]


def test_weights_stay_to_the_bit_and_lora_begins_new(plain: Path, loaded: tuple[Path, str]) -> None:
    """LoRA is beside every weight of the model that the run began with; the summary counts it."""
    trained, text = loaded
    before, after = weights_of(plain), weights_of(trained)
    learned = {name: value for name, value in after.items() if lora_linear(name)}
    assert same_bits(before, {name: value for name, value in after.items() if name not in learned})
    assert len(learned) == 2 * (3 * 7 + 1)
    assert all(float(value.abs().max()) > 0 for value in learned.values())
    assert text.startswith(f"weights of step 1 loaded from {plain}/checkpoints/step_00000001; ")
    assert "; new: LoRA of language (44 entries), LoRA of vision (36 entries)" in text


def evaluated(_rank: int, folder: str) -> float:
    """Evaluate a step's folder as `mimo evaluate` does."""
    settings = settings_of(Path(folder), (), "evaluate")
    job = resolve(settings, purpose="evaluate", find=find)
    found = load_model(job, ProcessInfo(rank=0, world=1, local_rank=0), Path(folder)).evaluate(0)
    assert found is not None
    return found.loss


def test_merged_is_unmerged(plain: Path, trained: Path, tmp_path: Path, pool: Pool) -> None:
    """The same evaluation to 1e-5, another than without LoRA; a checkpoint of weights alone that knows no LoRA."""
    out = Path(here("checkpoint", "merge", trained, tmp_path / "merged").printed.strip())
    manifest = read_manifest(out)
    assert out == tmp_path / "merged" / "step_00000003"
    assert {name.partition(".")[0] for name in manifest.names} == {"vision", "language"}
    assert not any(lora_linear(name) for name in manifest.tensors)
    folders = [latest(trained / "checkpoints"), out, latest(plain / "checkpoints")]
    unmerged, merged, without = (pool.run(1, evaluated, str(folder))[0] for folder in folders)
    assert math.isclose(unmerged, merged, rel_tol=1e-5)
    assert abs(unmerged - without) > 1e-3 * without
    again = here("checkpoint", "merge", tmp_path / "merged", tmp_path / "again")
    assert again.code == 3
    assert "expected a checkpoint with LoRA in it, got one without. It needs no merging." in again.err


def test_exported_it_is_merged(trained: Path, tmp_path: Path) -> None:
    """`transformers` computes the logits of the merged checkpoint."""
    here("checkpoint", "merge", trained, tmp_path / "merged")
    assert (
        "language as LlamaForCausalLM, 30 tensors" in here("checkpoint", "export-hf", trained, tmp_path / "hf").printed
    )
    model: Any = DECODER.build(DecoderConfig(**DECODERS), Stage())
    load(
        tmp_path / "merged" / "step_00000003",
        {"language": {name: tensor.detach() for name, tensor in model.named_parameters()}},
    )
    batch = LanguageBatch.of(TOKENS, TOKENS, torch.arange(11), lengths=(11,))
    ours = model.logits(model(batch, {}, None))
    assert (logits_of(tmp_path / "hf", TOKENS) - ours).norm() <= 1e-5 * ours.norm()


def test_lora_alone_is_a_folder_of_an_adapter(trained: Path, tmp_path: Path) -> None:
    """By the names of the published model, which the library PEFT reads."""
    out = here("checkpoint", "export-hf", trained, tmp_path / "out", "--adapter")
    assert out.printed == f"{tmp_path / 'out'}: LoRA of language for LlamaForCausalLM, 44 tensors of float32\n"
    about = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (about["peft_type"], about["task_type"], about["r"], about["lora_alpha"]) == ("LORA", "CAUSAL_LM", 2, 32.0)
    assert len(about["target_modules"]) == 22
    found, held = tensors_of(tmp_path / "out"), weights_of(trained)
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    assert torch.equal(found[f"{name}.lora_A.weight"], held["language.layers.1.attention.query.lora.down"])
    assert torch.equal(found[f"{name}.lora_B.weight"], held["language.layers.1.attention.query.lora.up"])
    assert "base_model.model.lm_head.lora_A.weight" in found


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["same", "another layout"])
def test_resuming_is_never_having_stopped(other: bool, tmp_path: Path, pool: Pool) -> None:
    """To the bit, in another layout within rounding."""
    layout: Modules = {"vision": on(0, 0), "language": on(0, 1, tp=2)}
    straight = pool.run(2, run_steps, adapted(layout, tmp_path / "straight"), 1, 4, "")
    pool.run(2, run_and_save, adapted(layout, tmp_path / "first"))
    again: Modules = {"vision": on(0, 1), "language": on(0, 1, pp=2)} if other else layout
    resumed = pool.run(2, run_steps, adapted(again, tmp_path / "second"), 4, 4, str(tmp_path / "first"))
    check_trajectory(resumed, straight, exactly=not other)


def test_a_run_without_takes_no_checkpoint_with_it(trained: Path, tmp_path: Path) -> None:
    """The refusal says how to merge; `load.may_leave` allows it."""
    settings = adapted(ONE, tmp_path, load={"finetune": str(trained)})
    del settings["modules"]["language"]["lora"]
    job = make_job(settings)
    step = latest(trained / "checkpoints")
    text = (
        rf"^modules\.language\.lora: expected that of '{step}', of rank 2, got none\. Set it, or begin with its "
        rf"weights and what was added to them: `mimo checkpoint merge {step} OUT`\.$"
    )
    with pytest.raises(ConfigError, match=text):
        check_source(job, find_source(job.settings))
    settings["load"]["may_leave"] = ["language.*.lora.*"]
    check_source(job := make_job(settings), find_source(job.settings))


def test_another_scale_is_named(trained: Path, tmp_path: Path, pool: Pool) -> None:
    """The summary names it as a setting of the model."""
    settings = adapted(ONE, tmp_path, load={"finetune": str(trained)})
    settings["modules"]["language"]["lora"]["alpha"] = 8.0
    (found,) = pool.run(1, resume_run, settings, 1, 1)
    assert found.summary.endswith("; modules.language.lora.alpha 8.0 (was 32.0)")


@pytest.fixture(scope="module")
def small(plain: Path, tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """A run like the other one on as many ranks whose checkpoints hold what is trained alone."""
    run = tmp_path_factory.mktemp("small")
    keys = {"load": {"finetune": str(plain)}, "checkpoint": {"frozen": False}}
    pool.run(4, resume_and_save, adapted(FOUR, run, **keys), 1, 3)
    return run


def test_lora_is_saved_alone(plain: Path, small: Path, trained: Path, tmp_path: Path, pool: Pool) -> None:
    """The checkpoint names the folder of the rest; it is evaluated, merged, exported and resumed as if it held all."""
    step, whole = latest(small / "checkpoints"), latest(trained / "checkpoints")
    assert step is not None
    assert whole is not None
    manifest = read_manifest(step)
    base = latest(plain / "checkpoints")
    assert base is not None
    assert manifest.common["base.folder"] == str(base)
    assert (base / "needed_by").read_text() == f"{small}\n"  # and not by the run that holds all
    weights = {name for name in manifest.tensors if name.startswith(("vision.", "language."))}
    assert all(lora_linear(name) for name in weights)
    (found,), (wanted,) = (pool.run(1, evaluated, str(folder)) for folder in (step, whole))
    assert found == wanted
    for name, run in (("small", small), ("whole", trained)):
        here("checkpoint", "merge", run, tmp_path / name)
        here("checkpoint", "export-hf", run, tmp_path / f"{name}-hf")
    assert same_bits(*(weights_of(tmp_path / name / "step_00000003") for name in ("small", "whole")))
    assert same_bits(*(tensors_of(tmp_path / f"{name}-hf") for name in ("small", "whole")))
    again = [
        pool.run(2, resume_run, adapted({"vision": on(0, 0), "language": on(0, 1, tp=2)}, run, **keys), 4, 4)
        for run, keys in (
            (small, {"checkpoint": {"load": "latest", "frozen": False}}),
            (trained, {"checkpoint": {"load": "latest"}}),
        )
    ]
    assert all(same_bits(one.ended, other.ended) for one, other in zip(*again, strict=True))


def test_what_a_checkpoint_leaves_out_must_be_where_it_says(plain: Path, small: Path, tmp_path: Path) -> None:
    """The folder as it was; one that is gone or another is refused by its path."""
    step, base = latest(small / "checkpoints"), latest(plain / "checkpoints")
    assert base is not None
    hidden = base.with_name("hidden")
    base.rename(hidden)
    gone = here("checkpoint", "merge", small, tmp_path / "merged")
    base.mkdir()
    text = (hidden / "manifest.json").read_text()
    reshard(hidden, tmp_path / "other", parts=2)
    for file in (tmp_path / "other" / base.name).iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    other = here("checkpoint", "merge", small, tmp_path / "merged")
    for file in base.iterdir():
        file.unlink()
    base.rmdir()
    hidden.rename(base)
    assert (base / "manifest.json").read_text() == text
    beginning = f"mimo: {base}: expected the checkpoint with the weights that {step} leaves out"
    assert gone.err.startswith(f"{beginning}, got none. Put it back there. ")
    assert other.err.startswith(f"{beginning}, of the digest ")
    assert other.code == gone.code == 3


def test_what_no_checkpoint_has_is_saved(tmp_path: Path) -> None:
    """Initial values follow from the seed: they are in checkpoints, or none is saved."""
    job = make_job(adapted(ONE, tmp_path, checkpoint={"frozen": False}))
    text = r"^checkpoint\.frozen: expected true, since no checkpoint has what is not trained of vision, language, "
    with pytest.raises(ConfigError, match=text):
        check_source(job, None)

"""A generator that somebody else brings, with a table: into checkpoints, into runs of any layout, and out again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import painter
import pytest
import torch
from commands import install, mimo
from painter import FAMILY, PAINTER
from published import llama, same_tensors
from safetensors.torch import save_file

from mimo.model.runtime import read_hf, write_hf
from mimo.testing import Ended
from mimo.testing.comparison import tensors_of
from mimo_generator_flow import FlowConfig

HIDDEN = 24
CONFIG = FlowConfig(height=8, width=8, channels=1, patch=2, hidden=16, layers=3, heads=2, intermediate=20)
RUN = """
[run]
name = "painted"
steps = 1
global_batch = 8
micro_batch = 4
device = "cpu"
evaluation_interval = 0
[data]
plugin = "digits"
task = "draw"
[tokenizer]
plugin = "word"
words = ["draw", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
[modules.language]
plugin = "decoder"
ranks = "0"
config = { hidden = 24, layers = 1, heads = 2, intermediate = 16 }
[modules.drawer]
plugin = "painter"
fed_by = "language"
ranks = "0"
config = { height = 8, width = 8, channels = 1, patch = 2, hidden = 16, layers = 3, heads = 2, intermediate = 20 }
"""
SLICES = ("modules.drawer.ranks=0-3", "modules.drawer.tp=2", "modules.drawer.sequence_parallel=true")
STAGES = ("modules.drawer.ranks=0-3", "modules.drawer.pp=2", "modules.language.ranks=0-1")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A published folder of rows as wide as the language model of the run, beside settings of that."""
    (tmp_path / "run.toml").write_text(RUN)
    return publish(tmp_path / "there")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Type commands where the plugin is installed."""
    source = Path(painter.__file__).read_text(encoding="utf-8")
    site = install(tmp_path / "site", "their_painter", source, "mimo.generators")
    return lambda *words: mimo(*words, cwd=tmp_path, path=site)


def publish(folder: Path, before: str = "") -> Path:
    """Write a generator in which every weight matters, as bfloat16."""
    module, generator = PAINTER.build(CONFIG, HIDDEN), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    written = write_hf(module, FAMILY, CONFIG)
    folder.mkdir()
    save_file({f"{before}{name}": one.bfloat16() for name, one in written.items()}, folder / "model.safetensors")
    about = {"model_type": FAMILY.model_type, **FAMILY.describe(CONFIG)}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.soak
def test_a_generator_goes_through_runs_of_any_layout_to_the_bit(
    there: Path, run: Callable[..., Ended], tmp_path: Path
) -> None:
    """From a folder into tensor ranks and lanes, from there into stages and lanes, and out; it is frozen meanwhile."""
    said = run("checkpoint", "import-hf", f"drawer={there}", "--config", "run.toml", "--out", "weights").printed
    assert f"drawer: painter_dit from {there} for painter, 54 tensors, bfloat16 there and float32 here" in said
    words = ("train", "run.toml", "modules.drawer.frozen=true")
    said = run(*words, *SLICES, "--finetune", "weights", "run.directory=slices").printed
    assert "drawer" not in said.partition("new: ")[2].partition("\n")[0]
    run(*words, *STAGES, "--finetune", "slices", "run.directory=stages").printed  # noqa: B018 - it must have succeeded
    said = run("checkpoint", "export-hf", "stages", "back", "--module", "drawer", "--dtype", "bfloat16").printed
    assert said.startswith("back: drawer as PainterTransformer, ")
    assert same_tensors(there, tmp_path / "back")
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    architecture = {"architectures": ["PainterTransformer"], "dtype": "bfloat16"}
    assert about == {**json.loads((there / "config.json").read_text()), **architecture}


def test_a_module_in_memory_is_read_and_written_as_a_checkpoint_is(there: Path) -> None:
    """By the same table."""
    module = PAINTER.build(CONFIG, HIDDEN)
    assert read_hf(module, FAMILY, CONFIG, tensors_of(there)) == ()
    written = write_hf(module, FAMILY, CONFIG)
    assert {name: one.bfloat16().tolist() for name, one in written.items()} == {
        name: one.tolist() for name, one in tensors_of(there).items()
    }


def test_settings_are_printed_and_compared(there: Path, run: Callable[..., Ended]) -> None:
    """A folder's are a generator's; those of a run that differ are named, and tensors for rows of another width."""
    printed = tomllib.loads(run("checkpoint", "import-hf", there).printed)["modules"]["painter"]
    assert (printed["plugin"], printed["fed_by"]) == ("painter", "language")
    assert FlowConfig(**printed["config"]) == CONFIG
    file = there.parent / "run.toml"
    file.write_text(RUN.replace("layers = 3", "layers = 2"))
    assert run("checkpoint", "import-hf", f"drawer={there}", "--config", "run.toml").refused(
        f"modules.drawer.config.layers: expected 3, as {there}/config.json says, got 2. `mimo checkpoint import-hf "
    )
    file.write_text(RUN.replace("hidden = 24", "hidden = 32"))
    wide = run("checkpoint", "import-hf", f"drawer={there}", "--config", "run.toml")
    assert wide.code == 3
    assert "caption_projection.weight: shape [16, 24] there, [16, 32] here" in wide.err


def test_a_generator_without_a_table_is_refused(there: Path, run: Callable[..., Ended]) -> None:
    """By the path of its plugin, with what to do; and one whose settings no folder can say by the path of these."""
    (there.parent / "run.toml").write_text(RUN.replace('"painter"', '"flow"'))
    assert run("checkpoint", "import-hf", f"drawer={there}", "--config", "run.toml").refused(
        "modules.drawer.plugin: expected one with a table of published weights, `hf` of its spec, got generator "
        "'flow', which has none. Name another module, or give the plugin a table; `mimo models` lists what can be "
        "read and written."
    )
    (there.parent / "run.toml").write_text(RUN.replace("intermediate = 20", 'intermediate = 20, activation = "relu"'))
    refused = run("checkpoint", "import-hf", f"drawer={there}", "--config", "run.toml")
    assert refused.code == 2
    assert "config.activation: expected 'gelu_tanh', as painters have, got 'relu'." in refused.err


def test_a_folder_may_hold_a_generator_beside_a_language_model(tmp_path: Path, run: Callable[..., Ended]) -> None:
    """Each is found by its section, and the generator's names may have a prefix."""
    text, made = llama(tmp_path / "whole"), publish(tmp_path / "made", before="generator.")
    sections = {"text_config": text / "config.json", "generator_config": made / "config.json"}
    whole = {key: json.loads(file.read_text()) for key, file in sections.items()}
    tensors = {**tensors_of(text), **tensors_of(made)}
    save_file(tensors, text / "model.safetensors")
    (text / "config.json").write_text(json.dumps({"model_type": "both", **whole}))
    said = run("checkpoint", "import-hf", text, "--out", "both").printed
    assert {name: one["plugin"] for name, one in tomllib.loads(said)["modules"].items()} == {
        "language": "decoder",
        "painter": "painter",
    }
    run("checkpoint", "export-hf", "both", "back", "--module", "painter", "--dtype", "bfloat16").printed  # noqa: B018 - it must have succeeded
    back = {f"generator.{name}": one for name, one in tensors_of(tmp_path / "back").items()}
    assert back.keys() == tensors_of(made).keys()
    assert all(torch.equal(one, back[name]) for name, one in tensors_of(made).items())


def test_its_family_is_listed_and_tried(run: Callable[..., Ended]) -> None:
    """With what it becomes, and along which axes it can be split."""
    listed = json.loads(run("models", "--json").printed)
    (one,) = (one for one in listed if one["model_type"] == "painter_dit")
    assert (one["plugin"], one["part"], one["first"], one["named"]) == ("painter", "image generator", True, True)
    assert one["axes"] == ["tp", "sequence_parallel", "cp", "pp"]
    (tried,) = json.loads(run("models", "painter_dit", "--json").printed)
    assert (tried["problem"], tried["refused"]["tp"], tried["refused"]["pp"]) == ("", "", "")
    assert tried["refused"]["ep"] == "expected 1, since generator 'painter' has no experts, got 2"

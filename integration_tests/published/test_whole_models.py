"""Whole image-text models go in, are trained as the library would in any layout, and come out for it to load."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import transformers
from cases import some
from commands import here, losses, succeed
from parity_whole import IMAGE, PROMPT, TOKENS, compare_greedy
from published_images import FOLDERS
from safetensors.torch import save_file
from small_models import is_older
from whole_jobs import BOUND, LAYOUTS, Whole, greedy_logits, world_of_grids
from whole_models import (
    checkpoint_tensors,
    library_step,
    load,
    tune,
    write_conversations,
    write_whole,
)

import mimo_transformers
from mimo.model.runtime import create_on
from mimo.testing import Pool
from mimo.testing.comparison import tensors_of
from mimo.trainer import read_settings, resolve
from mimo_transformers.weights.table import images_table
from mimo_transformers.whole.trial import build_images, width_of

REFUSED = {
    "paligemma": "got 'gemma': modules.language.config.model_type: expected attention with is_causal = True, got False",
}
"""Families that are read or prepared, and can't be trained."""
NEWER = {"got_ocr2", "paddleocr_vl"}
"""Folders of which releases before the newest write other keys."""
WHOLE = tuple(name for name in FOLDERS if name not in REFUSED)
OF_CLASSES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    **{name: f"model.{name}" for name in ("vision_tower.", "multi_modal_projector.", "image_newline")},
}
"""Names of tensors in a folder, and in the library's class, which some versions write."""
CHOOSING = ".e_score_correction_bias"
"""Ends the names of what chooses experts and has no gradient."""
QUICK = frozenset({"llava_next", "qwen2_5_vl"})
"""Tiles with rows between them, and patches with places: what differs most."""
SOURCES = sorted(Path(mimo_transformers.__file__).parent.rglob("*.py"))
WRITTEN = [name for name in WHOLE if not (name in NEWER and is_older("5.23"))]
DRAWN = WRITTEN[zlib.crc32(b"".join(file.read_bytes() for file in SOURCES)) % len(WRITTEN)]
"""Another one whenever the plugin changes, of those that the installed library writes."""


def imported(name: str, path: Path) -> Whole:
    """Return one model, imported; a test of one that the installed library writes otherwise is skipped."""
    if name not in WRITTEN:
        pytest.skip(f"transformers {transformers.__version__} writes other keys of {name}")
    return Whole(name, path)


@pytest.fixture(scope="module", params=some(WHOLE, QUICK))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return one model, imported, and what the library makes of a step with it."""
    return imported(request.param, tmp_path_factory.mktemp("whole"))


def test_one_process_computes_what_the_library_computes(whole: Whole, pool: Pool) -> None:
    """Loss, logits and every gradient of ragged conversations with images, in four microbatches of two samples."""
    assert whole.differences(pool.run(1, tune, whole.settings)) == []


@pytest.mark.parametrize("number", some(range(LAYOUTS), {0}))
def test_drawn_layouts_compute_what_the_library_computes(whole: Whole, pool: Pool, number: int) -> None:
    """Of grids that are drawn by the model's name."""
    words, settings = whole.layouts()[number]
    assert whole.differences(pool.run(world_of_grids(settings), tune, settings)) == [], words


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_compiled_layers_compute_what_the_library_computes(name: str, pool: Pool, tmp_path: Path) -> None:
    """Where rows of an image see each other in both directions, and where rows turn by their places in images."""
    settings = (whole := Whole(name, tmp_path)).settings
    settings["run"] |= {"compile": True, "compile_backend": "aot_eager"}
    assert whole.differences(pool.run(1, tune, settings)) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", some(WHOLE, {"qwen3_vl"}))
def test_layers_in_pieces_compute_what_the_library_computes(name: str, pool: Pool, tmp_path: Path) -> None:
    """Two lanes gather each layer when it computes; in one tower parts of the projector compute between its layers."""
    whole = Whole(name, tmp_path)
    settings = whole.spread({"ranks": "0-1"}, {"ranks": "0-1"})
    settings["optimizer"] = {**settings.get("optimizer", {}), "plugin": "distributed", "shard": "full"}
    assert whole.differences(pool.run(2, tune, settings)) == []


def test_a_whole_model_comes_back_to_the_bit(whole: Whole, tmp_path: Path) -> None:
    """With all files beside it, and the library's class loads it with nothing missing."""
    assert whole.export(tmp_path / "back")


@pytest.fixture(scope="module", params=some(WHOLE, {DRAWN}))
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return one model, imported."""
    return imported(request.param, tmp_path_factory.mktemp("tuned"))


def fine_tune(whole: Whole, pool: Pool, name: str, *overrides: str, **vision: Any) -> set[str]:
    """Train three steps over four processes with a grid for each half, and hold what is exported to the library.

    Its class loads the folder with nothing missing, its loss is that of the fourth step, and its logits are ours.

    Args:
        whole: the model.
        pool: where the trained model generates.
        name: of the run.
        overrides: of the settings.
        vision: keys of the encoder.

    Returns:
        Which tensors have changed.
    """
    settings = whole.spread({"ranks": "0-1", **vision}, {"ranks": "2-3", "pp" if "tp" in whole.refused[1] else "tp": 2})
    settings["run"] |= {"steps": 3, "directory": str(whole.path / name)}
    settings |= {"optimizer": {"lr": 1e-2}, "logging": {"interval": 1}}
    file = whole.path / f"{name}.toml"
    file.write_text(tomli_w.dumps(settings), encoding="utf-8")
    succeed("train", file, *overrides)
    exported = whole.path / f"{name}-exported"
    here("checkpoint", "export-hf", whole.path / name, exported)
    model, loading = load(exported)
    assert not any(loading.values()), loading
    (logits,) = pool.run(1, greedy_logits, whole.path / name, model, whole.path / "data" / IMAGE, PROMPT, TOKENS)
    _, difference, wrong = compare_greedy(*logits)
    assert (wrong, difference < BOUND) == ([], True), difference
    succeed("train", file, *overrides, "run.steps=4", "checkpoint.load=latest")
    loss, _, _ = library_step(model, resolve(read_settings(whole.settings)))
    assert losses(whole.path / name)[3] == pytest.approx(loss, rel=BOUND)
    before, after = tensors_of(whole.there), tensors_of(exported)
    assert before.keys() == after.keys()
    return {key for key, tensor in before.items() if not tensor.equal(after[key])}


def of_the_tower(whole: Whole, *, frozen: bool = True) -> set[str]:
    """Return the names of an encoder's tensors that don't train: of a frozen tower, and what no row depends on."""
    (encoder,) = resolve(read_settings(whole.settings)).encoders
    with create_on("meta"):
        module = build_images(encoder.config, width_of(encoder.config))
    fixed = {
        name
        for name, one in module.named_parameters()
        if (frozen and name.startswith("encoder.")) or not one.requires_grad
    }
    return {name for entry in images_table(encoder.config) if entry.ours in fixed for name in entry.names}


def test_a_tuned_model_is_the_librarys(tuned: Whole, pool: Pool) -> None:
    """Its projector and language model have changed, its frozen tower to no bit."""
    changed = fine_tune(tuned, pool, "full", frozen=["encoder"])
    tower = of_the_tower(tuned)
    assert len(tower) > 10
    assert changed == {name for name in tensors_of(tuned.there).keys() - tower if not name.endswith(CHOOSING)}


@pytest.mark.soak
def test_a_tuned_tower_is_the_librarys(tuned: Whole, pool: Pool) -> None:
    """Where nothing is frozen all has changed but what no row of an image depends on."""
    changed = fine_tune(tuned, pool, "tower")
    still = of_the_tower(tuned, frozen=False)
    assert still < of_the_tower(tuned)
    assert changed == {name for name in tensors_of(tuned.there).keys() - still if not name.endswith(CHOOSING)}


@pytest.mark.soak
def test_lora_changes_what_it_adapts(tuned: Whole, pool: Pool) -> None:
    """Beside linears of the language model; all else is as it was."""
    is_ours = tuned.settings["modules"]["language"]["plugin"] == "decoder"
    targets = "*.attention.query" if is_ours else "*.q_proj"
    lora = f'modules.language.lora={{rank=2,targets=["{targets}"]}}'
    changed = fine_tune(tuned, pool, "lora", lora, frozen=True)
    assert changed == {name for name in tensors_of(tuned.there) if name.endswith("q_proj.weight")} - of_the_tower(tuned)


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("llava", {"vision_tower.": "vision_tower.vision_model."}),  # as first published
        pytest.param("llava_next", OF_CLASSES, marks=pytest.mark.soak),
        pytest.param("gemma3", {"vision_tower.": "vision_tower.vision_model."}, marks=pytest.mark.soak),
        ("qwen2_5_vl", {"visual.": "model.visual.", "model.": "model.language_model."}),
    ],
)
def test_names_of_other_versions_are_read(name: str, prefixes: Mapping[str, str], tmp_path: Path) -> None:
    """That the library reads itself, so that they are right."""
    write_whole(name, tmp_path / "there")
    here("checkpoint", "import-hf", tmp_path / "there", "--out", tmp_path / "ours")
    held = tensors_of(tmp_path / "there")
    renamed = {with_prefix(key, prefixes): tensor for key, tensor in held.items()}
    assert renamed.keys() != held.keys()
    save_file(renamed, tmp_path / "there" / "model.safetensors", metadata={"format": "pt"})
    _, loading = load(tmp_path / "there")
    assert not any(loading.values()), loading
    here("checkpoint", "import-hf", tmp_path / "there", "--out", tmp_path / "again")
    one, other = (checkpoint_tensors(tmp_path / folder) for folder in ("ours", "again"))
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[key]) for key, tensor in one.items())


def with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with another beginning, that of the first prefix that it has."""
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if found is None else prefixes[found] + name.removeprefix(found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_model_is_refused(name: str, tmp_path: Path) -> None:
    """At the import, or before a run begins."""
    write_whole(name, tmp_path / "there")
    data = write_conversations(tmp_path / "data")
    file = tmp_path / "my.toml"
    ended = here("checkpoint", "import-hf", tmp_path / "there", "--out", tmp_path / "ours", "--settings", file)
    if ended.code == 0:
        ended = here("check", file, f"data.path={data}")
    assert ended.code in {2, 3}  # the settings, or the names of its tensors
    assert REFUSED[name] in ended.err


def test_a_part_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    """And what is left behind is named; of the projector alone, or the tower alone, there is none."""
    write_whole("llava", tmp_path / "there")
    shown = here("checkpoint", "import-hf", tmp_path / "there", "--part", "language").printed
    assert "left behind in" in shown
    assert "multi_modal_projector.* (4 tensors)" in shown
    assert "[modules.vision" not in shown
    refused = here("checkpoint", "import-hf", tmp_path / "there", "--part", "audio")
    assert refused.refused("--part: expected one of language, vision, got 'audio'.")


def test_settings_are_written_once_and_for_a_language_model(tmp_path: Path) -> None:
    """A file that is there stays; without a language model there is nothing to train."""
    write_whole("llava", tmp_path / "there")
    file = tmp_path / "my.toml"
    words = ("checkpoint", "import-hf", tmp_path / "there", "--settings", file)
    assert here(*words, "--part", "vision").refused(
        "--settings: expected one folder with a language model, got vision."
    )
    assert here(*words).code == 0
    assert here(*words).refused(f"--settings: expected a new file, got {str(file)!r}.")
    (tmp_path / "there" / "tokenizer.json").unlink()
    other = ("checkpoint", "import-hf", tmp_path / "there", "--settings", tmp_path / "other.toml")
    assert here(*other).refused(
        f"--settings: expected a tokenizer.json in the folder, got none in {tmp_path / 'there'}."
    )


def test_an_imported_model_answers_at_once(tmp_path: Path) -> None:
    """Its checkpoint has the settings, so that nothing has to be trained before an image is shown to it."""
    write_whole("mistral3", tmp_path / "there")
    write_conversations(tmp_path / "data")
    words = ("--out", tmp_path / "ours", "--settings", tmp_path / "my.toml")
    here("checkpoint", "import-hf", tmp_path / "there", *words)
    image = tmp_path / "data" / "1.png"
    asked = ("--image", image, "--message", "<image>what?", "--max-tokens", "4")
    assert succeed("generate", tmp_path / "ours", *asked)


def test_the_encoder_of_a_whole_model_stands_for_all_of_it(tmp_path: Path) -> None:
    """As the help says; its language model can be written alone."""
    shown = " ".join(here("checkpoint", "export-hf", "--help").printed.replace("│", " ").split())
    assert "the encoder of a published model that was read whole stands for all of it" in shown
    write_whole("llava", tmp_path / "there")
    here("checkpoint", "import-hf", tmp_path / "there", "--out", tmp_path / "ours")
    found = {}
    for module in ("vision", "language"):
        here("checkpoint", "export-hf", tmp_path / "ours", tmp_path / module, "--module", module)
        found[module] = tensors_of(tmp_path / module).keys()
    assert found["vision"] == tensors_of(tmp_path / "there").keys()
    assert not any(word in name for name in found["language"] for word in ("vision_tower", "projector"))

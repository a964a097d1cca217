"""Which families installed plugins read, which plugin comes first, and what is recorded or tried of them."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console
from torch import nn

from mimo.hooks import ConfigError
from mimo.model import DECODER, HYBRID, EncoderSpec, GeneratorSpec, HfFamilies, HfFamily, HfTested
from mimo.trainer.commands.tables.models import show_trials
from mimo.trainer.published.families import axes_in_words, read_families, try_family, try_folder

RECORD: Mapping[str, Mapping[str, Any]] = {
    "llama": {"version": "library 2", "problem": "", "refused": {"cp": "rows are mixed"}},
    "olmo": {"version": "library 2", "problem": "it draws random numbers", "refused": {}},
}
ANY = attrs.evolve(
    DECODER,
    name="any",
    hf=(),
    hf_any=HfFamilies(
        of=lambda _kind: None,
        type_of=lambda _config: "toy",
        known=lambda: ["toy", "olmo", "llama"],
    ),
    hf_record=None,
)

PIXELS = EncoderSpec(
    name="pixels",
    config=dict,
    measure=lambda _raw: (1,),
    rows=lambda _config, _size: 1,
    prepare=lambda _config, _raw: {},
    build=lambda _config, _hidden: nn.Identity(),
)


def test_a_plugin_that_names_a_family_comes_before_one_that_reads_any() -> None:
    """Whatever is installed first; families are in order, each plugin's by itself."""
    found = read_families([ANY, attrs.evolve(DECODER, hf=DECODER.hf[:1])])
    assert [(one.model_type, one.plugin, one.first, one.named) for one in found] == [
        ("llama", "decoder", True, True),
        ("llama", "any", False, False),
        ("olmo", "any", True, False),
        ("toy", "any", True, False),
    ]


def written(folder: Path, plugin: str, record: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a record of a plugin's families and return its file."""
    (folder / "record.json").write_text(json.dumps({plugin: record}))
    return folder / "record.json"


def test_a_whole_model_comes_beside_its_language_model(tmp_path: Path) -> None:
    """What is recorded of the whole says with which plugin; both are first."""
    record = written(tmp_path, "pixels", {"llama": {**RECORD["llama"], "language": "decoder"}})
    assert ANY.hf_any is not None
    known = attrs.evolve(ANY.hf_any, known=lambda: ["llama", "toy"])
    found = read_families([attrs.evolve(PIXELS, hf_any=known, hf_record=record), DECODER])
    assert [(one.part, one.plugin, one.first, one.language) for one in found if one.model_type == "llama"] == [
        ("language", "decoder", True, ""),
        ("image", "pixels", True, "decoder"),
    ]


def test_a_generator_is_listed_beside_an_encoder_of_its_name() -> None:
    """By what it becomes; it has the axes of its own plugin."""
    family = HfFamily(
        model_type="brush", architecture="Brush", settings=dict, describe=lambda _config: {}, tensors=lambda _config: ()
    )
    brush = GeneratorSpec(
        name="pixels",
        config=dict,
        measure=lambda _raw: (1,),
        targets=lambda _config, _size: 1,
        prepare=lambda _config, _raw: {},
        build=lambda _config, _hidden: nn.Identity(),
        hf=[family],
    )
    seen = attrs.evolve(PIXELS, hf=[attrs.evolve(family, model_type="lens")])
    found = read_families([seen, brush])
    assert [(one.model_type, one.plugin, one.part, one.first, one.axes) for one in found] == [
        ("brush", "pixels", "image generator", True, ()),
        ("lens", "pixels", "image", True, ()),
    ]


def test_axes_are_the_plugins_without_what_is_recorded_to_be_refused(tmp_path: Path) -> None:
    """Nothing is known of a family without record, and nothing is left of one that can't be trained."""
    recorded = attrs.evolve(ANY, hf_record=written(tmp_path, "any", RECORD))
    found = {(one.model_type, one.plugin): one for one in read_families([recorded, DECODER])}
    assert found["llama", "any"].axes == ("tp", "sequence_parallel", "pp", "ep", "etp")
    assert found["llama", "any"].tested == HfTested(version="library 2", refused={"cp": "rows are mixed"})
    assert (found["olmo", "any"].axes, found["olmo", "any"].problem) == ((), "it draws random numbers")
    assert (found["toy", "any"].axes, found["toy", "any"].problem) == (None, "")


def test_families_that_a_plugin_names_are_recorded_under_its_name() -> None:
    """Another plugin that is made of it, under a name of its own, has no share in what was found."""
    found = {one.model_type: one for one in read_families([DECODER])}
    assert found["qwen3"].tested is not None
    assert found["qwen3"].tested.version.startswith("transformers 5.")
    assert not any(one.tested for one in read_families([attrs.evolve(DECODER, name="mine")]))


def test_experts_have_axes_where_a_family_has_experts() -> None:
    """A family whose config.json can't be empty is taken as the plugin's own defaults."""
    axes = {one.model_type: one.axes for one in read_families([DECODER, HYBRID])}
    assert axes["llama"] == ("tp", "sequence_parallel", "cp", "pp")
    assert axes["qwen3_moe"] == ("tp", "sequence_parallel", "cp", "pp", "ep", "etp")
    assert "nemotron_h" in axes
    assert axes_in_words(axes["llama"]) == "dp tp sequence_parallel cp pp"


def test_a_trial_gives_the_reason_of_each_refusal() -> None:
    """Of the family as its plugin builds it."""
    (found,) = (one for one in try_family("llama") if one.read.plugin == "decoder")
    assert {axis for axis, reason in found.refused.items() if not reason} == {"tp", "sequence_parallel", "cp", "pp"}
    assert found.refused["ep"] == "expected 1, since language model 'decoder' has no experts, got 2"


def test_a_folder_is_tried_by_what_it_says(tmp_path: Path) -> None:
    """Its weights aren't needed; what its config.json says decides, and what ours can't do is refused by its key."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    (found,) = try_folder(tmp_path)
    assert (found.read.plugin, found.read.first, found.problem, found.untried) == ("decoder", True, "", "")
    assert found.refused["pp"] == "expected at most its layers = 1, got 2"
    assert found.refused["tp"] == ""
    sections = {"text_config": {"model_type": "llama"}, "audio_config": {"model_type": "ear"}}
    file.write_text(json.dumps({"model_type": "composed", **sections}))
    text, sound = try_folder(tmp_path)
    assert (text.read.model_type, text.problem) == ("llama", "")
    assert (sound.read.model_type, sound.read.plugin, sound.read.part) == ("ear", "", "audio_config")
    assert sound.problem == "nothing that is installed reads it in this folder"
    lines = Console(width=200, record=True, file=io.StringIO())
    lines.print(*show_trials([sound]))
    assert lines.export_text().startswith("ear: no plugin, audio_config")
    file.write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ConfigError, match=r"config\.json model_type: expected a family that can be read here: "):
        try_folder(tmp_path)


def test_an_unknown_family_is_refused_with_the_closest() -> None:
    """Or with where they are listed."""
    with pytest.raises(
        ConfigError,
        match=r"model_type: expected one that .* reads, or a published folder, got 'lama'\. Did you mean 'llama'",
    ):
        try_family("lama")
    with pytest.raises(ConfigError, match=r"`mimo models` lists them"):
        try_family("#")

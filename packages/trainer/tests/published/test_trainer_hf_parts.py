"""Which modules a published ``config.json`` describes."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from mimo.hooks import ConfigError
from mimo.model import DECODER, HfFamilies, LanguageModelSpec
from mimo.trainer.published.find import find_parts
from mimo.trainer.published.readers import check_plugins, installed_modules, readers_of

TEXT = {
    "vocab_size": 7,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
}


def test_text_of_a_vision_model_is_found_in_its_section_or_beside_the_rest() -> None:
    """Qwen2-VL was published with all keys on one level; since transformers 5 a section holds those that count."""
    readers = readers_of([("language", DECODER)])
    (flat,) = find_parts(Path("folder"), {**TEXT, "model_type": "qwen2_vl"}, readers)
    section = {**TEXT, "model_type": "qwen2_vl_text"}
    (nested,) = find_parts(Path("folder"), {"model_type": "qwen2_vl", "text_config": section}, readers)
    assert (flat.section, nested.section) == ("", "text_config")
    assert flat.config == nested.config
    assert flat.config.mrope_section == (1, 1, 0)


def test_vision_that_is_called_as_the_whole_is_no_language_model() -> None:
    """Qwen2-VL's tower has the name of all of it in folders that transformers 4 wrote."""
    readers = readers_of([("language", DECODER)])
    for kind in ("qwen2_vl", "qwen2_5_vl"):
        whole = {"model_type": kind, "vision_config": {"model_type": kind, "hidden_size": 12, "depth": 3}}
        (flat,) = find_parts(Path("folder"), {**TEXT, **whole}, readers)
        section = {"text_config": {**TEXT, "model_type": f"{kind}_text"}}
        (nested,) = find_parts(Path("folder"), {**whole, **section}, readers)
        assert (flat.section, nested.section) == ("", "text_config")
        assert (flat.config.layers, flat.config) == (1, nested.config)


def test_a_composed_folder_ties_embeddings_in_either_place() -> None:
    """As transformers reads it: beside the sections since its version 5, in the text's before."""
    readers = readers_of([("language", DECODER)])
    text, tied = {**TEXT, "model_type": "qwen2_vl_text"}, {"tie_word_embeddings": True}
    for outer, inner, expected in (({}, {}, False), (tied, {}, True), ({}, tied, True)):
        described = {"model_type": "llava", "text_config": {**text, **inner}, **outer}
        (part,) = find_parts(Path("folder"), described, readers)
        assert part.config.tied is expected


def test_no_quantization_may_be_said() -> None:
    """Some folders have the key with nothing in it."""
    described = {**TEXT, "model_type": "qwen2_vl", "quantization_config": None}
    assert find_parts(Path("folder"), described, readers_of([("language", DECODER)]))


ANY = attrs.evolve(
    DECODER,
    name="any",
    hf=(),
    hf_any=HfFamilies(
        of=lambda kind: attrs.evolve(DECODER.hf[0], model_type=kind) if kind.startswith("t") else None,
        type_of=lambda _config: "toy",
    ),
)


def test_a_plugin_that_reads_any_family_comes_after_one_that_names_it() -> None:
    """What nobody names it reads, of composed models if asked; what it doesn't know is refused."""
    modules = [("language", ANY), ("language", DECODER)]
    keys = {key: value for key, value in TEXT.items() if key != "rope_scaling"}

    def read(kind: str) -> tuple[str, str]:
        (part,) = find_parts(Path("folder"), {**keys, "model_type": kind}, readers_of(modules), open_to=modules)
        return part.reader.spec.name, part.reader.family.model_type

    assert read("llama") == ("decoder", "llama")
    assert read("toy") == ("any", "toy")
    described = {"model_type": "vlm", "text_config": {**keys, "model_type": "toy"}}
    (part,) = find_parts(Path("folder"), described, (), open_to=modules, in_sections=True)
    assert part.section == "text_config"
    with pytest.raises(ConfigError, match="expected a family that can be read here"):
        find_parts(Path("folder"), described, (), open_to=modules)
    with pytest.raises(ConfigError, match="expected a family that can be read here"):
        read("other")


def test_one_plugin_may_be_asked_for() -> None:
    """Of those that are installed; encoders stay where only a language model is named."""
    every, found = installed_modules(""), installed_modules("", ("decoder",))
    assert [spec.name for _, spec in found if isinstance(spec, LanguageModelSpec)] == ["decoder"]
    assert [one for one in found if one[0] != "language"] == [one for one in every if one[0] != "language"]
    check_plugins(("decoder",), ("language", "vision"))
    with pytest.raises(ConfigError, match=r"--plugin: expected one of .*decoder, .*hybrid, got 'nope'"):
        check_plugins(("decoder", "nope"), ("vision", "language"))
    with pytest.raises(ConfigError, match=r"--plugin: expected .*, got 'decoder'"):
        check_plugins(("decoder",), ("vision",))

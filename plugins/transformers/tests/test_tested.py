"""What is recorded of families, and which families the plugins list."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from small_models import known as is_known

from mimo.model import EncoderSpec, HfTested, LanguageModelSpec, read_hf_tested
from mimo_transformers import HF_DECODER, HF_ENCODER, HF_IMAGES, shrink
from mimo_transformers.family import causal_types, config_of, is_causal, is_tower, tower_types
from mimo_transformers.weights import tested as record


def recorded(spec: LanguageModelSpec | EncoderSpec) -> Mapping[str, HfTested]:
    """Return what is recorded of a plugin's families."""
    assert spec.hf_record is not None
    return read_hf_tested(spec.hf_record, spec.name)


def test_the_record_says_what_can_be_trained_and_along_which_axes() -> None:
    """Of families that compute what the library computes, and of those that are refused, why."""
    families = recorded(HF_DECODER)
    assert (families["llama"].problem, set(families["llama"].refused)) == ("", {"ep", "etp"})
    assert families["llama"].version.startswith("transformers 5.")
    assert set(families["bitnet"].refused) == {"tp", "ep", "etp"}
    assert "which a small one fails" in families["bitnet"].refused["tp"]
    assert not any(one.language for one in families.values())
    assert families["phimoe"].problem == "'phimoe': a small one draws random numbers while it trains"


def test_the_record_of_whole_models_is_by_their_type(tmp_path: Path) -> None:
    """Several folders of one type are one family, which can be trained where one of them can."""
    families = recorded(HF_IMAGES)
    assert "llava padded" not in families
    assert (families["llava"].problem, families["llava"].language) == ("", "decoder")
    assert (families["gemma3"].problem, families["gemma3"].language) == ("", "hf-decoder")
    assert families["paligemma"].problem.endswith("is_causal = True, got False, from GemmaAttention.")
    one: dict[str, Any] = {"model_type": "a", "version": "x 1", "problem": "", "refused": {}, "language": "decoder"}
    folders = {"a": {**one, "problem": "wrong"}, "a b": one, "a c": {**one, "refused": {"tp": "heads"}}}
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"one": folders, "other": {"a": folders["a"]}}))
    assert read_hf_tested(file, "one") == {"a": HfTested(version="x 1", refused={"tp": "heads"}, language="decoder")}
    assert read_hf_tested(file, "other")["a"].problem == "wrong"
    assert read_hf_tested(file, "none") == {}


def test_families_are_those_of_the_record_while_it_is_of_the_installed_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the library's own are looked up, which takes seconds."""
    towers = recorded(HF_ENCODER)
    (version,) = {one.version for one in towers.values()}
    monkeypatch.setattr(record, "version", lambda _name: version.partition(" ")[2])
    assert record.known("hf-encoder", list, is_tower) == tuple(towers)
    monkeypatch.setattr(record, "version", lambda _name: "4")
    assert record.known("hf-encoder", lambda: ["other"], is_tower) == ["other"]


def test_the_library_lists_what_might_be_read() -> None:
    """Language models of text alone; towers, and some that show only later that they are none."""
    text, towers = causal_types(), tower_types()
    assert "llama" in text
    assert not {"gemma3", "siglip_vision_model"} & set(text)
    assert all(map(is_causal, text[::20]))
    assert {"vit", "siglip_vision_model"} <= set(towers)
    assert not {"llama", "clip"} & set(towers)
    assert HF_ENCODER.hf_any is not None
    assert HF_ENCODER.hf_any.of("vilt") is None  # which reads text too
    assert not any(is_tower(one) for one in ("llama", "clip", "no-such-model"))


def test_the_readme_names_the_language_models_of_the_record() -> None:
    """Those that can be trained, each of which the library lists, the texts of composed models among them."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    names, _, _ = readme.partition("These pass, with")[2].partition("\n\n")[2].partition(" (transformers ")
    trained = {name for name, one in recorded(HF_DECODER).items() if not one.problem}
    assert sorted(names.replace("\n", " ").split(", ")) == sorted(trained)
    assert {name for name in trained if is_causal(name)} <= set(causal_types())


def test_a_type_without_a_class_is_no_tower() -> None:
    """The library names a class for it that it hasn't."""
    assert not is_tower(is_known("voxtral_realtime_text"))


def test_small_images_are_of_some_patches() -> None:
    """Where stages join them, of more; not of thousands where a patch is a pixel."""
    sides = {name: shrink(config_of(name, {}))["image_size"] for name in ("vit", "swin", "swin2sr")}
    assert sides == {"vit": 64, "swin": 64, "swin2sr": 16}
    assert transformers.ViTConfig().patch_size == 16

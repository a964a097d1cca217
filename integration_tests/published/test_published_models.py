"""The record of families that can be trained, and its page: fresh, complete, and some found again at every commit."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import transformers
from commands import here
from house import ROOT
from oracle import Piece
from parity import Difference, difference_of, one_line
from parity_page import page_of
from parity_types import obstacle
from parity_whole import compare_greedy, worst_copies
from small_models import known
from table import KINDS, NAMED, PAGE, RECORDS, chosen, families, main, plain, read, write
from whole_jobs import LAYOUTS
from whole_models import deep_layers, layers_of, write_whole

SOURCES = ROOT / "plugins" / "transformers" / "src"
DRAWN = {"hf-decoder": 3, "hf-encoder": 1, "hf-images": 1, "decoder": 1}
MODULES = ("hf-decoder", "hf-encoder", *(spec.name for spec in NAMED))
"""Plugins whose families are tested as modules; others as whole models."""
SLOW = frozenset(
    {"bit", "convnext", "convnextv2", "dinov3_convnext", "hiera", "poolformer", "pvt", "pvt_v2", "swin2sr"}
)
"""Towers of stages, whose trials take seconds to a minute: of these the soak."""
VERSION = f"transformers {transformers.__version__}"


def drawn() -> Iterator[tuple[str, str]]:
    """Yield some families of the record, others with every change of the plugin's sources."""
    files = sorted(path for path in SOURCES.rglob("*.py"))
    chance = random.Random(hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest())
    for plugin, of in read(RECORDS).items():
        yield from ((plugin, name) for name in chance.sample(sorted(of.keys() - SLOW), DRAWN.get(plugin, 0)))


def check(plugin: str, model_type: str) -> None:
    """Refuse a family of which something else is recorded than is found now; sizes within their bounds may differ."""
    record = read(RECORDS)[plugin][model_type]
    if record["version"] != VERSION:
        pytest.skip(f"recorded of {record['version']}")
    found = plain(KINDS[plugin](model_type))
    now, then = (
        (bool(one["problem"]), one["problem"][:7] == "differs", sorted(one["refused"]), sorted(one["differences"]))
        for one in (found, record)
    )
    again = f"run integration_tests/published/table.py --families {model_type}"
    assert now == then, f"{again}: {found['problem'] or found['refused']}"
    assert (found["tensors"], bool(found["weights"])) == (record["tensors"], bool(record["weights"])), again
    whole = ("model_type", "images", "language")
    assert [found.get(key) for key in whole] == [record.get(key) for key in whole], again


@pytest.mark.parametrize(("plugin", "model_type"), list(drawn()))
def test_a_family_is_what_the_record_says(plugin: str, model_type: str) -> None:
    """Parity of some, or their refusal; each commit draws others."""
    check(plugin, model_type)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plugin", "model_type"), [(plugin, name) for plugin, of in read(RECORDS).items() for name in of]
)
def test_every_family_is_what_the_record_says(plugin: str, model_type: str) -> None:
    """All of them."""
    check(plugin, model_type)


@pytest.mark.soak
def test_the_record_has_every_family_of_the_library() -> None:
    """None is left out, and none is gone."""
    record = read(RECORDS)
    if {one["version"] for of in record.values() for one in of.values()} != {VERSION}:
        pytest.skip("recorded of another library")
    assert {plugin: sorted(of) for plugin, of in record.items()} == {
        plugin: sorted(of) for plugin, of in families().items()
    }


def test_the_page_is_that_of_the_record() -> None:
    """It is written, never edited."""
    assert PAGE.read_text(encoding="utf-8") == page_of(read(RECORDS))


def test_nothing_in_the_record_is_wrong() -> None:
    """Whatever can be built computes what the library computes, no sample changes another, weights go in and out."""
    record = read(RECORDS)
    every = [(name, one) for of in record.values() for name, one in of.items()]
    assert not {name: one["problem"] for name, one in every if one["problem"].startswith(("differs", "fails"))}
    trained = [one for _, one in every if not one["problem"]]
    assert len(trained) >= 100
    assert all("one process" in one["differences"] for one in trained)
    of_modules = [one for plugin in MODULES for one in record[plugin].values() if not one["problem"]]
    assert all(one["leak"] == 0 for one in of_modules)
    assert not {name: one["weights"] for name, one in every if one["weights"]}


def test_every_family_that_our_plugins_name_is_recorded() -> None:
    """Each computes what the library computes along all axes that it has, by the record that `mimo models` reads."""
    record = read(RECORDS)
    for spec in NAMED:
        assert record[spec.name].keys() == {family.model_type for family in spec.hf}
        for one in record[spec.name].values():
            assert (one["problem"], one["weights"], set(one["refused"]) - {"ep", "etp"}) == ("", "", set())
            assert {"one process", "pp=2", "tp=2"} <= one["differences"].keys()
    assert "not recorded" not in here("models").printed


def test_whole_models_write_what_the_library_writes() -> None:
    """After an image, in every folder that can be trained; and each in three layouts."""
    trained = {name: one for name, one in read(RECORDS)["hf-images"].items() if not one["problem"]}
    assert len(trained) >= 15
    assert all(one["tokens"] and len(one["differences"]) == 1 + LAYOUTS for one in trained.values())


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_rows_of_first_layers_ride_between_stages(name: str) -> None:
    """One layout cuts the language model inside the layers that add them: behind the second of three."""
    assert deep_layers(name) > layers_of(name) // 2
    assert any("pp=2" in layout.rpartition("language")[2] for layout in read(RECORDS)["hf-images"][name]["differences"])


def test_a_token_is_compared_where_its_choice_is_clear() -> None:
    """What differs, is missing or too much is named; behind a choice that isn't clear nothing is compared."""
    clear, other, tied = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.00001])
    assert compare_greedy([clear, other], [clear, other]) == (2, 0.0, [])
    assert compare_greedy([clear, other], [clear, clear])[2] == ["token 1 is 1, expected 0"]
    assert compare_greedy([clear], [clear, clear])[2] == ["generation ends after 1 tokens"]
    assert compare_greedy([clear, clear], [clear])[2] == ["generation continues after 1 tokens"]
    count, outputs, wrong = compare_greedy([clear, tied.flip(0), clear], [clear, tied, other])
    assert (count, wrong) == (1, [])
    assert outputs == pytest.approx(1e-5, rel=0.1)


def test_the_worst_copy_of_a_gradient_counts() -> None:
    """Of ranks that hold the same; what none holds, or isn't a number, is infinitely wrong."""
    expected = torch.tensor([[1.0, 2.0]])
    places = np.arange(2)

    def piece(*values: float) -> Piece:
        return Piece(shape=(1, 2), values=np.array(values, np.float32), places=places[: len(values)])

    assert worst_copies([piece(1, 2), piece(1, 3)], expected).tolist() == [[1.0, 3.0]]
    assert worst_copies([piece(1, 3), piece(1, 2)], expected).tolist() == [[1.0, 3.0]]
    assert worst_copies([piece(1)], expected).isinf().tolist() == [[False, True]]
    assert worst_copies([piece(1, np.nan), piece(1, 2)], expected).isinf().tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("model_type", "code", "texts"),
    [
        ("llava", 0, ["hf-images + decoder, image + language; recorded as in the library: transformers 5."]),
        ("llava", 0, ["not tried now: its type alone doesn't say how an image is prepared: `mimo models DIR` tries"]),
        ("llava", 0, ["\ntp    yes"]),
        ("gemma3", 0, ["gemma3: hf-images + hf-decoder, image + language;"]),
        ("paligemma", 1, ["can't be trained: folder: ", "got 'gemma': expected attention with"]),
        ("aria", 1, ["can't be trained: images: no kind here is that of AriaImageProcessor"]),
        ("lfm2_vl", 1, ["can't be trained: images: no image processor by Pillow"]),
    ],
)
def test_a_whole_model_is_shown_as_recorded(model_type: str, code: int, texts: list[str]) -> None:
    """By its type, from which no trial can be made."""
    known(model_type)
    ended = here("models", model_type)
    assert (ended.code, ended.err) == (code, "")
    assert all(text in ended.out for text in texts), ended.out


def test_whole_models_have_a_line_each() -> None:
    """Of those that were tried, with the plugin of the language model; the others are in one."""
    shown = here("models").printed
    assert re.search(r"^qwen2_vl +hf-images \+ decoder +image \+ language +dp tp +transformers 5", shown, re.MULTILINE)
    assert re.search(r"^qwen2_vl +decoder +language ", shown, re.MULTILINE)
    assert not re.search(r"^aria ", shown, re.MULTILINE)
    assert re.search(r"^hf-images refuses \d+: aria, ", shown, re.MULTILINE)


def test_types_without_a_folder_say_where_the_obstacle_lies() -> None:
    """In their config, their language model, how they are put together, or their images."""
    expected = {
        "git": "config",
        "blip": "language model",
        "video_llava": "parts",
        "aria": "images",
        "lfm2_vl": "images",
        "qianfan_ocr": "not tried",
    }
    assert {name: obstacle(name).partition(":")[0] for name in expected} == expected


def test_a_folder_is_tried(tmp_path: Path) -> None:
    """Both of its models by what it says; without a processor's file that says how images are prepared, not."""
    write_whole("qwen3_vl", tmp_path / "there")
    ended = here("models", tmp_path / "there")
    assert (ended.code, ended.err) == (0, "")
    assert "qwen3_vl: hf-images, image; recorded as in the library: transformers 5." in ended.out
    assert "qwen3_vl_text: decoder, language; recorded as in the library: transformers 5." in ended.out
    assert re.findall(r"^pp +(yes|no)", ended.out, re.MULTILINE) == ["no", "yes"]
    config = json.loads((tmp_path / "there" / "preprocessor_config.json").read_text())
    (tmp_path / "there" / "preprocessor_config.json").write_text(
        json.dumps({**config, "image_processor_type": "Other"})
    )
    refused = here("models", tmp_path / "there")
    assert refused.refused(f"{tmp_path}/there/preprocessor_config.json: image_processor_type: expected one of Qwen2VL")


def test_a_difference_is_seen() -> None:
    """Of the loss, of outputs, of one gradient among large ones, of one that is missing."""
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001])
    same = {"losses": (1.0, 1.0), "outputs": (one, one), "gradients": ({"a": one}, {"a": one})}

    def problem(**changes: object) -> str:
        return difference_of(**{**same, **changes}).problem  # type: ignore[arg-type]

    assert problem() == ""
    assert problem(losses=(1.0, 1.00001)) == "the loss by 1.0e-05"
    assert problem(outputs=(other, one)).startswith("outputs by 5.0e-05")
    assert problem(gradients=({"a": one, "b": other}, {"a": one, "b": one})).startswith("the gradient of b by 4.")
    assert problem(gradients=({"a": one}, {"a": one, "b": one})) == "the gradient of b by 1.0e+00"
    assert problem(outputs=None) == ""
    assert attrs.evolve(Difference(loss=0.0, outputs=0.0, gradients=0.0), outputs=float("nan")).problem
    rounded = Difference(loss=0.0, outputs=0.0, gradients=1.2e-5, worst="a")
    assert rounded.problem == "the gradient of a by 1.2e-05"
    assert attrs.evolve(rounded, rounding=3e-6).problem == ""
    assert attrs.evolve(rounded, rounding=2e-6).problem


def test_reasons_are_of_one_line() -> None:
    """Without the setting that they came by."""
    text = "'a': modules.language.config.model_type: expected b,\n got c. plugins/transformers/README.md lists those."
    assert one_line(text) == "'a': expected b, got c."


def test_families_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that isn't known is refused; what is found goes into the record that is named, beside what it has."""
    known = {"one": ["a", "b"], "two": ["c"]}
    assert chosen(known, []) == [("one", "a"), ("one", "b"), ("two", "c")]
    assert chosen(known, ["c"]) == [("two", "c")]
    with pytest.raises(SystemExit, match="expected model types of the installed library, got d"):
        chosen(known, ["c", "d"])
    file, before = tmp_path / "record.json", PAGE.read_text(encoding="utf-8")
    files = dict.fromkeys(KINDS, file)
    write(files, {"hf-decoder": {"zamba": {"version": "another"}}, "hf-encoder": {}})
    monkeypatch.setattr("table.families", lambda: {"hf-decoder": ["opt"], "hf-encoder": []})
    monkeypatch.setattr(sys, "argv", ["table.py", "--families", "opt", "--out", str(file)])
    main()
    record = read(files)
    assert list(record["hf-decoder"]) == ["opt", "zamba"]
    assert record["hf-decoder"]["opt"]["problem"] == "dropout = 0.1, at which 'opt' drops by a function in its layers"
    assert PAGE.read_text(encoding="utf-8") == before

"""The record of families that can be trained, and its page: fresh, complete, and some found again at every commit."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
import transformers
from house import ROOT
from parity import Difference, difference_of, one_line, outcome_of
from parity_page import page_of
from table import KINDS, PAGE, chosen, families, main, plain, read, write

from mimo_transformers.weights.tested import RECORD

SOURCES = ROOT / "plugins" / "transformers" / "src"
DRAWN = {"hf-decoder": 4, "hf-encoder": 2}
SLOW = frozenset(
    {"bit", "convnext", "convnextv2", "dinov3_convnext", "hiera", "poolformer", "pvt", "pvt_v2", "swin2sr"}
)
"""Towers of stages, whose trials take seconds to a minute: of these the soak."""
VERSION = f"transformers {transformers.__version__}"


def drawn() -> Iterator[tuple[str, str]]:
    """Yield some families of the record, others with every change of the plugin's sources."""
    files = sorted(path for path in SOURCES.rglob("*.py"))
    chance = random.Random(hashlib.sha256(b"".join(path.read_bytes() for path in files)).digest())
    for plugin, of in read(RECORD).items():
        yield from ((plugin, name) for name in chance.sample(sorted(of.keys() - SLOW), DRAWN[plugin]))


def check(plugin: str, model_type: str) -> None:
    """Refuse a family of which something else is recorded than is found now; sizes within their bounds may differ."""
    record = read(RECORD)[plugin][model_type]
    if record["version"] != VERSION:
        pytest.skip(f"recorded of {record['version']}")
    found = plain(outcome_of(KINDS[plugin], model_type))
    now, then = (
        (bool(one["problem"]), one["problem"][:7] == "differs", sorted(one["refused"]), sorted(one["differences"]))
        for one in (found, record)
    )
    again = f"run integration_tests/published/table.py --families {model_type}"
    assert now == then, f"{again}: {found['problem'] or found['refused']}"
    assert (found["tensors"], bool(found["weights"])) == (record["tensors"], bool(record["weights"])), again


@pytest.mark.parametrize(("plugin", "model_type"), list(drawn()))
def test_a_family_is_what_the_record_says(plugin: str, model_type: str) -> None:
    """Parity of some, or their refusal; each commit draws others."""
    check(plugin, model_type)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plugin", "model_type"), [(plugin, name) for plugin, of in read(RECORD).items() for name in of]
)
def test_every_family_is_what_the_record_says(plugin: str, model_type: str) -> None:
    """All of them."""
    check(plugin, model_type)


@pytest.mark.soak
def test_the_record_has_every_family_of_the_library() -> None:
    """None is left out, and none is gone."""
    record = read(RECORD)
    if {one["version"] for of in record.values() for one in of.values()} != {VERSION}:
        pytest.skip("recorded of another library")
    assert {plugin: sorted(of) for plugin, of in record.items()} == families()


def test_the_page_is_that_of_the_record() -> None:
    """It is written, never edited."""
    assert PAGE.read_text(encoding="utf-8") == page_of(read(RECORD))


def test_nothing_in_the_record_is_wrong() -> None:
    """Whatever can be built computes what the library computes, and most weights go in and out."""
    every = {name: one for of in read(RECORD).values() for name, one in of.items()}
    assert not {name: one["problem"] for name, one in every.items() if one["problem"].startswith(("differs", "fails"))}
    trained = [one for one in every.values() if not one["problem"]]
    assert len(trained) >= 100
    assert all("one process" in one["differences"] and one["leak"] <= 1e-6 for one in trained)
    assert [name for name, one in every.items() if one["weights"]] == ["radio"]


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
    assert attrs.evolve(Difference(loss=0.0, outputs=0.0, gradients=0.0), outputs=float("nan")).problem


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
    write(file, {"hf-decoder": {"zamba": {"version": "another"}}, "hf-encoder": {}})
    monkeypatch.setattr("table.families", lambda: {"hf-decoder": ["opt"], "hf-encoder": []})
    monkeypatch.setattr(sys, "argv", ["table.py", "--families", "opt", "--out", str(file)])
    main()
    record = read(file)
    assert list(record["hf-decoder"]) == ["opt", "zamba"]
    assert record["hf-decoder"]["opt"]["problem"] == "'opt': a small one draws random numbers while it trains"
    assert PAGE.read_text(encoding="utf-8") == before

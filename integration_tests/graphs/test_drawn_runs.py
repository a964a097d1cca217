"""A run that draws, from its commands: metrics, what it evaluates, writes, resumes with and hands out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import mimo, read_metrics
from PIL import Image

from mimo.trainer import evaluate

EXAMPLE = "examples/digits-read-and-draw.toml"
SMALL = (
    "optimizer.lr_schedule=constant",
    "optimizer.lr_warmup_steps=0",
    "optimizer.lr_min=0",
    "run.global_batch=8",
    "run.micro_batch=4",
    "run.evaluation_interval=0",
    "data.held_out=0.01",
    "logging.interval=1",
    "modules.drawer.config.layers=2",
    "modules.drawer.config.steps=2",
)
RAGGED = ("--temperature", "9", "--max-tokens", "30", "--seed", "1")
"""So that a model of two steps says anything, a placeholder now and then."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two steps, on four processes, of which two are stages of the generator."""
    directory = tmp_path_factory.mktemp("drawn") / "run"
    layout = ("modules.drawer.ranks=2-3", "modules.drawer.pp=2")
    ended = mimo("train", EXAMPLE, *SMALL, *layout, "run.steps=2", f"run.directory={directory}")
    assert (ended.code, ended.err) == (0, "")
    return directory


def test_metrics_and_evaluation_show_the_loss_of_the_generator(drawn: Path) -> None:
    """By its own name, over its own targets, and what it computes."""
    steps, (evaluation,) = read_metrics(drawn)
    assert all(step["losses"]["drawer.loss"] > 0 for step in steps)
    assert all(step["rows"]["drawer"] > 0 for step in steps)
    assert all(step["flops"]["drawer"]["model_operations"] > 0 for step in steps)
    found = evaluate(drawn)
    assert found.losses == pytest.approx(evaluation["losses"])
    assert found.loss == pytest.approx(evaluation["loss"])


def test_a_run_that_draws_resumes_in_another_layout(drawn: Path, tmp_path: Path) -> None:
    """And loads what it has learned."""
    layout = ("modules.vision.ranks=0-1", "modules.language.ranks=1", "modules.language.tp=1", "modules.drawer.ranks=0")
    words = (*SMALL, *layout, "run.steps=3", f"load.finetune={drawn}", f"run.directory={tmp_path / 'run'}")
    ended = mimo("train", EXAMPLE, *words)
    assert (ended.code, ended.err) == (0, "")
    assert "new:" not in ended.out, ended.out


def test_pictures_are_saved_in_the_folder_of_the_run(drawn: Path) -> None:
    """Each time in a new one; what is printed names them."""
    for number in ("1", "2"):
        ended = mimo("generate", drawn, "--text", "draw seven", *RAGGED)
        assert (ended.code, ended.err) == (0, "")
        text, *files = ended.out.splitlines()
        assert text.count("<image>") == len(files) > 0
        for index, file in enumerate(map(Path, files)):
            assert file == drawn / "made" / number / f"0-{index}-image.png"
            with Image.open(file) as image:
                assert (image.size, image.mode) == ((8, 8), "L")


def test_answers_of_a_file_name_their_pictures(drawn: Path, tmp_path: Path) -> None:
    """In a folder that is asked for; the same ones alone."""
    prompts, out, made = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "made"
    prompts.write_text('{"text": "draw one"}\n{"text": "draw two the"}\n')
    ended = mimo("generate", drawn, "--prompts", prompts, "--out", out, "--made", made, *RAGGED)
    assert (ended.code, ended.err) == (0, "")
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    files = [Path(file) for answer in answers for file in answer["items"]]
    assert [answer["text"].count("<image>") for answer in answers] == [len(answer["items"]) for answer in answers]
    assert sorted(files) == sorted(made.iterdir()) != []
    ended = mimo("generate", drawn, "--text", "draw one", "--json", "--made", tmp_path / "alone", *RAGGED)
    (line,) = [json.loads(line) for line in ended.out.splitlines()]
    assert {**line, "items": []} == {**answers[0], "items": []}
    assert len(line["items"]) == len(answers[0]["items"])


def test_noise_may_be_seeded_where_text_is_the_likeliest(drawn: Path, tmp_path: Path) -> None:
    """As a model that makes pictures draws in any case."""
    ended = mimo("generate", drawn, "--text", "draw one", "--seed", "3", "--max-tokens", "2")
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize("words", [("--text", "draw one"), ("--text", "draw one", "--json")])
def test_a_folder_that_is_there_is_refused(drawn: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Nothing is written over."""
    ended = mimo("generate", drawn, *words, "--made", tmp_path)
    assert ended.code == 2
    assert f"--made: expected a folder that is not there yet, got '{tmp_path}'." in ended.err


def test_stages_are_refused_where_pictures_are_made(drawn: Path) -> None:
    """Before anything is launched."""
    ended = mimo("generate", drawn, "--text", "draw one", "--pp", "2")
    assert ended.code == 2
    assert ended.err.startswith("mimo: modules.language: expected pp = 1, as modules.drawer makes items of its rows")


def test_a_generator_without_a_table_is_exported_to_no_folder(drawn: Path, tmp_path: Path) -> None:
    """It is refused by the path of its plugin; the language model beside it is exported as ever."""
    ended = mimo("checkpoint", "export-hf", drawn, tmp_path / "drawer", "--module", "drawer")
    assert ended.refused(
        "modules.drawer.plugin: expected one with a table of published weights, `hf` of its spec, got generator "
        "'flow', which has none. Name another module, or give the plugin a table; `mimo models` lists what can be "
        "read and written."
    )
    ended = mimo("checkpoint", "export-hf", drawn, tmp_path / "language")
    assert (ended.code, ended.err) == (0, "")

"""The lifecycle plugin that draws: the loss curve from metrics, and captions from predictions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from mimo.hooks import EvaluationInfo, IndexInfo, Prediction, RunInfo, lifecycle
from mimo_logger_pictures import Pictures, caption_grid, distribution_bars, loss_curve

PREDICTIONS = (
    Prediction(sample=0, text="no image", is_exact=False),
    Prediction(sample=1, text="one", is_exact=True, item=Image.new("L", (8, 8), 99)),
    Prediction(sample=2, text="a sound", is_exact=False, item=b"sound"),
)


def make_run(directory: Path, *, rank: int = 0) -> RunInfo:
    """Return a run of three steps."""
    return RunInfo(name="r", directory=directory, rank=rank, world=2, first_step=1, steps=3, config={})


def write_metrics(directory: Path, *more: Any) -> None:
    """Write what a run of three steps writes, and more lines."""
    lines: list[Any] = [{"step": step, "loss": 2.5 / step} for step in (1, 2, 3)]
    lines += [{"step": 3, "evaluation": True, "loss": 0.25}, *more]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")


def end(run: RunInfo, *, predictions: tuple[Prediction, ...] = ()) -> None:
    """Call the plugin as a run does whose last step is evaluated."""
    caller = lifecycle([Pictures()], entry_points=())
    caller.run_begin(run)
    caller.evaluated(run, EvaluationInfo(step=3, loss=0.25, exact_match=0.5, samples=3, predictions=predictions))
    assert caller.run_end(run) == []


def test_the_loss_curve_is_drawn_at_the_end_from_the_metrics(tmp_path: Path) -> None:
    """Of all steps, those before a resume included; on rank 0, where there are metrics."""
    end(make_run(tmp_path))
    assert not (tmp_path / "loss.png").exists()
    write_metrics(tmp_path)
    end(make_run(tmp_path, rank=1))
    assert not (tmp_path / "loss.png").exists()
    end(make_run(tmp_path))
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.width > picture.height > 400
    assert not (tmp_path / "captions.png").exists()


def test_images_are_drawn_with_what_the_model_wrote(tmp_path: Path) -> None:
    """On whichever rank has predictions; samples that begin with something else are left out."""
    end(make_run(tmp_path, rank=1), predictions=PREDICTIONS[::2])
    assert list(tmp_path.iterdir()) == []
    end(make_run(tmp_path, rank=1), predictions=PREDICTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["captions.png"]


def test_without_matplotlib_no_picture_is_drawn_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that only trains may lack it; nothing else changes."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    write_metrics(tmp_path)
    end(make_run(tmp_path), predictions=PREDICTIONS)
    assert capsys.readouterr().out == "r: no pictures are drawn, as matplotlib is not installed\n"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_index_is_drawn_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A panel for each distribution, however far apart its numbers are and whatever names hold; none for no numbers."""
    caller = lifecycle([Pictures()], entry_points=())

    def draw(name: str, **distributions: list[tuple[int, int]]) -> Path:
        path = tmp_path / f"{name}.sizes"
        info = IndexInfo(name=name, path=path, samples=3, broken=1, distributions=distributions)
        assert caller.indexed(info) == []
        return path.with_name(f"{name}.sizes.png")

    one = draw("a$b", tokens=[(7, 2)])
    assert capsys.readouterr().out == f"{one}: drawn\n"
    two = draw("two", tokens=[(0, 5), (1, 1), (900_000, 3)], rows=[(4, 1), (9, 2)])
    with Image.open(one) as narrow, Image.open(two) as tall:
        assert tall.width == narrow.width
        assert tall.height > 1.5 * narrow.height
    assert not draw("none").exists()


def test_counts_are_drawn_beside_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are: no number stands there twice, as rounded ones would."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_given, **_named: drawn.append(figure))
    distribution_bars(tmp_path / "a.png", "a", {"tokens": [(3, 1), (12, 1)], "rows": [(4, 1), (9, 2)]})
    drawn[0].draw_without_rendering()
    shown = [[label.get_text() for label in axes.get_yticklabels()] for axes in drawn[0].axes]
    assert [labels for labels in shown if len(labels) < 2 or len(set(labels)) < len(labels)] == []


def test_lines_without_a_loss_break_no_picture(tmp_path: Path) -> None:
    """Such as those of saves that failed or were skipped, and losses that are no numbers."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "save_skipped": true}\n')
    end(make_run(tmp_path))
    assert not (tmp_path / "loss.png").exists()
    odd = ({"step": 1, "save_failed": True}, {"step": 2, "loss": "low"}, {"step": 2, "loss": None})
    write_metrics(tmp_path, *odd, {"step": 2, "evaluation": True})
    end(make_run(tmp_path))
    assert (tmp_path / "loss.png").is_file()


def test_the_loss_curve_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    """A skipped step has no loss to draw; no evaluation is needed."""
    loss_curve(tmp_path / "a.png", [1, 2, 3], [1.0, float("nan"), 0.0], [])
    loss_curve(tmp_path / "b.png", [1, 3], [1.0, 0.0], [])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_wrong_captions_are_marked_in_the_grid(tmp_path: Path) -> None:
    """Red is nowhere else; images of any size and mode stand in it."""
    images = [Image.new("L", (8, 8), 99), Image.new("RGB", (30, 10)), Image.new("1", (4, 9))]
    captions = ["one", "a rather long caption of $many$ words that goes on and on and on and on", ""]
    caption_grid(tmp_path / "right.png", images, captions, [True, True, True], columns=2)
    caption_grid(tmp_path / "wrong.png", images, captions, [True, False, False], columns=2)

    def red(name: str) -> int:
        with Image.open(tmp_path / name) as picture:
            colours: Any = picture.convert("RGB").getcolors(picture.width * picture.height) or []
        return sum(count for count, (r, g, b) in colours if r > 150 and g < 80 and b < 80)

    assert red("right.png") == 0
    assert red("wrong.png") > 200

"""The short pages for authors of generators, optimizers, datasets and loggers, followed literally."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from commands import losses, mimo, read_metrics, succeed
from house import ROOT
from PIL import Image
from published import same_tensors
from written import build, commands_of, files_of

from mimo.checkpoint import read_manifest

LAST = "A source of records"
"""A section with a package of its own, which is followed alone."""
PUBLISHED = "Published weights"
"""A section with commands for what it adds."""


@attrs.frozen
class PageFiles:
    """A page, and the folder in which its files lie and its package is built."""

    page: str
    folder: Path
    site: Path

    def follow(self, *changes: str, checks: bool = True) -> dict[str, str]:
        """Type the page's commands; return what each printed, by its words.

        Args:
            changes: to its runs; a few steps, if there are none.
            checks: whether those too that check a plugin.
        """
        printed = {}
        for words in commands_of(self.page):
            if "--check" in words and not checks:
                continue
            short = [re.sub(r"=\d+", "=4", word) for word in words]
            if words[0] == "train" and short == words:
                short += changes or ("run.steps=2",)
            printed[" ".join(words)] = self.mimo(*short)
        return printed

    def mimo(self, *words: str) -> str:
        """Type one command."""
        return succeed(*words, cwd=self.folder, path=self.site)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., PageFiles]:
    """Do what a page says up to its commands."""

    def follow(name: str, section: str = "", *, before: str = LAST) -> PageFiles:
        first, _, rest = (ROOT / "docs" / name).read_text(encoding="utf-8").partition(f"\n## {section or before}\n")
        page = rest if section else first
        for file, content in files_of(page).items():
            (tmp_path / file).write_text(content, encoding="utf-8")
        return PageFiles(page, tmp_path, build(tmp_path))

    return follow


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("write-a*.md")), ids=lambda page: page.stem)
def test_pages_install_mimo_from_a_clone(page: Path) -> None:
    """With the pinned torch, all packages, and plugins that there are."""
    lines = re.findall(r"^pip install -c (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert lines, page.name
    for line in lines:
        words = line.split()
        assert words[:2] == ["../mimo/constraints.txt", "../mimo/packages/*"]
        assert [word for word in words if not list(ROOT.glob(word.removeprefix("../mimo/")))] == []


def test_the_page_on_optimizers_trains_on_two_lanes_as_on_one(write: Callable[..., PageFiles]) -> None:
    """What it writes is checked and trained; spread over two lanes it has the losses of one process, and resumes."""
    written = write("write-an-optimizer.md")
    printed = written.follow()
    assert list(printed)[-1] == "train momentum.toml"
    written.mimo("train", "momentum.toml", "run.steps=2", "modules.language.ranks=0", "run.directory=alone")
    two = losses(written.folder / "runs" / "momentum")
    assert two == pytest.approx(losses(written.folder / "alone"), rel=1e-6)
    assert two[1] != two[0]


def test_the_page_on_generators_draws_on_three_lanes_as_in_one_process(write: Callable[..., PageFiles]) -> None:
    """Its generator learns the same, and makes a picture where the text calls for one."""
    written, steps = write("write-a-generator.md", before=PUBLISHED), ("run.steps=12", "optimizer.lr=1e-2")
    printed = written.follow(*steps, checks=False)
    assert re.search(r"mimo\.generators +scribble +scribble +mimo-generator-scribble +0\.1\.0", printed["plugins"])
    assert "drawer.loss" in printed["evaluate runs/scribble"]
    assert printed["evaluate runs/scribble"] in printed["train scribble.toml"]
    said = printed["generate runs/scribble --text draw seven"]
    (path,) = re.findall(r"`(runs/\S+\.png)`", written.page)
    assert said.splitlines() == ["<image>", path]
    with Image.open(written.folder / path) as picture:
        assert (picture.size, picture.mode) == ((8, 8), "L")
    alone = ("modules.language.ranks=0", "modules.language.tp=1", "modules.drawer.ranks=0", "run.directory=alone")
    written.mimo("train", "scribble.toml", *steps, *alone)
    three, one = (_drawn(written.folder / run) for run in ("runs/scribble", "alone"))
    assert three == pytest.approx(one, rel=1e-6)
    assert len(three) == 2 * 12


def test_the_pages_generator_keeps_its_promises(write: Callable[..., PageFiles]) -> None:
    """By the page's own check; one that draws without keys is named."""
    written = write("write-a-generator.md")
    (words,) = (words for words in commands_of(written.page) if "--check" in words)
    verdicts = written.mimo(*words)
    assert "NO" not in verdicts
    assert {line.split(" ")[1].rstrip(":") for line in verdicts.splitlines() if line.startswith("ok")} >= {
        *("losses", "independence", "rows", "chance", "generation")
    }
    source = written.site / "mimo_generator_scribble.py"
    drawn = "normal(fold(keys, NOISE), self.pixels)"
    assert drawn in source.read_text()
    source.write_text(source.read_text().replace(drawn, "torch.randn(len(keys), self.pixels)"))
    ended = mimo(*words, cwd=written.folder, path=written.site)
    assert ended.code == 1
    assert "\nNO chance: forward() draws no random numbers, which would differ by layout" in ended.out


def test_the_section_on_stages_makes_a_generator_of_two(write: Callable[..., PageFiles]) -> None:
    """What it replaces keeps its promises, that of stages too."""
    written = write("write-a-generator.md")
    (staged,) = re.findall(r"^## Stages.*?^```python\n(.*?)^```$", written.page, re.MULTILINE | re.DOTALL)
    source = written.site / "mimo_generator_scribble.py"
    source.write_text(source.read_text() + staged)
    (words,) = (words for words in commands_of(written.page) if "--check" in words)
    verdicts = written.mimo(*words)
    assert "NO" not in verdicts
    assert {line.split(":")[0] for line in verdicts.splitlines()} >= {"ok losses", "ok generation", "ok stages"}


def test_the_section_on_published_weights_reads_and_writes_them(write: Callable[..., PageFiles]) -> None:
    """What it adds keeps its promise; what a run has learned goes out, in, and into the next run, to the bit."""
    written = write("write-a-generator.md")
    (section,) = re.findall(rf"^## {PUBLISHED}$.*?(?=^## )", written.page, re.MULTILINE | re.DOTALL)
    (added,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    source = written.site / "mimo_generator_scribble.py"
    source.write_text(source.read_text() + added)
    (check,) = (words for words in commands_of(written.page) if "--check" in words)
    assert "ok published weights: " in written.mimo(*check)
    written.mimo("train", "scribble.toml", "run.steps=2")
    printed = attrs.evolve(written, page=section).follow("run.steps=1", "modules.drawer.frozen=true")
    assert printed["models scribble"].startswith("scribble: scribble, image generator\n")
    out, shown, taken, last = (text for words, text in printed.items() if words != "models scribble")
    assert out.startswith("published: drawer as ScribbleModel, 8 tensors of float32\n")
    settings = {"plugin": "scribble", "fed_by": "language", "config": {"side": 8, "width": 256}}
    assert tomllib.loads(shown)["modules"] == {"drawer": settings}
    assert "drawer: scribble from published for scribble, 8 tensors, float32 there and float32 here" in taken
    assert "new: weights of language" in last
    assert "drawer" not in last.partition("new: ")[2].partition("\n")[0]
    written.mimo("checkpoint", "export-hf", "runs/again", "back", "--module", "drawer")
    assert same_tensors(written.folder / "published", written.folder / "back")


def _drawn(run: Path) -> list[float]:
    """Return the loss of each step of a run, and that of its generator."""
    return [loss for step in read_metrics(run)[0] for loss in (step["loss"], step["losses"]["drawer.loss"])]


def test_the_page_on_datasets_trains_and_evaluates(write: Callable[..., PageFiles]) -> None:
    """Its squares are read in training and in evaluation."""
    written = write("write-a-dataset.md")
    printed = written.follow()
    assert len(losses(written.folder / "runs" / "squares")) == 2
    assert "loss" in printed["evaluate runs/squares"]


def test_the_section_on_sources_shows_a_sample_and_trains(write: Callable[..., PageFiles]) -> None:
    """Its pictures are drawn, one is shown with its text, and they are trained on."""
    written = write("write-a-dataset.md", LAST)
    subprocess.run([sys.executable, "draw.py"], cwd=written.folder, check=True)
    printed = written.follow()
    shown = next(text for command, text in printed.items() if command.startswith("data show"))
    assert "sample 200 of 256, pictures/200.txt" in shown
    assert "12 x 12: 9 rows" in shown
    assert "a light square" in shown
    assert len(losses(written.folder / "runs" / "captions")) == 2


def test_the_page_on_loggers_remembers_over_a_resume(write: Callable[..., PageFiles]) -> None:
    """Each step has a line, and the lowest loss is that of both runs."""
    written = write("write-a-logger.md")
    first, *_ = (words for words in commands_of(written.page) if words[0] == "train")
    written.mimo(*first, "run.steps=2", "checkpoint.interval=2")
    written.mimo("train", "csv.toml", "checkpoint.load=latest", "run.steps=4", "checkpoint.interval=2")
    run = written.folder / "runs" / "csv"
    lines = [line.split(",") for line in (run / "losses.csv").read_text().splitlines()]
    logged = losses(run)
    assert [int(step) for step, _, _ in lines] == [1, 2, 3, 4]
    assert [float(loss) for _, loss, _ in lines] == logged
    assert [float(lowest) for _, _, lowest in lines] == [min(logged[: at + 1]) for at in range(4)]
    saved = read_manifest(run / "checkpoints" / "step_00000002").common
    assert [value for name, value in saved.items() if name.startswith("csv.")] == [min(logged[:2])]

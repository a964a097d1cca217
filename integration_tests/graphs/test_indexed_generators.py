"""An index of data beside a generator: what it says, when it is refused, and that it changes nothing in a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from jobs import CPU, make_job
from PIL import Image
from tables import Table, world_of

from mimo.data import PlacedMicrobatch, SampleSizes, read_arrays, sizes_of, sizes_of_arrays
from mimo.hooks import DataError
from mimo.testing import Pool
from mimo.trainer import Job, Trainer, read_settings, resolve
from mimo.trainer.commands.main import run
from mimo.trainer.runtime import SampleCosts, StepData, StepSizes
from mimo_logger_pictures import Pictures

LINES: list[dict[str, Any]] = [
    {"text": "a b"},
    {"text": "<image> a <image> b", "images": ["wide.png", "tall.png"], "roles": {"image": ["input", "output"]}},
    {"text": "c <image> d", "images": ["wide.png"], "roles": {"image": ["output"]}, "weight": 0.25},
    {"text": "d <image> a b c d", "images": ["tall.png"], "roles": {"image": ["both"]}},
    {
        "text": "b <image> <image> a <image>",
        "images": ["tall.png", "wide.png", "tall.png"],
        "roles": {"image": ["both"] * 3},
    },
    {"text": "d <image>", "images": ["wide.png"]},
    {
        "text": "a b c <image> d" + " <image>" * 9,
        "images": ["tall.png"] * 10,
        "roles": {"image": ["output"] + ["both"] * 9},
    },
    {"text": "a <image> d", "images": ["wide.png"], "roles": {"image": ["output"]}},
]
HALF: dict[str, Any] = {
    "text": "c <image> <image>",
    "images": ["half.png", "tall.png"],
    "roles": {"image": ["both", "output"]},
}
"""A sample with a sound header, whose pixels are damaged."""
DRAWER: Mapping[str, Any] = {
    "height": 4,
    "width": 6,
    "channels": 1,
    "patch": 2,
    "hidden": 24,
    "layers": 1,
    "heads": 2,
    "intermediate": 20,
    "queries": 2,
}


def settings_of(folder: Path) -> Table:
    """Return settings of a model that reads and draws, on three ranks."""
    small = {"layers": 1, "heads": 2, "intermediate": 16}
    return {
        "run": {
            "name": "own",
            "steps": 2,
            "global_batch": 12,
            "micro_batch": 3,
            "evaluation_interval": 0,
            "device": "cpu",
        },
        "data": {"plugin": "jsonl", "path": str(folder / "train.jsonl"), "max_tokens": 60},
        "tokenizer": {"plugin": "word", "words": ["a", "b", "c", "d"]},
        "modules": {
            "vision": {"plugin": "vit", "ranks": [0, 1], "config": {"patch": 4, "channels": 3, "width": 16, **small}},
            "lens": {
                "plugin": "vit",
                "feeds": "drawer",
                "ranks": [0, 2],
                "config": {"patch": 3, "channels": 3, "width": 16, **small},
            },
            "language": {"plugin": "decoder", "ranks": [0, 1], "config": {"hidden": 16, **small}},
            "drawer": {"plugin": "flow", "fed_by": "language", "ranks": [1, 2], "config": dict(DRAWER)},
        },
        "optimizer": {"lr": 1e-2},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and settings; nothing is drawn of an index, which takes a second."""
    monkeypatch.delattr(Pictures, "mimo_indexed")
    Image.linear_gradient("L").resize((21, 6)).save(tmp_path / "wide.png")
    Image.linear_gradient("L").resize((9, 25)).save(tmp_path / "tall.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "wide.png").read_bytes()[:45])
    write(tmp_path, *LINES, *LINES[:4])
    (tmp_path / "own.toml").write_text(tomli_w.dumps(settings_of(tmp_path)))
    return tmp_path


def write(folder: Path, *lines: Mapping[str, Any]) -> None:
    """Write samples to train on, and take away what was known of others."""
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for path in folder.glob("train.jsonl.*"):
        path.unlink()


def index(folder: Path, *words: str) -> int:
    """Return how the command ends."""
    return run(["data", "index", str(folder / "own.toml"), "--jobs", "1", *words])


def opened(folder: Path, *overrides: str) -> Job:
    """Return the job."""
    return resolve(read_settings(folder / "own.toml", overrides))


def found(folder: Path) -> SampleSizes:
    """Return what the index holds."""
    return sizes_of_arrays(read_arrays(folder / "train.jsonl.sizes"))


def placed(job: Job) -> list[PlacedMicrobatch | None]:
    """Return where a step's samples and items are, by cost."""
    assert job.train is not None
    data = StepData.of_step(job, job.train, lambda: [11, 3, 1, 10, 5, 2, 0, 8, 9, 6, 7, 4], costs=SampleCosts(job))
    return [microbatch.placed for microbatch in data.microbatches]


@pytest.mark.parametrize("reads", ["before", "own"])
def test_an_index_says_what_is_laid_out(reads: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of items to make too: rows that call for them, rows that they are made from, losses; so places are the same."""
    config = f"modules.drawer.config.reads={reads}"
    job = opened(folder, config)
    assert job.train is not None
    every = range(len(job.train))
    layouts, before = [job.lay_out(job.train, sample) for sample in every], placed(job)
    assert index(folder, config) == 0
    sizes = found(folder)
    assert {item.kept for sample in every for item in sizes[sample].items} == {True, False}
    for sample, layout in zip(every, layouts, strict=True):
        assert sizes[sample].tokens == len(layout.tokens)
        assert sizes[sample].targets == np.count_nonzero(layout.targets)
        for item in layout.items:
            own = sizes[sample].items[item.info.index]
            asked, source = item.asked or (0, 0), item.made_from or (0, 0)
            assert (own.role, own.size, own.rows) == (item.info.role, item.info.size, item.rows)
            assert (own.asked, own.made_from) == (asked[1] - asked[0], source[1] - source[0])
            assert own.losses == (6 if item.asked else 0)
    for picture in ("wide.png", "tall.png"):
        (folder / picture).unlink()  # no header is opened
    job = opened(folder, config)
    assert job.train is not None
    for sample, layout in zip(every, layouts, strict=True):
        again = job.lay_out(job.train, sample)
        assert np.array_equal(again.tokens, layout.tokens)
        assert again.items == layout.items
    known = sizes_of(job.train, every)
    assert known is not None
    ours, theirs = StepSizes.of_index(job, known).made["image"], StepSizes.of_layouts(job, layouts).made["image"]
    for name in ("samples", "rows"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    assert [ours.sizes[one] for one in ours.of_item] == [theirs.sizes[one] for one in theirs.of_item]
    monkeypatch.setattr(Job, "lay_out_all", None)
    assert placed(job) == before


def test_an_index_and_check_report_what_is_to_be_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside what is read; and how evenly the lanes of a generator share a step."""
    assert index(folder) == 0
    out, sizes = capsys.readouterr().out, found(folder)
    items = [item for sample in range(len(sizes)) for item in sizes[sample].items]
    read = [item for item in items if item.role != "output"]
    made = [item for item in items if item.role in ("output", "both")]
    cut = sum(not item.kept for item in read)
    assert f"image        {len(read)} items, {sum(one.rows for one in read if one.kept):,} rows, {cut} items cut" in out
    kept = [item for item in made if item.kept]
    counts = f"{len(made)} items, {2 * len(kept)} rows, {6 * len(made)} losses, {len(made) - len(kept)} items cut off"
    assert f"image, made  {counts}" in out
    for name, values in {
        "rows that an item is made from, image": [item.made_from for item in kept],
        "losses of an item that is made, image": [6],
    }.items():
        (line,) = (line.removeprefix(name).split() for line in out.splitlines() if line.startswith(f"{name}  "))
        assert (line[0], line[-1]) == (str(min(values)), str(max(values)))
    assert run(["check", str(folder / "own.toml")]) == 0
    out = capsys.readouterr().out
    assert f"{len(read)} image items, {len(made)} image items to make, " in out
    table = out.partition("time of the slowest lanes")[2].splitlines()
    (by_count, by_cost), *_ = (line.split()[1:] for line in table if line.startswith("drawer"))
    assert 1 < float(by_cost) < float(by_count)


OTHERS = ("reads=own", "patch=1")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("modules.drawer.config.queries=1", "the generators"),
        *(pytest.param(f"modules.drawer.config.{key}", "the generators", marks=pytest.mark.soak) for key in OTHERS),
        ("modules.vision.config.patch=2", "the encoders"),
    ],
)
def test_an_index_of_another_generator_is_refused(override: str, named: str, folder: Path) -> None:
    """With other rows or losses; made again, it holds. What changes none of them leaves it as it is."""
    assert index(folder) == 0
    opened(folder, "modules.drawer.config.layers=2", "modules.drawer.config.steps=7", "modules.drawer.ranks=[2]")
    with pytest.raises(DataError, match=rf"got one from before a change of {named}\. Run `mimo data index`"):
        opened(folder, override)
    assert index(folder, override) == 0
    opened(folder, override)


def test_an_index_holds_for_models_that_make_the_same_alone(folder: Path) -> None:
    """One made with a generator is refused without it, and the other way round."""
    write(folder, LINES[0], LINES[5])
    with_drawer, without = (settings_of(folder) for _ in range(2))
    for name in ("drawer", "lens"):
        del without["modules"][name]
    for first, then in ((with_drawer, without), (without, with_drawer)):
        (folder / "own.toml").write_text(tomli_w.dumps(first))
        assert index(folder) == 0
        (folder / "own.toml").write_text(tomli_w.dumps(then))
        with pytest.raises(DataError, match=r"got one from before a change of the generators\. Run `mimo data index`"):
            opened(folder)


def test_items_to_make_that_are_broken_are_listed(folder: Path) -> None:
    """With --decode, whether only a generator takes them or an encoder too."""
    write(folder, HALF, {**HALF, "roles": {"image": ["output", "output"]}})
    assert index(folder) == 0
    assert index(folder, "--decode") == 3
    listed = [json.loads(line) for line in (folder / "train.jsonl.broken").read_text().splitlines()]
    assert [(each["sample"], each["item"]) for each in listed] == [(0, "image 0"), (1, "image 0")]


def trained(rank: int, settings: Table) -> tuple[Any, ...]:
    """Return what a run of two steps says of each, and who has which items."""
    job = make_job(settings)
    assert job.train is not None
    trainer = Trainer(job, rank=rank, device=CPU)
    steps = [trainer.train(step) for step in (1, 2)]
    data = StepData.of_step(job, job.train, lambda: range(12), costs=SampleCosts(job))
    owners = [
        [(module.name, lane, item.info.sample, item.info.index) for item in one.items(module, lane)]
        for one in data.microbatches
        for module in job.item_modules
        for lane in range(module.grid.dp)
    ]
    said = [(one.loss, dict(one.losses), one.grad_norm, dict(one.norms), dict(one.rows), one.broken) for one in steps]
    weights = {
        f"{name}.{path}": value.sum().item()
        for name, held in trainer.optimizer.weights().items()
        for path, value in held.items()
    }
    return said, owners, weights


def test_a_run_with_an_index_is_the_run_without(folder: Path, pool: Pool) -> None:
    """To the bit, with samples that turn out to be broken: losses, norms, weights, and who has which items."""
    write(folder, *LINES, *LINES[:3], HALF)
    settings = settings_of(folder)
    settings["data"]["max_broken"] = 0.5
    (folder / "own.toml").write_text(tomli_w.dumps(settings))
    without = pool.run(world_of(settings), trained, settings)
    assert index(folder) == 0
    assert pool.run(world_of(settings), trained, settings) == without
    said, *_ = without[0]
    assert [one[-1] for one in said] == [1, 1]
    assert said[0][1]["drawer.loss"] > 0


def test_samples_that_an_index_skips_are_ends_alone(folder: Path, pool: Pool) -> None:
    """Nothing of them is read or made; all else is as beside a text of no weight."""
    settings = settings_of(folder)
    settings["data"]["broken"] = "skip"
    (folder / "own.toml").write_text(tomli_w.dumps(settings))
    write(folder, *LINES, HALF, *LINES[:3])
    assert index(folder, "--decode") == 3
    with_index, *_ = pool.run(world_of(settings), trained, settings)
    write(folder, *LINES, {"text": "a", "weight": 0}, *LINES[:3])
    without, *_ = pool.run(world_of(settings), trained, settings)
    for (loss, losses, *_), (expected, terms, *_) in zip(with_index[0], without[0], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert losses == pytest.approx(terms, rel=1e-5)
    assert not {item[2] for items in with_index[1] for item in items if item[2] == len(LINES)}

"""Rows and bytes on every edge: computed beforehand, counted as they are sent, and each row crossing once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from commands import here
from jobs import CPU, make_job
from tables import TEACHER, Table, table
from test_generators import FLOW
from test_precision import in_precision

from mimo.data import Dataset, weights_of
from mimo.hooks import EdgeTraffic
from mimo.testing import Pool
from mimo.trainer import Trainer
from mimo.trainer.runtime import expect_traffic

WORDS = ["the", "digit", "is", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
DRAWN: Mapping[str, Any] = {**FLOW, "intermediate": 40}
"""Config of a generator of pictures."""
LENS: Mapping[str, Any] = {"patch": 1, "channels": 1, "width": 24, "layers": 2, "heads": 6, "intermediate": 37}
"""Config of an encoder of a generator's own, which reads the same pictures by other patches than ``vision``."""
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "lanes 3 to 2, stages in both": {
        "vision": {"ranks": [0, 1, 2, 3, 4, 5], "pp": 2},
        "language": {"ranks": [0, 6, 7, 8], "pp": 2},
    },
    "two encoders, one frozen, tensor ranks that overlap": {
        "vision": {"ranks": [0, 1], "tp": 2},
        "glyph": {"ranks": [2, 3, 4], "frozen": True},
        "language": {"ranks": [1, 2], "tp": 2},
    },
    "a teacher in stages and tensor ranks, to lanes and context ranks": {
        "vision": {"ranks": [0, 1]},
        "teacher": {"ranks": [0, 1, 2, 3], "pp": 2, "tp": 2, "distil": {"top_k": 3}},
        "language": {"ranks": [2, 3, 4, 5], "cp": 2},
    },
    "hidden rows, of slices and to slices": {
        "teacher": {
            "ranks": [0, 1],
            "tp": 2,
            "sequence_parallel": True,
            "distil": {"top_k": 0, "hidden": "mse"},
            "config": {**TEACHER, "hidden": 24},
        },
        "language": {"ranks": [2, 3, 4, 5], "cp": 2, "tp": 2, "sequence_parallel": True},
    },
    "ids and hidden rows, to tensor ranks": {
        "teacher": {
            "ranks": [0, 1],
            "tp": 2,
            "sequence_parallel": True,
            "distil": {"top_k": 3, "hidden": "mse"},
            "config": {**TEACHER, "hidden": 24},
        },
        "language": {"ranks": [2, 3], "tp": 2, "sequence_parallel": True},
    },
    "context and sequence slices": {
        "vision": {"ranks": [0, 1, 2]},
        "language": {"ranks": [1, 2, 3, 4], "cp": 2, "tp": 2, "sequence_parallel": True},
    },
    "out of context and sequence slices, to more lanes": {
        "vision": {"ranks": [4]},
        "language": {"ranks": [0, 1, 2, 3], "cp": 2, "tp": 2, "sequence_parallel": True},
        "drawer": {"ranks": [2, 3, 4], "fed_by": "language"},
    },
    "out of a last stage, to stages and tensor ranks": {
        "vision": {"ranks": [2]},
        "language": {"ranks": [0, 1], "pp": 2},
        "drawer": {"ranks": [1, 2, 3, 4], "fed_by": "language", "pp": 2, "tp": 2, "plugin": "flow", "config": DRAWN},
    },
    "out of tensor ranks, to context ranks that overlap": {
        "vision": {"ranks": [3]},
        "language": {"ranks": [0, 1], "tp": 2},
        "drawer": {"ranks": [1, 2], "fed_by": "language", "cp": 2, "plugin": "flow", "config": DRAWN},
    },
    "an encoder of a generator's own, in stages and slices": {
        "vision": {"ranks": [3]},
        "lens": {"ranks": [0, 1, 2, 3], "cp": 2, "tp": 2, "sequence_parallel": True, "feeds": "drawer", "config": LENS},
        "language": {"ranks": [0, 1], "pp": 2},
        "drawer": {"ranks": [2, 3], "fed_by": "language"},
    },
    "an encoder of two modules, in slices, to context ranks": {
        "vision": {"ranks": [0, 1], "cp": 2, "feeds": ["language", "drawer"], "config": LENS},
        "language": {"ranks": [0, 1], "cp": 2},
        "drawer": {"ranks": [1, 2], "fed_by": "language", "cp": 2, "plugin": "flow", "config": DRAWN},
    },
}


NUMBER_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
"""Of each number that travels, by the run's precision."""


def ask(
    modules: Mapping[str, Mapping[str, Any]], *, edges: bool = True, precision: str = "fp32", weights: str = "none"
) -> Table:
    """Return settings of a run of a few steps, with or without what its edges send."""
    makes = any("fed_by" in keys for keys in modules.values())
    more: dict[str, Any] = {"pictures": "many", "roles": {"image": ("input", "output", "both")}} if makes else {}
    settings = {**table(modules, microbatches=2, weights=weights, **more), "logging": {"edges": edges}}
    return settings if precision == "fp32" else in_precision(settings, precision)


def train(rank: int, settings: Table) -> list[Mapping[str, EdgeTraffic]]:
    """Take two steps with an evaluation between them; return the traffic that each reports of edges."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    first = trainer.train(1).edges
    trainer.evaluate(1)
    return [first, trainer.train(2).edges]


def taught_bytes(distil: Mapping[str, Any], precision: str) -> int:
    """Return the bytes of a row: of each likely id 4 and a number, and where hidden rows travel 24 numbers."""
    number = NUMBER_BYTES[precision]
    return int(distil["top_k"]) * (4 + number) + (24 * number if "hidden" in distil else 0)


@pytest.mark.each("precision")
@pytest.mark.parametrize("precision", NUMBER_BYTES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_boundaries_send_what_was_expected_of_them(layout: str, precision: str, pool: Pool) -> None:
    """Every rank knows what all have sent in each step; no row crosses a boundary more often than it must."""
    settings = ask(LAYOUTS[layout], precision=precision)
    job = make_job(settings)
    for step, found in enumerate(zip(*pool.run(job.world, train, settings), strict=True), 1):
        expected = list(expect_traffic(job, step))
        assert all(one == {it.edge.name: it.traffic for it in expected} for one in found)
        for it in expected:
            row_bytes = NUMBER_BYTES[precision] * job.width(it.edge)
            if it.edge.name == "teacher->language":
                row_bytes = taught_bytes(LAYOUTS[layout]["teacher"]["distil"], precision)
            assert sum(it.traffic.bytes_sent) == row_bytes * sum(it.traffic.rows_sent) > 0
            assert it.least in {None, sum(it.traffic.rows_sent)}
            back = sum(it.traffic.gradient_rows_sent)
            assert back == (sum(it.traffic.rows_sent) if it.edge.gradient else 0)


@pytest.mark.each("distil")
@pytest.mark.parametrize(
    "distil",
    [{"top_k": 5}, {"top_k": 0, "hidden": "mse"}, {"top_k": 5, "hidden": "cosine"}],
    ids=["ids", "hidden rows", "both"],
)
def test_of_what_a_teacher_says_rows_with_labels_travel_alone(distil: Mapping[str, Any], pool: Pool) -> None:
    """In the run's precision, ids in 4 bytes; neither a sample's end nor a token of weight 0 is of use to a student."""
    teacher = {"ranks": [0], "distil": distil, "config": {**TEACHER, "hidden": 24}}
    for precision in NUMBER_BYTES:
        settings = ask({"teacher": teacher, "language": {"ranks": [1]}}, precision=precision, weights="mixed")
        job = make_job(settings)
        assert job.train is not None
        for step, found in enumerate(pool.run(2, train, settings)[0], 1):
            traffic, samples = found["teacher->language"], job.sample_order().samples(step)
            labels = sum(labels_of(job.train, sample) for sample in samples)
            assert 0 < labels < sum(len(job.train.tokens(sample)) - 1 for sample in samples)
            assert traffic.rows_sent == (labels, 0)
            assert traffic.bytes_sent == (labels * taught_bytes(distil, precision), 0)
            assert sum(traffic.gradient_bytes_sent) == 0


def labels_of(dataset: Dataset, sample: int) -> int:
    """Return how many tokens of a sample without pictures are learned: all but the first, of a weight above 0."""
    weights = weights_of(dataset, sample)
    return sum(weight > 0 for weight in weights[1:]) if weights else len(dataset.tokens(sample)) - 1


def test_metrics_have_no_edges_by_default(pool: Pool) -> None:
    """Then nothing of them is sent in the step's one message."""
    assert (
        pool.run(2, train, ask({"vision": {"ranks": [0]}, "language": {"ranks": [1]}}, edges=False)) == [[{}, {}]] * 2
    )


def shown(folder: Path, modules: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the words of each line that `mimo check` shows of the boundary, for 24 digits of 16 rows each."""
    settings = {**ask(modules), "data": {"plugin": "digits"}, "tokenizer": {"plugin": "word", "words": WORDS}}
    (folder / "my.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    printed = here("check", folder / "my.toml", f"run.directory={folder / 'run'}").printed
    return [line.split()[1:] for line in printed.splitlines() if line.startswith("vision->language")]


def test_check_shows_rows_and_bytes_by_rank_beside_the_least_that_must_cross(tmp_path: Path) -> None:
    """Two lanes of 192 rows of 24 numbers, shared between two tensor ranks: each row goes to one of them."""
    assert shown(tmp_path, {"vision": {"ranks": [0, 1]}, "language": {"ranks": [2, 3], "tp": 2}}) == [
        ["0", "192", "18,432", "0", "0", "0"],
        ["1", "192", "18,432", "0", "0", "0"],
        ["2", "0", "0", "0", "192", "18,432"],
        ["3", "0", "0", "0", "192", "18,432"],
        ["all", "384", "36,864", "0", "384", "36,864"],
        ["least", "384"],
    ]


def test_check_counts_rows_that_stay_where_they_are_as_not_sent(tmp_path: Path) -> None:
    """Both ends on the same ranks and lanes move nothing; where one lane of two is elsewhere, it alone does."""
    assert shown(tmp_path, {"vision": {"ranks": [0, 1]}, "language": {"ranks": [0, 1]}}) == [
        ["0", "0", "0", "192", "0", "0"],
        ["1", "0", "0", "192", "0", "0"],
        ["all", "0", "0", "384", "0", "0"],
        ["least", "0"],
    ]
    assert shown(tmp_path, {"vision": {"ranks": [0, 1]}, "language": {"ranks": [1, 2]}})[-2:] == [
        ["all", "384", "36,864", "0", "384", "36,864"],
        ["least", "384"],
    ]

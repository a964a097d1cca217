"""The arithmetic of a step: as counted by hand on one process, and the same however modules are split."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import pytest
from jobs import CPU, make_job
from tables import Table, alone, table

from mimo.data import NO_LABEL
from mimo.hooks import Flops
from mimo.testing import Pool
from mimo.trainer import Trainer

WIDTH, LAYERS, INNER = 24, 3, 37
"""Of both models."""
KEYS, PIXELS = 8, 4
"""Width of the keys, two heads of four; numbers of a patch, two by two."""
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "lanes 3 to 2, stages in both": {
        "vision": {"ranks": [0, 1, 2, 3, 4, 5], "pp": 2},
        "language": {"ranks": [0, 6, 7, 8], "pp": 2},
    },
    "context, tensor and idle ranks": {
        "vision": {"ranks": [0, 2], "tp": 2, "batch_factor": 2},
        "language": {"ranks": [1, 2, 4, 5], "cp": 2, "tp": 2, "sequence_parallel": True},
    },
}


@attrs.frozen
class Forward:
    """Operations of a step's forward: of the layers of both models, of patches, of the projector, and of the head."""

    vision: float
    patches: float
    projector: float
    language: float
    head: float


def by_hand(settings: Table) -> Forward:
    """Count what the first step's samples take: two operations for each number of a weight and each row."""
    job = make_job(settings)
    assert job.train is not None
    samples = job.sample_order().samples(1)
    layouts = [job.lay_out(job.train, sample) for sample in samples]
    images = np.array([item.rows for layout in layouts for item in layout.items])
    texts = np.array([len(layout.tokens) for layout in layouts])
    labels = sum(int(np.count_nonzero(layout.labels != NO_LABEL)) for layout in layouts)
    square, inside = WIDTH * WIDTH, WIDTH * INNER
    return Forward(
        vision=LAYERS * (2 * images.sum() * (4 * square + 2 * inside) + 4 * (images**2).sum() * WIDTH),
        patches=2 * images.sum() * PIXELS * WIDTH,
        projector=2 * images.sum() * 2 * square,
        # Half of the pairs, as rows attend to earlier ones alone.
        language=LAYERS
        * (2 * texts.sum() * (2 * square + 2 * WIDTH * KEYS + 3 * inside) + 4 * (texts**2).sum() / 2 * WIDTH),
        head=2 * labels * WIDTH * job.tokenizer.vocabulary,
    )


def settings_of(modules: Mapping[str, Mapping[str, Any]], recompute: str = "none", **more: Any) -> Table:
    """Return settings of a run in which all modules recompute the same, and a rank does 10^9 operations a second."""
    found = table({name: {**keys, "recompute": recompute} for name, keys in modules.items()}, microbatches=2, **more)
    found["run"]["peak_tflops"] = 1e-3
    return found


def train(rank: int, settings: Table) -> tuple[float, Mapping[str, Flops]]:
    """Take a step and return its seconds and FLOPs, which an evaluation between changes in nothing."""
    trainer = Trainer(make_job(settings), rank=rank, device=CPU)
    trainer.evaluate(0)
    info = trainer.train(1)
    return info.seconds, info.flops


@pytest.mark.each("recompute")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_process_does_what_a_hand_counts(recompute: str, pool: Pool) -> None:
    """Backward is two forwards, of patches one; all layers are repeated, and nothing else."""
    settings = alone(settings_of(LAYOUTS["lanes 3 to 2, stages in both"]))
    for keys in settings["modules"].values():
        keys["recompute"] = recompute
    forward, ((seconds, found),) = by_hand(settings), pool.run(1, train, settings)
    vision, language = found["vision"], found["language"]
    assert vision.model_operations == pytest.approx(3 * (forward.vision + forward.projector) + 2 * forward.patches)
    assert language.model_operations == pytest.approx(3 * (forward.language + forward.head))
    again = (forward.vision, forward.language) if recompute == "full" else (0, 0)
    assert [one.hardware_operations - one.model_operations for one in (vision, language)] == pytest.approx(again)
    for one in (vision, language):  # both have had the one rank for the whole step
        assert one.model_flops == pytest.approx(one.model_operations / seconds)
        assert (one.mfu, one.hfu) == pytest.approx((one.model_flops / 1e9, one.hardware_flops / 1e9))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arithmetic_does_not_follow_from_the_layout(layout: str, pool: Pool) -> None:
    """Work of lanes, stages, context and tensor ranks is counted once; a second and a rank of each module."""
    settings = settings_of(LAYOUTS[layout], "full")
    forward = by_hand(settings)
    model = {
        "vision": 3 * (forward.vision + forward.projector) + 2 * forward.patches,
        "language": 3 * (forward.language + forward.head),
    }
    again = {"vision": forward.vision, "language": forward.language}
    for seconds, found in pool.run(make_job(settings).world, train, settings):
        for name, one in found.items():
            assert one.model_operations == pytest.approx(model[name])
            assert one.hardware_operations == pytest.approx(model[name] + again[name])
            ranks = len(settings["modules"][name]["ranks"])
            assert one.hardware_flops == pytest.approx(one.hardware_operations / seconds / ranks)


JOINT: Mapping[str, Mapping[str, Any]] = {
    "vision": {"ranks": [0, 1]},
    "lens": {"ranks": [3], "feeds": "drawer"},
    "teacher": {"ranks": [0, 1], "tp": 2, "distil": {"top_k": 3}},
    "language": {"ranks": [0, 1, 2, 3], "pp": 2, "cp": 2},
    "drawer": {
        "ranks": [1, 2, 3, 4],
        "pp": 2,
        "tp": 2,
        "fed_by": "language",
        "plugin": "flow",
        "config": {"height": 4, "width": 6, "channels": 1, "patch": 2, "hidden": 24, "layers": 2, "heads": 2},
    },
}
"""A teacher, and a generator with an encoder of its own."""


def test_teachers_and_generators_do_the_same_in_any_layout(pool: Pool) -> None:
    """As on one process, whatever lanes and slices their rows are in; a teacher has no backward and repeats nothing."""
    settings = settings_of(JOINT, "full", pictures="many", roles={"image": ("input", "output", "both")})
    del settings["modules"]["teacher"]["recompute"]
    one = alone(settings)
    for name in JOINT.keys() - {"teacher"}:
        one["modules"][name]["recompute"] = "full"
    ((_, expected),) = pool.run(1, train, one)
    assert expected.keys() == JOINT.keys()
    for _, found in pool.run(make_job(settings).world, train, settings):
        for name, flops in expected.items():
            assert found[name].model_operations == pytest.approx(flops.model_operations)
            assert found[name].hardware_operations == pytest.approx(flops.hardware_operations)
            assert (flops.hardware_operations > flops.model_operations > 0) == (name != "teacher")


def test_a_frozen_encoder_runs_no_backward(pool: Pool) -> None:
    """Only its projector does, if that trains; made a step ahead, its rows count in the step that they are for."""
    settings = settings_of({"vision": {"ranks": [0], "frozen": ["encoder"]}, "language": {"ranks": [1]}})
    ahead = copy.deepcopy(settings)
    ahead["modules"]["vision"] |= {"frozen": True, "prefetch": True}
    forward = by_hand(settings)
    for given, projector in ((settings, 3), (ahead, 1)):
        for _, found in pool.run(2, train, given):
            whole = forward.vision + forward.patches + projector * forward.projector
            assert found["vision"].model_operations == found["vision"].hardware_operations == pytest.approx(whole)
            assert found["language"].model_operations == pytest.approx(3 * (forward.language + forward.head))

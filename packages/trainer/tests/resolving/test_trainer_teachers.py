"""Teachers in settings: what follows from them, and every refusal before launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from mimo.hooks import ConfigError
from mimo.model import DECODER, EncoderSpec
from mimo.optimizer import OPTIMIZERS
from mimo.topology import StageId
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_cost import op_costs
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import Purpose, resolve

SIZES: Mapping[str, Any] = {"layers": 2, "heads": 2, "intermediate": 16}
EYE: Mapping[str, Any] = {"plugin": "eye", "ranks": "1", "feeds": "teacher"}
VISION: Mapping[str, Any] = {"plugin": "eye", "ranks": "2"}
HIDDEN: Mapping[str, Any] = {"top_k": 0, "hidden": "mse"}


@attrs.frozen(kw_only=True)
class NoConfig:
    pass


def _unused(*_arguments: Any) -> Any:
    raise AssertionError(_arguments)


STUBS: Mapping[str, Any] = {
    "eye": EncoderSpec(
        name="eye",
        config=NoConfig,
        measure=_unused,
        rows=_unused,
        prepare=_unused,
        build=_unused,
        parts={"trunk": ("trunk",), "projector": ("projector",)},
    ),
    "alone": attrs.evolve(DECODER, name="alone", distils=False),
}
"""An encoder that nobody can build, and a language model that can't teach."""


def table(*changes: tuple[str, Any], **modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a teacher and its student, with keys by path that differ, and more modules."""
    found: dict[str, Any] = {
        "run": {"name": "taught", "steps": 1, "global_batch": 4},
        "data": {"plugin": "mock"},
        "modules": {
            "teacher": {
                "plugin": "decoder",
                "ranks": "0-1",
                "pp": 2,
                "config": {"hidden": 16, **SIZES},
                "distil": {"top_k": 5},
            },
            "language": {"plugin": "decoder", "ranks": "2-3", "pp": 2, "config": {"hidden": 8, **SIZES}},
            **modules,
        },
    }
    for path, value in changes:
        *above, key = path.split(".")
        inner = found["modules"]
        for name in above:
            inner = inner.setdefault(name, {})
        inner[key] = value
    return found


def job_of(settings: Mapping[str, Any], purpose: Purpose = "generate") -> Job:
    """Return the job of settings."""

    def find(kind: Any, name: str, where: str) -> Any:
        found = STUBS.get(name) or find_installed(kind, name, where)
        if kind is OPTIMIZERS:  # as one that keeps fp32 weights beside
            return attrs.evolve(found, precisions=frozenset({"fp32", "bf16"}))
        return found

    return resolve(make_settings(settings), purpose=purpose, find=find, needs_data=False)


def test_what_follows_from_a_teacher() -> None:
    """It is frozen, feeds the last stage with as few bytes as can be, and is of the tokenizer's vocabulary."""
    job = job_of(table(), "import")
    (teacher,), (edge,) = job.teachers, [edge for edge in job.graph.edges if edge.is_boundary]
    assert teacher.frozen is True
    assert (edge.source, edge.target, edge.gradient) == (StageId("teacher", 1), StageId("language", 1), False)
    assert job.row_bytes(edge) == job.width(edge) == 5 * (4 + 4)
    assert teacher.config.vocabulary == job.language.config.vocabulary == job.tokenizer.vocabulary
    assert job.graph.by_name["teacher"].trains == (False, False)


def test_ids_take_four_bytes_and_numbers_those_of_the_precision() -> None:
    """In bf16 six bytes for each of five ids."""
    settings = table()
    settings["run"]["precision"] = "bf16"
    job = job_of(settings, "import")
    assert [job.row_bytes(edge) for edge in job.graph.edges if edge.is_boundary] == [5 * (4 + 2)]


def test_hidden_rows_take_the_bytes_of_their_numbers() -> None:
    """Beside those of ids or alone; then any language model teaches and is taught, and labels may weigh nothing."""
    wide = ("language.config.hidden", 16)
    both = job_of(table(wide, ("teacher.distil", {"top_k": 3, "hidden": "cosine"})), "import")
    assert [both.row_bytes(edge) for edge in both.graph.edges if edge.is_boundary] == [3 * (4 + 4) + 16 * 4]
    plugins = [(f"{name}.plugin", "alone") for name in ("teacher", "language")]
    settings = table(wide, ("teacher.distil", HIDDEN), *plugins, ("language.loss_weight", 0.0))
    settings["run"]["precision"] = "bf16"
    alone = job_of(settings, "train")
    assert [alone.width(edge) for edge in alone.graph.edges if edge.is_boundary] == [16 * 2]


def test_what_makes_no_logits_costs_none() -> None:
    """A teacher of hidden rows alone multiplies nothing by its head."""
    wide = ("language.config.hidden", 16)
    samples = SampleStats(lengths=(8,), labels=4, sizes={}, taught=(True,), taught_labels=4)
    of_ids, of_rows = (
        op_costs(job_of(table(wide, ("teacher.distil", distil)), "import"), StageId("teacher", 1), samples)["head"]
        for distil in ({"top_k": 3}, HIDDEN)
    )
    assert of_ids.weighted > of_rows.weighted == 0
    assert of_ids.split > of_rows.split


def test_nobody_is_taught_while_the_language_model_writes() -> None:
    """Neither the teacher nor what feeds it is built."""
    job = job_of(table(("language.loss_weight", 0.0), eye=EYE, vision=VISION))
    assert [module.name for module in job.modules] == ["language", "vision"]


def test_an_encoder_of_a_teacher_has_its_width() -> None:
    """And is frozen; it reads the same items as the student's."""
    job = job_of(table(eye=EYE, vision=VISION), "import")
    assert [job.row_width(job.module(name)) for name in ("eye", "vision")] == [16, 8]
    assert job.module("eye").frozen is True
    assert job.graph.arrows == (("teacher", "language"), ("eye", "teacher"), ("vision", "language"))
    assert job.taught_modalities == {"image"}


LORA = {"rank": 2, "targets": ["*"]}
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "trained": (
        table(("teacher.frozen", ["head"])),
        "modules.teacher.frozen: expected true, or nothing, as a teacher isn't trained, got ['head']. Leave it out.",
    ),
    "adapted": (
        table(("teacher.lora", LORA)),
        "modules.teacher.lora: expected nothing, as a teacher isn't trained, got ",
    ),
    "student with a teacher's table": (
        table(("language.distil", {"top_k": 3})),
        "modules.language.distil: expected nothing, as this module is the one that learns, got ",
    ),
    "another vocabulary": (
        table(("teacher.config.vocabulary", 300)),
        (
            "modules.teacher.config.vocabulary: expected the 257 ids of modules.language, as both read and write by "
            "one tokenizer, got 300. Take a teacher with the same tokenizer."
        ),
    ),
    "more ids than there are": (
        table(("teacher.distil.top_k", 4000)),
        "modules.teacher.distil.top_k: expected at most the 257 ids that there are, got 4000",
    ),
    "nothing to say": (
        table(("teacher.distil.top_k", 0)),
        (
            'modules.teacher.distil.top_k: expected 1 or more, or 0 beside hidden = "mse" or "cosine", got 0, so that '
            "it would say nothing."
        ),
    ),
    "a temperature of no logits": (
        table(("teacher.distil", {**HIDDEN, "temperature": 2.0})),
        (
            "modules.teacher.distil.temperature: expected 1.0 beside top_k = 0, as no logits are compared, got 2.0. "
            "Leave it out."
        ),
    ),
    "a weight of no rows": (
        table(("teacher.distil", {"top_k": 3, "hidden_weight": 2.0})),
        (
            'modules.teacher.distil.hidden_weight: expected 1.0 beside hidden = "none", as no hidden rows are '
            'compared, got 2.0. Leave it out, or set hidden to "mse" or "cosine".'
        ),
    ),
    "a weight of no divergence": (
        table(("teacher.distil", HIDDEN), ("teacher.loss_weight", 0.5)),
        (
            "modules.teacher.loss_weight: expected 1 beside distil.top_k = 0, as it is that of the divergence, got "
            "0.5. Set modules.teacher.distil.hidden_weight instead."
        ),
    ),
    "rows of no logits": (
        table(("teacher.distil", HIDDEN), ("teacher.loss_rows", 5)),
        (
            "modules.teacher.loss_rows: expected 0 beside distil.top_k = 0, as a teacher that sends no ids makes no "
            "logits, got 5. Leave it out."
        ),
    ),
    "rows of another width": (
        table(("teacher.distil", HIDDEN)),
        (
            "modules.teacher.distil.hidden: expected 'none', or a teacher of rows as wide as the 8 numbers of "
            "modules.language, got 'mse', and rows of 16. Take a teacher of that width, or learn by its ids alone: no "
            "projection between widths is learned."
        ),
    ),
    "hidden rows that weigh nothing": (
        table(
            ("teacher.distil", {**HIDDEN, "hidden_weight": 0.0}),
            ("language.config.hidden", 16),
            ("language.loss_weight", 0.0),
        ),
        "modules.language.loss_weight: expected a number above 0, unless the loss_weight of a teacher or generator ",
    ),
    "cold": (
        table(("teacher.distil.temperature", 0.0)),
        "modules.teacher.distil.temperature: expected a finite number above 0, got 0.0",
    ),
    "nothing to learn": (
        table(("teacher.loss_weight", 0.0), ("language.loss_weight", 0.0)),
        (
            "modules.language.loss_weight: expected a number above 0, unless the loss_weight of a teacher or "
            "generator is one, or a hidden_weight, got 0, so that nothing would be learned. Leave it out, or add a "
            "teacher: a module with a table distil."
        ),
    ),
    "negative": (
        table(("language.loss_weight", -1.0)),
        "modules.language.loss_weight: expected a finite number of 0 or more, got -1.0",
    ),
    "a loss weight without targets": (
        table(vision={**VISION, "loss_weight": 0.5}),
        "modules.vision.loss_weight: expected 1, as an encoder has no targets of its own, got 0.5. Leave it out.",
    ),
    "a plugin that can't teach": (
        table(("teacher.plugin", "alone")),
        "modules.teacher.plugin: expected a language model whose plugin says `distils`, got 'alone'.",
    ),
    "a plugin that can't be taught": (
        table(("language.plugin", "alone")),
        "modules.language.plugin: expected a language model whose plugin says `distils`, got 'alone'.",
    ),
    "a modality of a teacher": (
        table(("teacher.modality", "image")),
        "modules.teacher.modality: expected nothing, as only encoders read one, got 'image'",
    ),
    "passes for several": (
        table(("teacher.batch_factor", 2)),
        (
            "modules.teacher.batch_factor: expected 1, as only passes of encoders and generators serve several "
            "microbatches, got 2."
        ),
    ),
    "feeding an encoder": (
        table(vision=VISION, eye={**EYE, "feeds": "vision"}),
        (
            "modules.eye.feeds: expected 'language', a teacher (a module with a table distil), or a generator (one "
            "with fed_by): teacher, got 'vision'"
        ),
    ),
    "teaching a teacher": (
        table(("teacher.feeds", "teacher")),
        "modules.teacher.feeds: expected 'language', as only encoders may feed another module, got 'teacher'.",
    ),
    "an encoder of a teacher that trains": (
        table(vision=VISION, eye={**EYE, "frozen": ["projector"]}),
        "modules.eye.frozen: expected true, or nothing, as what feeds a teacher isn't trained, got ['projector'].",
    ),
    "seeing more than the student": (
        table(eye=EYE),
        (
            "modules.eye.modality: expected one that modules.language reads too, as all are shown the same samples, "
            "got 'image'. Add an encoder of it with feeds = \"language\"."
        ),
    ),
    "ahead of what feeds it": (
        table(("teacher.prefetch", True), vision=VISION, eye=EYE),
        (
            "modules.teacher.prefetch: expected that what feeds it is made ahead too, got eye, whose rows are made in "
            "their own step. Set modules.eye.prefetch = true too, or leave this one out."
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_teach_is_refused(case: str) -> None:
    """By the path of the setting, before anything is launched."""
    settings, text = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        job_of(settings, "train")
    assert str(error.value).startswith(text)

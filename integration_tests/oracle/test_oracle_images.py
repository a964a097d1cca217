"""Language models of the library that take rows of images in ways of their own, in layouts beside the truth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cases import Modules
from jobs import CPU, make_job
from oracle import Oracle
from tables import Table, table
from test_oracle import on

from mimo.trainer.runtime import Microbatch, language_batch
from mimo_transformers import shrink
from mimo_transformers.family import config_of

LAYOUTS: Mapping[str, Modules] = {
    "cp2 pp2": {"vision": on(0, 0), "language": on(0, 3, pp=2, cp=2)},
    "tp2, lanes": {"vision": on(0, 1), "language": on(0, 3, tp=2)},
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "items": ("gemma3_text", {"bidirectional_items": True}),
    "deep grids": ("qwen3_vl_text", {"deepstack": 3}),
}
"""What the rows of an image do: see each other, or turn by their places and are added behind three of four layers."""


def settings_of(layout: str, model: str, **config: Any) -> Table:
    """Return the settings of a layout with a small language model."""
    model_type, more = MODELS[model]
    values = shrink(config_of(model_type, {}), vocab_size=0)
    del values["vocab_size"]
    keys = {"plugin": "hf-decoder", "config": {"model_type": model_type, "values": values, **more, **config}}
    return table({**LAYOUTS[layout], "language": {**LAYOUTS[layout]["language"], **keys}}, microbatches=2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["cp2 pp2", pytest.param("tp2, lanes", marks=pytest.mark.soak)])
def test_layout_never_changes_the_result(layout: str, model: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process, with 0, 1 or 3 pictures a sample, which context ranks cut."""
    assert oracle.check(settings_of(layout, model)) == ""


def test_edges_are_as_wide_as_what_travels_on_them() -> None:
    """An encoder delivers rows for all layers that add some, and a stage hands on those of the next one."""
    job = make_job(settings_of("cp2 pp2", "deep grids"))
    widths = {edge.name: job.width(edge) // 32 for edge in job.graph.edges}
    assert widths == {"vision->language": 4, "language.0-1": 2}


def test_a_batch_says_which_rows_are_one_items_where_it_is_read() -> None:
    """The same on all context ranks: the runs of each sample's placeholders."""
    job = make_job(settings_of("cp2 pp2", "items"))
    assert job.train is not None
    microbatch = Microbatch(job, job.train, range(6))
    batches = [language_batch(microbatch.packed(job.language, 0, rank), job, CPU) for rank in range(2)]
    wanted = tuple(
        tuple((item.start, item.start + item.rows) for item in layout.items) for layout in microbatch.layouts
    )
    assert any(len(spans) > 1 for spans in wanted)
    assert [batch.items for batch in batches] == [wanted, wanted]
    plain = make_job(settings_of("cp2 pp2", "items", bidirectional_items=False))
    assert language_batch(Microbatch(plain, job.train, range(6)).packed(plain.language, 0), plain, CPU).items == ()

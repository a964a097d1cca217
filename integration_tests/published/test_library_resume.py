"""Runs of the library's models that stop and resume in the same or another layout are the runs that never stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from cases import Modules
from published_images import FOLDERS
from resuming import check_going_on
from tables import EVEN_EPS, Table, table
from test_oracle import on

from mimo.testing import Pool
from mimo_transformers import shrink
from mimo_transformers.family import config_of
from mimo_transformers.weights import IMAGES

LAYOUTS: Mapping[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "lanes": {"vision": on(0, 0), "language": on(0, 1)},
    "tensor ranks in both": {"vision": on(0, 1, tp=2), "language": on(0, 1, tp=2)},
    "disjoint, stages": {"vision": on(0, 0), "language": on(1, 2, pp=2)},
    "stages of tensor ranks": {"vision": on(0, 1, tp=2), "language": on(0, 3, tp=2, pp=2)},
    "context ranks": {"vision": on(0, 1), "language": on(0, 1, cp=2)},
    "experts over lanes": {"vision": on(0, 1), "language": on(0, 1, ep=2)},
    "experts over tensor ranks": {"vision": on(0, 1, tp=2), "language": on(0, 3, tp=2, ep=2, etp=2)},
}
DEEP = len(FOLDERS["qwen3_vl"].config["vision_config"]["deepstack_visual_indexes"])
SHARDED = {"plugin": "distributed", "shard": "optimizer"}


@attrs.frozen(kw_only=True)
class Case:
    """A run that saves, and one that resumes.

    Args:
        vision: ``tower`` for `hf-encoder`, else the name of one of `FOLDERS` for `hf-images`.
        language: model type, for `hf-decoder`.
        before, after: of `LAYOUTS`.
        always: whether it is run among the ordinary tests.
    """

    vision: str
    language: str
    before: str
    after: str
    always: bool = False

    def __str__(self) -> str:
        """Name it in reports."""
        return f"{self.vision} and {self.language}, {self.before} to {self.after}"

    def settings(self, directory: Path, layout: str) -> Table:
        """Return the run of six steps in a layout; one to another takes over a whole optimizer by a sharded one.

        A mixture of which the library knows how is trained towards equal loads.
        """
        deep = {"deepstack": DEEP} if self.vision == "qwen3_vl" else {}
        library = config_of(self.language, {})
        values = shrink(library, vocab_size=0)
        del values["vocab_size"]
        if hasattr(library, "router_aux_loss_coef"):
            values |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
        modules = {
            "vision": {**LAYOUTS[layout]["vision"], **vision_of(self.vision, values["hidden_size"])},
            "language": {
                **LAYOUTS[layout]["language"],
                "plugin": "hf-decoder",
                "config": {"model_type": self.language, "values": values, **deep},
            },
        }
        found = table(modules, microbatches=2, eps=EVEN_EPS)
        found["run"] |= {"steps": 6, "directory": str(directory)}
        if layout == self.after != self.before:
            found["optimizer"] |= SHARDED
        return found


def vision_of(name: str, hidden: int) -> Mapping[str, Any]:
    """Return the keys of a small vision tower, or of all of a small model but its language model."""
    if name == "tower":
        values = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
        values |= {"image_size": 8, "patch_size": 4}
        return {"plugin": "hf-encoder", "config": {"model_type": "siglip_vision_model", "values": values}}
    folder = FOLDERS[name]
    family = IMAGES.of(folder.config["model_type"])
    assert family is not None
    files = {"preprocessor_config.json": folder.preprocessor, "processor_config.json": folder.processor}
    settings = json.loads(json.dumps(family.settings({**folder.config, **files})))
    settings["values"]["text_config"]["hidden_size"] = hidden
    tower = settings["values"]["vision_config"]
    tower |= {"out_hidden_size": hidden} if "out_hidden_size" in tower else {}
    return {"plugin": "hf-images", "config": settings}


CASES = (
    Case(vision="qwen3_vl", language="qwen3_vl_text", before="alone", after="disjoint, stages"),
    Case(vision="qwen3_vl", language="qwen3_vl_text", before="alone", after="tensor ranks in both"),
    Case(vision="tower", language="qwen3_moe", before="lanes", after="experts over tensor ranks"),
    Case(vision="tower", language="llama", before="alone", after="alone"),
    Case(vision="tower", language="llama", before="disjoint, stages", after="context ranks"),
    Case(vision="tower", language="gemma3_text", before="stages of tensor ranks", after="lanes", always=True),
    Case(vision="tower", language="deepseek_v3", before="experts over lanes", after="alone"),
    Case(vision="tower", language="qwen3_next", before="disjoint, stages", after="tensor ranks in both"),
    Case(vision="tower", language="gpt_oss", before="context ranks", after="disjoint, stages"),
    Case(vision="qwen3_vl", language="qwen3_vl_text", before="disjoint, stages", after="disjoint, stages"),
    Case(vision="qwen3_vl", language="qwen3_vl_text", before="stages of tensor ranks", after="context ranks"),
    Case(
        vision="qwen3_vl", language="qwen3_vl_moe_text", before="experts over lanes", after="experts over tensor ranks"
    ),
    Case(vision="qwen3_vl", language="qwen3_vl_text", before="lanes", after="stages of tensor ranks"),
    Case(vision="llava_next", language="llama", before="tensor ranks in both", after="disjoint, stages"),
    Case(vision="qwen2_5_vl", language="qwen2_5_vl_text", before="context ranks", after="alone"),
    Case(vision="internvl", language="qwen2", before="lanes", after="tensor ranks in both"),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case.always else pytest.mark.soak) for case in CASES]
)
def test_six_steps_equal_three_saved_and_three_more(case: Case, tmp_path: Path, pool: Pool) -> None:
    """The same layout resumes to the bit, another one within the first law: losses, weights and moments."""
    first, second = (case.settings(tmp_path, layout) for layout in (case.before, case.after))
    check_going_on(pool, first, second, exactly=case.before == case.after)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_layers_take_over_a_run(case: Case, tmp_path: Path, pool: Pool) -> None:
    """Three steps by eager layers and three by compiled ones are six by these, of towers and whole models too."""
    first, second = (case.settings(tmp_path, layout) for layout in (case.before, case.after))
    second["run"] |= {"compile": True, "compile_backend": "aot_eager"}
    check_going_on(pool, first, second, exactly=False)

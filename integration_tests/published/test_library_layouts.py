"""The library's own language models in schedules, with layers in pieces and with LoRA, against the plain loop."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from cases import Modules, some
from oracle import Oracle
from tables import CHUNKED, EVEN_EPS, SCHEDULES, Table, table
from test_oracle import on
from test_oracle_distributed import Way, distributed

from mimo.hooks import ConfigError
from mimo.trainer import read_settings, resolve
from mimo_transformers import shrink
from mimo_transformers.family import config_of

FAMILIES = ("llama", "gpt_oss", "deepseek_v3", "gemma3_text", "jamba", "qwen3_next", "falcon_h1")
"""With experts, latent attention, windows, scans and linear attention."""
LORA = {"rank": 2, "targets": ["*"]}
SPLITTING = ("zb-h1", "zb-v", "interleaved")
PIECES = tuple(itertools.product(("none", "full"), ("llama", "deepseek_v3", "jamba")))


def settings_of(model_type: str, modules: Modules, sizes: Mapping[str, int] | None = None, **language: Any) -> Table:
    """Return settings with a small model of a family as the language model, some of its sizes others than usual."""
    values = shrink(config_of(model_type, {}), vocab_size=0, **(sizes or {}))
    del values["vocab_size"]
    keys = {"plugin": "hf-decoder", "config": {"model_type": model_type, "values": values}, **language}
    return table({**modules, "language": {**modules["language"], **keys}}, microbatches=4, eps=EVEN_EPS)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("schedule", "model_type"),
    some(itertools.product(SPLITTING, FAMILIES), {("zb-h1", "jamba")}),
)
def test_schedules_change_nothing(schedule: str, model_type: str, oracle: Oracle) -> None:
    """Also where a backward has two parts, and where ranks have two stages each."""
    chunks = {"chunks": 2} if schedule in CHUNKED else {}
    settings = settings_of(model_type, {"vision": on(0, 0), "language": on(0, 1, pp=2, **chunks)})
    assert oracle.check({**settings, "schedule": dict(SCHEDULES[schedule])}) == ""


@pytest.mark.soak
@pytest.mark.parametrize(("recompute", "model_type"), some(PIECES, {("full", "jamba")}))
def test_layers_in_pieces_change_nothing(recompute: str, model_type: str, oracle: Oracle) -> None:
    """Whether a backward computes them again or not."""
    settings = settings_of(model_type, {"vision": on(0, 1), "language": on(0, 1, recompute=recompute)})
    settings["run"]["micro_batch"] = 6
    assert oracle.check(distributed(settings, Way("full", overlaps=True))) == ""


@pytest.mark.parametrize("model_type", some(("llama", "qwen3_moe"), {"qwen3_moe"}))
def test_lora_on_tensor_ranks_changes_nothing(model_type: str, oracle: Oracle) -> None:
    """Beside every linear."""
    settings = settings_of(model_type, {"vision": on(0, 0), "language": on(0, 1, tp=2)}, lora=LORA)
    assert oracle.check(settings) == ""


ONE_KEY = {"num_key_value_heads": 1}
IN_PIECES = {"recompute": "full", "loss_rows": 5}
COMPILED: dict[str, tuple[str, Modules, dict[str, Any]]] = {
    "windows, tp2": ("gemma3_text", {"vision": on(0, 0), "language": on(0, 1, tp=2)}, {}),
    "tp2 pp2, recomputed": ("llama", {"vision": on(0, 0), "language": on(0, 3, tp=2, pp=2)}, {"recompute": "full"}),
    "cp2 pp2, LoRA": ("llama", {"vision": on(0, 1), "language": on(0, 3, cp=2, pp=2)}, {"lora": LORA}),
    "experts, ep2": ("qwen3_moe", {"vision": on(0, 1), "language": on(0, 1, ep=2)}, {}),
    "latent attention, dp2": ("deepseek_v3", {"vision": on(0, 0), "language": on(0, 1)}, {}),
    "scans": ("jamba", {"vision": on(0, 0), "language": on(0, 0)}, {}),
    "a head of keys, tp2, all at once": (
        "llama",
        {"vision": on(0, 0), "language": on(0, 1, tp=2)},
        {"sizes": ONE_KEY, "lora": LORA, **IN_PIECES},
    ),
    "a head of keys, tp4, windows": (
        "gemma3_text",
        {"vision": on(0, 0), "language": on(0, 3, tp=4)},
        {"sizes": ONE_KEY},
    ),
    "experts, ep2, all at once": (
        "qwen3_moe",
        {"vision": on(0, 1), "language": on(0, 1, ep=2)},
        {"lora": LORA, **IN_PIECES},
    ),
    "scans, all at once": ("jamba", {"vision": on(0, 0), "language": on(0, 0)}, {"lora": LORA, **IN_PIECES}),
}


@pytest.mark.parametrize("case", some(COMPILED, {"windows, tp2"}))
def test_compiled_layers_change_nothing(case: str, oracle: Oracle) -> None:
    """Loss, gradients and weights equal one process that compiles nothing."""
    model_type, modules, language = COMPILED[case]
    settings = settings_of(model_type, modules, **language)
    settings["run"] |= {"compile": True, "compile_backend": "aot_eager"}
    assert oracle.check(settings) == ""


def test_lora_beside_what_is_no_linear_is_refused() -> None:
    """By the path of the setting."""
    lora = {"rank": 2, "targets": ["*norm*"]}
    settings = settings_of("llama", {"vision": on(0, 0), "language": on(0, 0)}, lora=lora)
    settings["run"] |= {"name": "refused", "directory": "refused"}
    with pytest.raises(ConfigError, match=r"^modules\.language\.lora\.targets: expected patterns of the paths of lin"):
        resolve(read_settings(settings))

"""How often the host waits for a device in a step: once, and once for each layer and microbatch of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from accelerator import Wait, accelerator
from jobs import CPU, make_job
from tables import Table, table, world_of
from test_dropout import dropping
from test_dropout import of_library as dropping_of_library
from test_memory_peak import of_library
from test_oracle import SOFTMAX, on
from test_oracle_audio import CONFIGS as WHISPER
from test_oracle_images import settings_of
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_radio import CONFIGS as RADIO
from test_oracle_vision import FAMILIES as VISION
from torch import Tensor

from mimo.model.runtime import to_device
from mimo.testing import Pool
from mimo.trainer import Trainer

HERE = on(0, 0)
MICROBATCHES = 2
AGREED = "mimo/optimizer/runtime/_agreement.py"
"""Reads what all ranks have summed: the loss, norms, and whether they are finite."""
DISPATCHED = "mimo/model/parallel/dispatch.py"
"""Reads how many rows go to which expert."""


def _dropping(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return keys of an encoder some of whose paths are dropped, or features of one of clips."""
    drops = {"dropout": 0.1, "activation_dropout": 0.1} if keys.get("plugin") == "whisper" else {"drop_path": 0.1}
    return {**keys, "config": {**keys["config"], **drops}}


TAUGHT: Mapping[str, Any] = {**HERE, "distil": {"top_k": 3}}
DRAWN: Mapping[str, Any] = {
    **HERE,
    "fed_by": "language",
    "plugin": "flow",
    "config": {"height": 4, "width": 6, "channels": 1, "patch": 2, "hidden": 24, "layers": 2, "heads": 2},
}
LORA: Mapping[str, Any] = {"rank": 2, "targets": ["*"], "dropout": 0.1}
CASES: Mapping[str, Mapping[str, Any]] = {
    "decoder": {"modules": {"vision": HERE, "language": HERE}},
    "stages on two ranks": {"modules": {"vision": on(0, 0), "language": on(0, 1, pp=2)}},
    "an encoder on other ranks": {"modules": {"vision": on(0, 0), "language": on(1, 1)}},
    "experts": {"modules": {"vision": HERE, "language": HERE}, "language": SOFTMAX, "seed": 11},
    "experts over lanes": {"modules": {"vision": HERE, "language": on(0, 1, ep=2)}, "language": SOFTMAX, "seed": 11},
    "recomputed": {"modules": {"vision": HERE, "language": {**HERE, "recompute": "full"}}},
    "recomputed experts": {
        "modules": {"vision": HERE, "language": {**HERE, "recompute": "full"}},
        "language": SOFTMAX,
        "seed": 11,
    },
    "what is dropped": {
        "modules": {"vision": {**HERE, "lora": LORA}, "language": {**HERE, "recompute": "full"}},
        "language": {"hidden_dropout": 0.1, "embedding_dropout": 0.1},
    },
    "experts that drop": {
        "modules": {"vision": HERE, "language": {**HERE, "lora": LORA}},
        "language": SOFTMAX,
        "seed": 11,
    },
    "a teacher and a flow": {
        "modules": {"vision": HERE, "teacher": TAUGHT, "language": HERE, "drawer": DRAWN},
        "roles": {"image": ("input", "output", "both")},
    },
    "a teacher and a flow on other ranks": {
        "modules": {
            "vision": HERE,
            "teacher": {**TAUGHT, "ranks": [1]},
            "language": HERE,
            "drawer": {**DRAWN, "ranks": [1], "recompute": "full"},
        },
        "roles": {"image": ("input", "output", "both")},
    },
    "hybrid": {"modules": {"vision": HERE, "language": {**HERE, "plugin": "hybrid", "config": HYBRID}}},
    **{
        f"vision {name}": {"modules": {"vision": {**HERE, **_dropping(keys)}, "language": HERE}}
        for name, keys in VISION.items()
    },
    **{
        f"audio {name}": {
            "modules": {"audio": {**HERE, **_dropping({"plugin": "whisper", "config": config})}, "language": HERE}
        }
        for name, config in WHISPER.items()
    },
    **{
        f"radio {name}": {
            "modules": {"radio": {**HERE, **_dropping({"plugin": "radio", "config": config})}, "language": HERE}
        }
        for name, config in RADIO.items()
    },
}
LIBRARY: Mapping[str, Callable[[], Table]] = {
    "llama and siglip of transformers": lambda: of_library(table(**CASES["decoder"], microbatches=2), "llama"),
    "models of transformers that drop": lambda: dropping_of_library(dropping({"vision": HERE, "language": HERE})),
    "a mixture of transformers": lambda: of_library(table(**CASES["decoder"], microbatches=2), "qwen3_moe"),
    "rows that see each other, tp2": lambda: settings_of("tp2, lanes", "items"),
    "rows behind layers, cp2 pp2": lambda: settings_of("cp2 pp2", "deep grids"),
}
ALWAYS = {"experts over lanes", "recomputed experts", "hybrid", "a teacher and a flow on other ranks"}
ALWAYS |= {"rows behind layers, cp2 pp2"}
LAYERS_OF_EXPERTS = {
    "experts": 2,
    "experts over lanes": 2,
    "experts that drop": 2,
    "recomputed experts": 2 * 2,  # backward sends the rows again
    "hybrid": 1,
    "a mixture of transformers": 4,
}


def waits_of_a_step(rank: int, settings: Table) -> Counter[Wait]:
    """Return what had the host wait in a step like all later ones.

    Models of the library are tried before, and what they take is counted: slow work where each operation is looked at.
    """
    job = make_job(settings)
    if job.language.spec.name == "hf-decoder":
        Trainer(job, rank=rank, device=CPU).train(1)
    with accelerator() as (device, waits):
        trainer = Trainer(job, rank=rank, device=device)
        trainer.train(1)
        waits.clear()
        trainer.train(2)
        return waits


@pytest.mark.each("case")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.soak) for case in (*CASES, *LIBRARY)]
)
def test_a_step_waits_once_and_once_for_the_rows_of_experts(case: str, pool: Pool) -> None:
    """On each rank; no operation's shape follows from numbers, and none has tensors of host and device."""
    settings = LIBRARY[case]() if case in LIBRARY else table(**CASES[case], microbatches=MICROBATCHES)
    settings["data"]["workers"] = 0  # threads would send items beside the step
    for waits in pool.run(world_of(settings), waits_of_a_step, settings):
        places = Counter[str]()
        for wait, count in waits.items():
            places[wait.place.partition(":")[0]] += count
        expected = {AGREED: 1, DISPATCHED: LAYERS_OF_EXPERTS.get(case, 0) * MICROBATCHES}
        assert places == {place: count for place, count in expected.items() if count}, waits
        assert {wait.kind for wait in waits} <= {"number", "copy to the host"}


PLANTED: Mapping[str, Callable[[Tensor], object]] = {
    "number": lambda x: x.sum().item(),
    "number in a condition": lambda x: bool(x.sum() > 0),
    "shape": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "copy to the device": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "copy to the device from other memory": lambda x: torch.ones(2).to(x.device, non_blocking=True),
    "copy to the host": lambda x: x.cpu(),
    "tensors of both in aten.add.Tensor": lambda x: x + torch.ones(3),
}


def waits_planted(_rank: int) -> dict[str, list[Wait]]:
    """Return what is found of each planted wait, and of what has none."""
    found = {}
    with accelerator(own=__file__) as (device, waits):
        x = torch.ones(3, device=device, requires_grad=True)
        for name, wait in PLANTED.items():
            waits.clear()
            wait(x.detach())
            found[name] = list(waits.elements())
        waits.clear()
        y = to_device(torch.arange(3), device)
        (x[y] * 2.0).cumsum(0).sum().backward()
        assert x.grad is not None
        x.grad.view(-1)[1] = 5.0
        found[""] = list(waits.elements())
        assert x.grad.tolist() == [6.0, 5.0, 2.0]
    return found


def test_planted_waits_are_found_by_their_lines(pool: Pool) -> None:
    """Each of its kind and where it stands; what waits for nothing is not among them."""
    (found,) = pool.run(1, waits_planted)
    for name, wait in PLANTED.items():
        kind = name.removesuffix(" in a condition").removesuffix(" from other memory")
        assert found[name] == [Wait(kind, f"test_host_waits.py:{wait.__code__.co_firstlineno}")], name
    assert found[""] == []

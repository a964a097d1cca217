"""How often the host waits for a device in a step: once, and once for each layer and microbatch of experts.

In what `run.compile` has compiled nothing can be counted here, since PyTorch compiles nothing where each operation is
looked at; its graphs hold no operation that waits: they end at one (`test_model_compiled.py` says where they do).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from accelerator import Wait, accelerator
from jobs import CPU, make_job
from tables import Table, table, world_of
from test_dropout import dropping
from test_dropout import of_library as dropping_of_library
from test_library_resume import vision_of
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
HOST_THREAD = "mimo-hybrid_0"
"""Steps what `cpu-offload` holds on the host."""
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
        "modules": {"vision": HERE, "language": on(0, 1, ep=2, recompute="full")},
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
EVERY_ENCODER: Mapping[str, Mapping[str, Any]] = {
    "vision": HERE,
    **{family.partition(",")[0]: {**HERE, **VISION[family]} for family in ("siglip, native", "clip, tiles")},
    "radio": {**HERE, "plugin": "radio", "config": RADIO["tiles"]},
    "audio": {**HERE, "plugin": "whisper", "config": WHISPER["resampled"]},
    "tower": {**HERE, **vision_of("tower", 24)},
    "language": HERE,
}
ALONE: Mapping[str, Mapping[str, Any]] = {"vision": HERE, "language": HERE}
LANES: Mapping[str, Mapping[str, Any]] = {"vision": on(0, 1), "language": on(0, 1)}
FP16: Mapping[str, Any] = {"precision": "fp16", "loss_scale": 1024}


def _run(modules: Mapping[str, Mapping[str, Any]], optimizer: str, *, run: Mapping[str, Any], **keys: Any) -> Table:
    """Return settings of a run with another optimizer."""
    found = table(modules, microbatches=MICROBATCHES)
    found["run"] |= run
    found["optimizer"] |= {"plugin": optimizer, **keys}
    return found


def _with_images(name: str) -> Table:
    """Return settings with all of a small model of the library but its language model."""
    return table({"vision": {**HERE, **vision_of(name, 24)}, "language": HERE}, microbatches=MICROBATCHES)


BF16: Mapping[str, Any] = {"precision": "bf16"}
OPTIMIZERS: Mapping[str, Callable[[], Table]] = {
    "every encoder in bf16": lambda: _run(EVERY_ENCODER, "distributed", run=BF16),
    "bf16 over lanes": lambda: _run(LANES, "distributed", run=BF16),
    "bf16, pieces of all": lambda: _run(LANES, "distributed", run=BF16, shard="full", overlap_grad_reduce=True),
    "fp16 over lanes": lambda: _run(LANES, "distributed", run=FP16),
    "matrices by muon": lambda: _run(LANES, "muon", run={}),
    "state on the host": lambda: _run(LANES, "cpu-offload", run={}, fraction=1),
    "half of the state on the host, in fp16": lambda: _run(ALONE, "cpu-offload", run=FP16, fraction=0.5),
}
LIBRARY: Mapping[str, Callable[[], Table]] = {
    "llama and siglip of transformers": lambda: of_library(table(**CASES["decoder"], microbatches=2), "llama"),
    "models of transformers that drop": lambda: dropping_of_library(dropping({"vision": HERE, "language": HERE})),
    "a mixture of transformers": lambda: of_library(table(**CASES["decoder"], microbatches=2), "qwen3_moe"),
    **{f"{name} of transformers": partial(_with_images, name) for name in ("internvl", "gemma3", "deepseek_vl")},
    "a recomputed mixture of transformers": lambda: of_library(
        table(**CASES["recomputed"], microbatches=2), "qwen3_moe"
    ),
    "rows that see each other, tp2": lambda: settings_of("tp2, lanes", "items"),
    "rows behind layers, cp2 pp2": lambda: settings_of("cp2 pp2", "deep grids"),
}
MADE = {**OPTIMIZERS, **LIBRARY}
ALWAYS = {"recomputed experts", "hybrid", "a teacher and a flow on other ranks"}
ALWAYS |= {"rows behind layers, cp2 pp2", "every encoder in bf16", "half of the state on the host, in fp16"}
LAYERS_OF_EXPERTS = {
    "experts": 2,
    "experts over lanes": 2,
    "experts that drop": 2,
    "recomputed experts": 2,  # backward sends as many rows again
    "hybrid": 1,
    "a mixture of transformers": 4,
    "a recomputed mixture of transformers": 4,
}


def waits_of_a_step(rank: int, settings: Table) -> Counter[Wait]:
    """Return what had the host wait in a step like all later ones, and its threads in all steps so far.

    Models of the library are tried before, and what they take is counted: slow work where each operation is looked at.
    """
    job = make_job(settings)
    if job.language.spec.name == "hf-decoder":
        Trainer(job, rank=rank, device=CPU).train(1)
    with accelerator() as (device, waits):
        trainer = Trainer(job, rank=rank, device=device)
        trainer.train(1)
        for wait in dict(waits):  # a copy, since a thread may add to it
            if not wait.thread:
                del waits[wait]
        trainer.train(2)
        return Counter(dict(waits))


@pytest.mark.each("case")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.soak) for case in (*CASES, *MADE)]
)
def test_a_step_waits_once_and_once_for_the_rows_of_experts(case: str, pool: Pool) -> None:
    """On each rank; no operation's shape follows from numbers, and none has tensors of host and device.

    A thread that steps what the host holds of an optimizer's state waits by itself for the gradients that it needs.
    """
    settings = MADE[case]() if case in MADE else table(**CASES[case], microbatches=MICROBATCHES)
    settings["data"]["workers"] = 0  # threads would send items beside the step
    beside = {(HOST_THREAD, "event")} if settings["optimizer"].get("plugin") == "cpu-offload" else set()
    for found in pool.run(world_of(settings), waits_of_a_step, settings):
        assert {(wait.thread, wait.kind) for wait in found if wait.thread} == beside, found
        waits = {wait: count for wait, count in found.items() if not wait.thread}
        places = Counter[str]()
        for wait, count in waits.items():
            places[wait.place.partition(":")[0]] += count
        expected = {AGREED: 1, DISPATCHED: LAYERS_OF_EXPERTS.get(case, 0) * MICROBATCHES}
        assert places == {place: count for place, count in expected.items() if count}, waits
        assert {wait.kind for wait in waits} <= {"number", "copy to the host"}


@pytest.mark.parametrize("name", ["lfm3_vl", pytest.param("llava_next", marks=pytest.mark.soak)])
def test_sizes_of_images_go_to_the_device_beside_the_host(name: str, pool: Pool) -> None:
    """The library waits for them where it needs their numbers; what says them to it does not."""
    settings = _with_images(name)
    settings["data"]["workers"] = 0
    (found,) = pool.run(1, waits_of_a_step, settings)
    assert AGREED in {wait.place.partition(":")[0] for wait in found}
    assert [wait for wait in found if wait.place.startswith("mimo_transformers/images/")] == []


PLANTED: Mapping[str, Callable[[Tensor], object]] = {
    "number": lambda x: x.sum().item(),
    "number in a condition": lambda x: bool(x.sum() > 0),
    "shape": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "copy to the device": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "copy to the device from other memory": lambda x: torch.ones(2).to(x.device, non_blocking=True),
    "copy to the host": lambda x: x.cpu(),
    "event": lambda x: torch.Stream(x.device).record_event().synchronize(),
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
        copied = torch.empty(3, device=device).copy_(torch.arange(5.0, pin_memory=True)[2:], non_blocking=True)
        torch.Stream(device).record_event().wait()
        found[""] = list(waits.elements())
        assert (x.grad.tolist(), copied.tolist()) == ([6.0, 5.0, 2.0], [2.0, 3.0, 4.0])
        waits.clear()
        thread = threading.Thread(target=PLANTED["number"], args=(x.detach(),), name="beside")
        thread.start()
        thread.join()
        found["beside"] = list(waits.elements())
    return found


def test_planted_waits_are_found_by_their_lines(pool: Pool) -> None:
    """Each of its kind and where it stands; what waits for nothing is not among them."""
    (found,) = pool.run(1, waits_planted)
    for name, wait in PLANTED.items():
        kind = name.removesuffix(" in a condition").removesuffix(" from other memory")
        assert found[name] == [Wait(kind, f"test_host_waits.py:{wait.__code__.co_firstlineno}")], name
    assert found[""] == []
    assert found["beside"] == [attrs.evolve(found["number"][0], thread="beside")]

"""What a day on a GPU asks of what runs write about themselves, tiny, on the CPU; and what is judged on GPUs alone."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _no_memory
import _precisions
import _traced
import pytest
import torch
import torch.distributed as dist
from _case import Case
from _slices import SLICES

from mimo.trainer.runtime import RankMemory


def case_of(folder: Path = Path(), device: str = "cpu", **options: Any) -> Case:
    """Return a case."""
    return Case(device=torch.device(device), tiny=True, folder=folder, options=options)


GPU = case_of(device="cuda:0")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave this process as it was: a rank makes a group, and settles how torch computes."""
    cudnn = torch.backends.cudnn
    settings = torch.get_num_threads(), cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(settings[0])
    _, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = settings
    torch.set_float32_matmul_precision(precision)
    for enable in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        enable(True)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_run_leaves_its_traces_and_its_profile(tmp_path: Path) -> None:
    """Of two steps and of one; what only a GPU has is left out by name."""
    found = _traced.test(case_of(tmp_path))
    assert not found.wrong
    assert found.figures["left out"].startswith("kernels in the profile")
    assert [found.figures[f"step {step}"]["bars"] for step in _traced.TRACED] == [10, 10]
    assert found.figures["profile"]["events"] > 100


BARS = [{"name": "forward 0", "ts": 0, "dur": 3e5}, {"name": "backward 0", "ts": 3e5, "dur": 5e5}]


@pytest.mark.parametrize(
    ("kinds", "seconds", "changed", "words"),
    [
        (["forward", "backward"], 0.9, {}, ""),
        (["backward", "forward"], 0.9, {}, "bars are ['forward 0', 'backward 0'], planned ['backward', 'forward']"),
        (["forward", "backward"], 0.7, {}, "bars span 0.8 s, the step took 0.7 s"),
        (["forward", "backward"], 0.9, {"dur": 0}, "backward 0 takes 0 us"),
    ],
)
def test_bars_are_those_of_the_plan(kinds: list[str], seconds: float, changed: dict[str, Any], words: str) -> None:
    """Each takes some time, and all lie within the step."""
    assert _traced.odd_bars([BARS[0], {**BARS[1], **changed}], kinds, seconds) == ([words] if words else [])


def event(name: str, kind: str, ts: float) -> dict[str, Any]:
    """Return an event of a profile that takes a second."""
    return {"ph": "X", "name": name, "cat": kind, "ts": ts, "dur": 1e6}


ACTIONS = [event(f"{word} of language stage 0", "user_annotation", ts) for ts, word in enumerate(("forward", "sum"))]


@pytest.mark.parametrize(
    ("case", "events", "bars", "words"),
    [
        (case_of(), ACTIONS[::-1], 0, ""),
        (case_of(), ACTIONS[:1], 0, "the profile has ['forward'], planned ['forward', 'reduce']"),
        (GPU, ACTIONS, 9, "the profile has no kernel"),
        (GPU, [*ACTIONS, event("gemm", "kernel", 0)], 0.5, ""),
        (GPU, [*ACTIONS, event("gemm", "kernel", 0)], 0.4, "kernels take 1 s, bars of a step 0.4 s"),
    ],
)
def test_a_profile_has_what_was_planned(case: Case, events: list[Any], bars: float, words: str) -> None:
    """And on a GPU kernels, in whose time bars of its own events lie."""
    assert _traced.odd_profile(case, events, ["forward", "reduce"], bars) == ([words] if words else [])


def test_a_profile_is_read_whole(tmp_path: Path) -> None:
    """All that has a length; a second file beside it is no profile of one rank."""
    (tmp_path / "profiles").mkdir()
    with gzip.open(tmp_path / "profiles" / "a.json.gz", "wt") as file:
        json.dump({"traceEvents": [ACTIONS[0], {"ph": "M", "name": "process_name"}]}, file)
    assert _traced.profile_of(tmp_path) == [ACTIONS[0]]
    (tmp_path / "profiles" / "b.json.gz").touch()
    with pytest.raises(ValueError, match="too many values"):
        _traced.profile_of(tmp_path)


def test_a_run_without_memory_says_what_would_have_fitted(tmp_path: Path) -> None:
    """In its first step, which is where the stand-in finds none; a snapshot is a GPU's alone."""
    found = _no_memory.test(case_of(tmp_path))
    assert not found.wrong
    assert "forward of language stage 0, microbatch 0" in found.figures["message"]
    assert found.figures["left out"].startswith("what the allocator holds")


def test_a_run_that_fits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended well, where it should not have."""
    monkeypatch.setattr(_no_memory, "Attention", int)
    assert _no_memory.test(case_of(tmp_path)).wrong == ["the run did not end for lack of memory"]


def test_what_a_gpu_has_left_is_half_of_the_activations_short() -> None:
    """The model fits, and the step does not."""
    assert _no_memory.limit_of(ESTIMATE) == 1600


ESTIMATE = RankMemory(weights=1000, state=200, activations=800)
MESSAGE = (
    "modules.language: expected what rank 0 holds of language to fit cuda:0 in step 1, forward of language; estimated "
    "are 1 MiB (weights 1 MiB), got out of memory. Estimated to fit: run.micro_batch=4. What its allocator holds is in "
    "run/memory_rank0.json."
)


@pytest.mark.parametrize(
    ("message", "held", "words"),
    [
        (MESSAGE, 1600, []),
        ("", 1600, ["the run did not end for lack of memory"]),
        (MESSAGE.replace("cuda:0", "cpu"), 1600, ["the message lacks 'to fit cuda:0 ': "]),
        (MESSAGE.replace("Estimated", ""), 1600, ["the message lacks 'stimated to fit': "]),
        (MESSAGE, None, ["no snapshot is in run/memory_rank0.json, or the message does not name it"]),
        (MESSAGE.replace("rank0.json", ""), 1600, ["no snapshot is in "]),
        (MESSAGE, 900, ["the snapshot has 900 bytes, weights 1000, and 1600 were left"]),
        (MESSAGE, 1601, ["the snapshot has 1601 bytes, weights 1000, and 1600 were left"]),
    ],
)
def test_last_words_and_snapshots_are_judged_on_a_gpu(message: str, held: int | None, words: list[str]) -> None:
    """By the place, the estimate, the advice, the file that is named, and the bytes in it."""
    found = _no_memory.missed(GPU, message, held, ESTIMATE, Path("run/memory_rank0.json"))
    assert len(found) == len(words)
    assert all(line.startswith(start) for line, start in zip(found, words, strict=True)), found


def test_bytes_of_a_snapshot_are_those_of_its_segments(tmp_path: Path) -> None:
    """As the allocator says them; a file that is not there has none."""
    path = tmp_path / "memory_rank0.json"
    assert _no_memory.held_bytes(path) is None
    path.write_text(json.dumps([{"total_size": 3}, {"total_size": 4}]))
    assert _no_memory.held_bytes(path) == 7


@pytest.mark.soak
def test_tf32_rounds_nothing_on_a_cpu(tmp_path: Path) -> None:
    """Two runs, of which one asks for it, are equal; what products are off by is there."""
    found = _precisions.test(case_of(tmp_path, precision="tf32"))
    assert not found.wrong
    assert found.figures["losses apart, worst"] == 0
    assert 0 < found.figures["products apart from float64"]["TF32"] < _precisions.ROUNDED


@pytest.mark.parametrize(
    ("case", "plain", "rounded", "words"),
    [
        (GPU, 1e-6, 3e-4, ""),
        (GPU, 1e-6, 1e-6, "products in TF32 are off by 1e-06 of themselves, expected more than 1e-05"),
        (GPU, 3e-4, 3e-4, "products in fp32 are off by 0.0003 of themselves, expected less than 1e-05"),
        (case_of(), 1e-6, 3e-4, "products in TF32 are off by 0.0003 of themselves, expected less than 1e-05"),
    ],
)
def test_products_are_judged_where_they_round(case: Case, plain: float, rounded: float, words: str) -> None:
    """On a GPU by TF32, where the run asks for it, and nowhere else."""
    assert _precisions.odd_products(case, fp32=plain, TF32=rounded) == ([words] if words else [])


def test_only_the_test_of_tf32_may_round_to_it() -> None:
    """All others run with an environment that forbids it."""
    without = {test.name: test.without for tests in SLICES.values() for test in tests if test.without}
    assert without == {"TF32": ("NVIDIA_TF32_OVERRIDE",)}


@pytest.mark.parametrize("number", ["4", "5", "6"])
def test_slices_that_train_large_models_fit_their_nine_minutes(number: str) -> None:
    """Each of their tests may use all of its limit, as it takes turns with others for as long as that."""
    assert sum(test.seconds for test in SLICES[number]) <= 9 * 60 - 15

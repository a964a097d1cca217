"""Slices 4 and 5 of a day on a GPU, tiny, on the CPU; and what is judged on GPUs alone, of figures that are made up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import _checkpoint
import _offload
import _repeated
import _throughput
import _trace
import _ways
import attrs
import pytest
import torch
import torch.distributed as dist
from _big_models import FULL, TINY
from _case import Case, Found
from _device_memory import DeviceMemory
from _offload import Cost
from _other_models import Plain, Transformers
from _padded import NO_LABEL, Batch, Batches
from _throughput import Turn
from _trace import DeviceEvent, copied_seconds, hidden_share, idle_share, launches, trace
from _ways import OURS, OURS_COMPILED, PLAIN, TRANSFORMERS, Compiled, Step, job_of
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public, but torch's own types don't say so

from mimo.trainer.runtime import RankMemory


def case_of(folder: Path = Path(), device: str = "cpu", **options: Any) -> Case:
    """Return a case."""
    return Case(device=torch.device(device), tiny=True, folder=folder, options=options)


GPU = case_of(device="cuda:0")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave this process as it was: trainers make a group of one, and settle how torch computes."""
    threads, cudnn = torch.get_num_threads(), (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    if dist.is_initialized():
        dist.destroy_process_group()


KERNEL, UP, DOWN = "gemm", "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"
WITHIN, SET = "Memcpy DtoD (Device -> Device)", "Memset (Device)"


def test_what_a_gpu_did_is_added_up() -> None:
    """Of several streams: what overlaps counts once, and copies within the device and memory that is set are none."""
    events = [
        DeviceEvent(KERNEL, 0, 2),
        DeviceEvent(KERNEL, 1, 3),
        DeviceEvent(KERNEL, 4, 6),
        DeviceEvent(UP, 2, 5),
        DeviceEvent(DOWN, 5.5, 8),
        DeviceEvent(WITHIN, 6, 9),
        DeviceEvent(SET, 6, 10),
    ]
    assert launches(events) == 3
    assert idle_share(events) == pytest.approx(1 - 5 / 10)
    assert copied_seconds(events) == pytest.approx(5.5)
    assert hidden_share(events) == pytest.approx((1 + 1 + 0.5) / 5.5)
    assert (idle_share([]), hidden_share(events[:3])) == (1, 0), "what was not seen is not good"


def test_what_the_profiler_saw_of_the_device_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds; nothing of the host, and no range that somebody has named."""

    def event(name: str, kind: DeviceType, *, named: bool = False) -> Any:
        times = SimpleNamespace(start=1e6, end=3e6)
        return SimpleNamespace(name=name, device_type=kind, is_user_annotation=named, time_range=times)

    class Profiler:
        def __init__(self, **_keys: object) -> None: ...

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            gpu, cpu = DeviceType.CUDA, DeviceType.CPU
            return [event(KERNEL, gpu), event("cudaLaunchKernel", cpu), event("Optimizer.step", gpu, named=True)]

    monkeypatch.setattr(_trace, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    done: list[int] = []
    assert trace(GPU, lambda: done.append(1)) == [DeviceEvent(KERNEL, 1.0, 3.0)]
    assert trace(case_of(), lambda: done.append(2)) == ()
    assert done == [1, 2]


def test_memory_is_counted_beside_what_was_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, from the moment at which counting begins."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: asked.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 1000)
    assert DeviceMemory(GPU).peak() == 700
    assert asked == ["empty", "reset"]
    assert DeviceMemory(case_of()).peak() is None


def test_the_optimizer_on_the_host_trains_as_on_the_device() -> None:
    """Estimates are there; what only a GPU has is left out by name."""
    found = _offload.test(case_of())
    assert not found.wrong
    assert found.figures["left out"].startswith("copies beside computation")
    assert set(found.figures["estimated bytes of the host"]) == {"distributed", "cpu-offload"}


def test_the_optimizer_on_the_host_is_judged_on_a_gpu() -> None:
    """By copies beside computation, by the bytes that it saves, and by losses."""
    plain = Cost(losses=[2.0], seconds=1, bytes=1000, estimate=RankMemory(weights=900), events=())
    events = [DeviceEvent(KERNEL, 0, 8), DeviceEvent(UP, 0, 10)]
    ours = Cost(losses=[2.0], seconds=1, bytes=500, estimate=RankMemory(weights=400), events=events)
    assert _offload.compare(plain, ours).wrong == []
    slow = attrs.evolve(ours, events=[DeviceEvent(KERNEL, 0, 7), DeviceEvent(UP, 0, 10)], bytes=400, losses=[2.1])
    assert _offload.compare(plain, slow).wrong == [
        "a loss is off by 0.05 of itself, allowed 0.01",
        "0.7 of the time of copies is beside computation, at least 0.8",
        "600 bytes are saved, estimated 500, allowed 0.1 of that apart",
    ]


def test_an_optimizer_that_fails_leaves_what_the_other_came_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a GPU may come only once: what was measured is in its results, whatever fails later."""
    cost = Cost(losses=[2.0], seconds=1.5, bytes=60, estimate=RankMemory(weights=50), events=())

    def measure(_case: Case, optimizer: Mapping[str, Any]) -> Cost:
        if optimizer["plugin"] == "cpu-offload":
            raise RuntimeError("no such device")
        return cost

    monkeypatch.setattr(_offload, "measure", measure)
    found = _offload.test(GPU)
    assert found.wrong == ["cpu-offload: RuntimeError: no such device"]
    assert found.figures["distributed"]["seconds a step"] == cost.seconds
    assert found.figures["distributed"]["measured bytes of the device"] == cost.bytes


def test_a_checkpoint_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    """Weights and moments, after training has changed them."""
    found = _checkpoint.test(case_of(tmp_path))
    assert not found.wrong
    assert found.figures["tensors"] > 3 * 10
    assert found.figures["left out"].startswith("the stall is not judged")


@pytest.mark.parametrize(
    ("device", "keys", "words"),
    [
        ("cuda:0", {}, []),
        ("cuda:0", {"first": 10.5}, ["the first save stalls training for 10.5 s, allowed 10"]),
        ("cuda:0", {"again": 1.5}, ["a save stalls training for 1.5 s, allowed 1"]),
        ("cpu", {"first": 10.5, "again": 1.5}, []),
        ("cpu", {"weights": 5 * 10**9}, ["13000000000 bytes are saved, at least 15000000000 expected: "]),
        ("cpu", {"size": 11 * 10**9}, ["11000000000 bytes are saved, at least 12000000000 expected: "]),
    ],
)
def test_a_checkpoint_is_judged_by_its_size_and_its_stalls(device: str, keys: dict[str, Any], words: list[str]) -> None:
    """The stall of the first one too; on a GPU alone, where there is something to copy from."""
    full = attrs.evolve(case_of(device=device), tiny=False)
    usual = {"size": 13 * 10**9, "weights": 4 * 10**9, "first": 5.0, "again": 0.2}
    found = _checkpoint.bounds_missed(full, **{**usual, **keys})
    assert len(found) == len(words)
    assert all(line.startswith(start) for line, start in zip(found, words, strict=True)), found


def test_a_checkpoint_with_other_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one number in one tensor, as where it was changed before it was copied."""
    save = _checkpoint.Training.save

    def change_first(self: Any, saver: Any) -> float:
        _, value = list(_checkpoint.tensors_of(self.trainer.state()))[3]
        value.view(-1)[1] += 1
        return save(self, saver)

    monkeypatch.setattr(_checkpoint.Training, "save", change_first)
    (wrong,) = _checkpoint.test(case_of(tmp_path)).wrong
    assert wrong.startswith("1 tensors have other bits, as language.")


def rates(*, model: str = "text", decoder: str = "decoder", compiled: Compiled = "none") -> Found:
    """Return what the comparison finds, tiny, on the CPU."""
    return _throughput.test(case_of(model=model, decoder=decoder, compiled=compiled))


@pytest.mark.parametrize(
    ("model", "decoder", "modules"), [("text", "decoder", 1), ("pictures", "decoder", 2), ("text", "hf-decoder", 1)]
)
def test_all_ways_train_on_the_same_samples(model: str, decoder: str, modules: int) -> None:
    """Their rows are as many, step by step; what only a GPU has is left out by name."""
    found = rates(model=model, decoder=decoder)
    assert not found.wrong
    rows = found.figures["rows of timed steps"]
    assert set(rows) == {OURS, TRANSFORMERS, PLAIN}
    assert found.figures[OURS]["rows a second"] > 0
    assert found.figures["left out"] == _throughput.LEFT_OUT
    job = job_of(case_of(), pictures=model == "pictures", decoder=decoder)
    assert (len(job.modules), job.language.spec.name) == (modules, decoder)


def test_a_way_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and so is one that reads other samples, or whose loss is odd."""

    class Fails:
        compiled = False

        def step(self, _number: int) -> Step:
            raise RuntimeError("no memory left")

        def close(self) -> None: ...

    class Odd:
        compiled = False

        def step(self, number: int) -> Step:
            return Step(1.0, number)

        def close(self) -> None: ...

    makes = {OURS: Fails, TRANSFORMERS: Odd, PLAIN: Odd}
    monkeypatch.setattr(_throughput, "ways", lambda *_args, **_keys: makes)
    found = rates()
    assert found.wrong[0] == "ours: RuntimeError: no memory left"
    assert set(found.wrong[1:]) == {
        f"{name}: a loss is 1, that of equal chances 6.24" for name in (TRANSFORMERS, PLAIN)
    }
    assert set(found.figures["rows of timed steps"]) == {TRANSFORMERS, PLAIN}


BUSY, LAZY = ([DeviceEvent(KERNEL, 0, end), DeviceEvent(UP, 0, 10)] for end in (9, 8))


def turn(rate: int, held: int, events: Sequence[DeviceEvent] = BUSY, *, compiled: bool = False) -> Turn:
    """Return a turn that is made up."""
    steps = [Step(6.0, rate)]
    return Turn(steps=steps, seconds=1.0, bytes=held, events=events, compiled=compiled, operations=30.0, peak=100.0)


def test_rates_are_judged_on_a_gpu() -> None:
    """Beside transformers, by the time without kernels, and by memory beside the estimate."""
    theirs = [turn(100, 0)] * 3
    good = [turn(110, 105), turn(100, 105), turn(90, 105)]
    assert _throughput.bounds_missed({OURS: good, TRANSFORMERS: theirs}, 100) == []
    assert _throughput.bounds_missed({OURS: [turn(95, 111, LAZY)] * 3, TRANSFORMERS: theirs}, 100) == [
        "no kernel runs in 0.2 of the time of ours, allowed 0.15",
        "ours has 0.95 times the rows a second of transformers, at least 1",
        "ours holds 111 bytes at most, estimated 100, allowed 0.1 of that apart",
    ]
    for held, compiled, fits in ((111, True, False), (109, True, True), (50, True, True), (89, False, False)):
        ours = [turn(110, held, compiled=compiled)] * 3
        missed = _throughput.bounds_missed({OURS: ours, TRANSFORMERS: theirs}, 100)
        assert (missed == []) == fits, "what is compiled may hold less, and no more"
    figures = _throughput.figures_of(good, good[0])
    assert figures["rows a second"] == 100
    assert figures["share of the device's peak (MFU)"] == pytest.approx(0.3)
    assert figures["kernels a step"] == 1 / _throughput.TRACED
    assert figures["idle share"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        (turn(100, 60, compiled=True), []),
        (turn(99, 60, compiled=True), ["ours, compiled has 0.99 times the rows a second of ours, at least 1"]),
        (turn(100, 60, LAZY, compiled=True), ["no kernel runs in 0.2 of the time of ours, compiled, allowed 0.15"]),
        (
            turn(100, 111, compiled=True),
            ["ours, compiled holds 111 bytes at most, estimated 100, allowed 0.1 of that apart"],
        ),
    ],
)
def test_ours_compiled_is_judged_beside_ours(compiled: Turn, words: list[str]) -> None:
    """Which is judged beside transformers: it alone is named where it falls behind."""
    turns = {OURS: [turn(100, 100)], TRANSFORMERS: [turn(90, 0)], OURS_COMPILED: [compiled]}
    assert _throughput.bounds_missed(turns, 100) == words
    turns[TRANSFORMERS] = [turn(200, 0)]
    slow = "ours has 0.5 times the rows a second of transformers, at least 1"
    assert _throughput.bounds_missed(turns, 100) == [slow, *words]


@pytest.mark.parametrize(
    ("which", "compiled"),
    [
        ("none", {OURS: False, TRANSFORMERS: False, PLAIN: False}),
        ("all", {OURS: True, TRANSFORMERS: True, PLAIN: True}),
        ("ours-too", {OURS: False, TRANSFORMERS: False, PLAIN: False, OURS_COMPILED: True}),
    ],
)
def test_each_way_is_compiled_as_asked(
    which: Compiled, compiled: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All, none, or ours once more; ours has the decoder that was asked for."""
    monkeypatch.setattr(_ways, "Ours", lambda _case, **keys: (keys["decoder"], keys["compiled"]))
    monkeypatch.setattr(_ways, "Loop", lambda _case, _model, **keys: (None, keys["compiled"]))
    makes: Mapping[str, Any] = _ways.ways(case_of(), pictures=False, compiled=which, decoder="hf-decoder")
    decoders = {name: "hf-decoder" if name in {OURS, OURS_COMPILED} else None for name in compiled}
    assert {name: make() for name, make in makes.items()} == {
        name: (decoders[name], each) for name, each in compiled.items()
    }


def test_what_is_compiled_without_the_setting_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours then is no way; with it, it is the setting that compiles."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(_ways, "make_job", lambda _case, **keys: asked.append(keys))
    _ways.job_of(case_of(), pictures=False, compiled=True)
    assert asked[0]["compile"] is True
    for known in (False, True):
        monkeypatch.setattr(_ways, "knows_compile", lambda _case, known=known: known)
        assert (OURS in _ways.ways(case_of(), pictures=False, compiled="all", decoder="decoder")) == known


def take(*, pictures: bool) -> list[Batch]:
    """Return the microbatches of the first step."""
    batches = Batches(job_of(case_of(), pictures=pictures), pins=False)
    found = batches.take(1)
    batches.close()
    return found


def test_padded_batches_hold_the_samples() -> None:
    """Ids and labels where no padding is; rows of pictures, of which none has a label, in their places."""
    (first, *_) = take(pictures=True)
    one = first.pictures
    assert one is not None
    assert int(first.slots.sum()) == int(one.seen.sum()) == len(one.index) == int(one.grids.prod(1).sum())
    assert first.rows == int(first.seen.sum())
    assert not (first.slots & ~first.seen).any()
    assert (first.labels[first.slots | ~first.seen] == NO_LABEL).all()
    labelled = first.labels != NO_LABEL
    assert torch.equal(first.labels[labelled], first.tokens[labelled])
    assert first.count == int(labelled[:, 1:].sum())
    assert len({int(each.sum()) for each in first.seen}) > 1, "all are equally long, so that nothing is padded"


@pytest.mark.parametrize("pictures", [False, True])
@pytest.mark.parametrize("model", [Plain, Transformers])
def test_padding_changes_no_loss(model: type[Plain | Transformers], pictures: bool) -> None:
    """Of other models as of ours: more of it, with whatever it holds, leaves the loss as it is."""
    torch.manual_seed(0)
    built = model(TINY, pictures=pictures)
    (batch, *_) = take(pictures=pictures)

    def widened(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 3), value=value)

    wider = attrs.evolve(
        batch,
        tokens=widened(batch.tokens, 5),
        labels=widened(batch.labels, NO_LABEL),
        seen=widened(batch.seen, False),
        slots=widened(batch.slots, False),
    )
    with torch.no_grad():
        assert float(built(wider)) == pytest.approx(float(built(batch)), rel=1e-5)


def test_models_have_as_many_weights_as_ours() -> None:
    """A billion in the decoder, on the meta device."""
    with torch.device("meta"):
        plain, theirs = (
            sum(each.numel() for each in model(FULL, pictures=True).parameters()) for model in (Plain, Transformers)
        )
    assert plain == pytest.approx(theirs, rel=1e-3)
    assert 1.4e9 < plain < 1.6e9


def test_ours_and_transformers_have_the_same_llama() -> None:
    """The library's own config says so of both, but for a cache that nobody asks for in training."""
    with torch.device("meta"):
        theirs = Transformers(FULL, pictures=False).language.config.to_dict()
    full = attrs.evolve(case_of(), tiny=False)
    ours: Any = job_of(full, pictures=False, decoder="hf-decoder").language.config
    assert ours.library().to_dict() == {**theirs, "use_cache": True}


def test_two_runs_are_the_same_to_the_bit() -> None:
    """Of text, and of pictures."""
    found = _repeated.test(case_of())
    assert not found.wrong
    assert set(found.figures) == {"text", "pictures"}


def test_a_bit_that_differs_is_found() -> None:
    """Also in the sign of zero."""
    one = _repeated.Outcome(losses=[1.0], norms=[2.0], state={"a": torch.zeros(3), "b": torch.ones(2)})
    assert _repeated.differing(one, one) == []
    other = attrs.evolve(one, losses=[1.0000000000000002], state={"a": -torch.zeros(3), "b": torch.ones(2)})
    assert _repeated.differing(one, other) == ["losses", "a"]

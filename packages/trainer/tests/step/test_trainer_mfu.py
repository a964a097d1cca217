"""Operations of a step, and their share of the ranks' peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from mimo.hooks import ConfigError
from mimo.model import DECODER, LANGUAGE_MODELS
from mimo.optimizer import Precision
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.operations import Operations, module_operations
from mimo.trainer.cost.peak import known_peak, peak_of
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve
from mimo.trainer.step import step_info
from mimo.trainer.step.step_info import FlopsReport

CPU = torch.device("cpu")
HIDDEN, LAYERS, INNER, VOCABULARY = 16, 4, 24, 300
LENGTHS = (3, 4, 5, 6)  # of "ab" and on, with the end of the text
LABELS = sum(LENGTHS) - len(LENGTHS)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Resolve a language model over two stages, two lanes and two tensor ranks, with overrides."""
    lines = tmp_path / "train.jsonl"
    lines.write_text("".join(f'{{"text": "{"abcde"[: length - 1]}"}}\n' for length in LENGTHS))
    config = {"hidden": HIDDEN, "layers": LAYERS, "heads": 2, "intermediate": INNER, "vocabulary": VOCABULARY}
    table = {
        "run": {"name": "told", "steps": 1, "global_batch": 4, "micro_batch": 1},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "modules": {"language": {"plugin": "decoder", "ranks": "0-7", "pp": 2, "tp": 2, "config": config}},
    }
    return lambda *overrides, **more: resolve(make_settings(table, overrides), **more)


def reported(job: Job, seconds: float = 2.0, device: torch.device = CPU) -> Any:
    """Return the metrics of the language model in a step of so many seconds over all samples."""
    assert job.train is not None
    data = StepData.cut(job, job.train, range(4), microbatches=job.microbatches)
    layouts = [layout for microbatch in data.microbatches for layout in microbatch.layouts]
    samples = SampleStats.of_layouts(job, layouts)
    assert samples.labels == LABELS
    return FlopsReport(job, device=device).of(samples, seconds=seconds).get("language")


def layers_forward() -> int:
    """Return the operations of the layers: products with weights, and attention to half of the pairs."""
    weights = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    pairs = sum(length * length for length in LENGTHS) / 2
    return round(LAYERS * (2 * sum(LENGTHS) * weights + 2 * 2 * pairs * HIDDEN))


def head_forward() -> int:
    """Return those of the head, which reads only rows with labels."""
    return 2 * LABELS * HIDDEN * VOCABULARY


def test_a_step_counts_forward_and_twice_as_much_backward(job: Callable[..., Job]) -> None:
    """Of all stages and lanes, each once; a second of the step, and a rank of eight."""
    found = reported(job())
    assert found.model_operations == 3 * (layers_forward() + head_forward())
    assert found.hardware_operations == found.model_operations
    assert found.model_flops == found.hardware_flops == pytest.approx(found.model_operations / 2 / 8)
    assert (found.mfu, found.hfu) == (None, None)


def test_steps_of_equal_samples_are_counted_once(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """And each step gets what its own samples come to, whichever came before."""
    run, counted = job(), list[SampleStats]()
    assert run.train is not None
    layouts = [run.lay_out(run.train, sample) for sample in range(4)]
    short, long = SampleStats.of_layouts(run, layouts[:2]), SampleStats.of_layouts(run, layouts[2:])
    expected = [FlopsReport(run, device=CPU).of(samples, seconds=1.0) for samples in (short, long)]

    def counting(one: Job, name: str, samples: SampleStats) -> Operations:
        counted.append(samples)
        return module_operations(one, name, samples)

    monkeypatch.setattr(step_info, "module_operations", counting)
    report = FlopsReport(run, device=CPU)
    again = SampleStats.of_layouts(run, layouts[2:])
    found = [report.of(samples, seconds=1.0) for samples in (short, long, again, short)]
    assert found == [*expected, expected[1], expected[0]]
    assert counted == [short, long, short]


def test_recomputation_counts_as_work_of_the_hardware_alone(job: Callable[..., Job]) -> None:
    """All layers once more, or attention alone."""
    model = 3 * (layers_forward() + head_forward())
    full, selective = (reported(job(f"modules.language.recompute={way}")) for way in ("full", "selective"))
    assert full.model_operations == selective.model_operations == model
    assert full.hardware_operations == model + layers_forward()
    pairs = sum(length * length for length in LENGTHS) / 2
    assert selective.hardware_operations == model + LAYERS * 4 * pairs * HIDDEN
    assert full.hardware_flops == pytest.approx(full.hardware_operations / 2 / 8)


def test_what_is_frozen_has_no_weight_gradients(job: Callable[..., Job]) -> None:
    """Gradients pass a frozen head; before the first part that trains there is no backward."""
    head = reported(job('modules.language.frozen=["head"]'))
    assert head.model_operations == 3 * layers_forward() + 2 * head_forward()
    layers = reported(job('modules.language.frozen=["embedding","layers"]', "modules.language.recompute=full"))
    assert layers.model_operations == layers.hardware_operations == layers_forward() + 3 * head_forward()


def test_shares_are_of_the_peak_that_settings_give(job: Callable[..., Job]) -> None:
    """In units of 10^12 operations a second and rank."""
    found = reported(job("run.peak_tflops=0.5", "modules.language.recompute=full"))
    assert found.mfu == pytest.approx(found.model_flops / 0.5e12)
    assert found.hfu == pytest.approx(found.hardware_flops / 0.5e12)
    assert found.hfu > found.mfu > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("-1", "run.peak_tflops: expected a finite number of 0 or more, got -1"),
        ("nan", "run.peak_tflops: expected a number, got nan"),
        ("inf", "run.peak_tflops: expected a finite number of 0 or more, got inf"),
        ("fast", "run.peak_tflops: expected a number, got 'fast'"),
    ],
)
def test_a_peak_that_can_not_be_is_refused(job: Callable[..., Job], value: str, text: str) -> None:
    """Before launch, by its path."""
    with pytest.raises(ConfigError) as caught:
        job(f"run.peak_tflops={value}")
    assert str(caught.value).startswith(text)


def test_a_module_whose_plugin_counts_no_flops_is_left_out(job: Callable[..., Job]) -> None:
    """Nothing is guessed."""

    def find(kind: Any, name: str, where: str) -> Any:
        if kind.group == LANGUAGE_MODELS.group:
            return attrs.evolve(DECODER, flops=None)
        return find_installed(kind, name, where)

    assert reported(job(find=find)) is None


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 80GB HBM2e", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", 0),
        ("NVIDIA A10G", "bf16", 0),
        ("NVIDIA GB200", "bf16", 0),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", 0),
    ],
)
def test_peaks_of_well_known_gpus(name: str, precision: Precision, tera: float) -> None:
    """By the words of their names; what only looks like one of them is unknown."""
    assert known_peak(name, precision) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 494.5),
        ("NVIDIA H100 80GB HBM3", 494.5),
        ("NVIDIA H100 PCIe", 378),
        ("NVIDIA H100 NVL", 417.5),
        ("NVIDIA A100-SXM4-80GB", 156),
        ("Tesla V100-SXM2-16GB", 15.7),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 0),
    ],
)
def test_products_in_fp32_that_read_tf32_have_a_peak_of_their_own(name: str, tera: float) -> None:
    """Of dense products; a GPU without TF32 has the one of fp32, and bf16 has its own either way."""
    assert known_peak(name, "fp32", tf32=True) == tera * 1e12
    assert known_peak(name, "bf16", tf32=True) == known_peak(name, "bf16")


@pytest.mark.parametrize(
    ("overrides", "tera"),
    [
        ((), 67),
        (("run.tf32=true",), 494.5),
    ],
)
def test_shares_are_of_the_peak_of_what_products_read(
    overrides: tuple[str, ...], tera: float, job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `run.tf32` the share is not that of a peak that products in fp32 exceed."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    found = reported(job(*overrides), device=torch.device("cuda", 0))
    assert found.mfu == pytest.approx(found.model_flops / (tera * 1e12))


def test_settings_go_before_what_is_known_of_a_gpu(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run's precision, here fp32; nothing is known of a CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    gpu = torch.device("cuda", 0)
    plain, given = job().settings.run, job("run.peak_tflops=2").settings.run
    assert (peak_of(plain, gpu), peak_of(plain, CPU)) == (67e12, 0)
    assert peak_of(given, gpu) == peak_of(given, CPU) == 2e12

"""What a run computes in: refused where a module's optimizer can't, counted in bytes of messages and weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from mimo.hooks import ConfigError, Kind, RunError
from mimo.model import ENCODERS, EncoderSpec, LanguageModelSpec
from mimo.optimizer import OPTIMIZERS
from mimo.optimizer.runtime import LossScale
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.settings import RunSettings
from mimo.trainer.config.toml import make_settings
from mimo.trainer.cost.memory import estimate_memory
from mimo.trainer.cost.profile import layout_of
from mimo.trainer.cost.sample_stats import SampleStats
from mimo.trainer.cost.step_cost import formula_costs
from mimo.trainer.job import precision as _precision
from mimo.trainer.job.job import Job
from mimo.trainer.job.precision import make_scaling, set_numerics, unrepeatable_refused
from mimo.trainer.resolving.resolve import resolve
from mimo.trainer.step.traffic import expect_traffic


@attrs.frozen(kw_only=True)
class EyeConfig:
    """Settings of an encoder of one product."""

    width: int = 8


def _unused(*_arguments: Any) -> Any:
    raise AssertionError(_arguments)


EYE = EncoderSpec(
    name="eye",
    config=EyeConfig,
    measure=_unused,
    rows=lambda _config, _size: 1,
    prepare=_unused,
    build=lambda config, hidden: nn.Linear(config.width, hidden),
)


def find_halves(kind: Kind[Any], name: str, where: str) -> Any:
    """Find an optimizer ``halves`` that takes bf16, ``any`` that takes all, and otherwise what is installed."""
    if kind is ENCODERS:
        return EYE
    if kind is not OPTIMIZERS or name not in {"halves", "any"}:
        return find_installed(kind, name, where)
    precisions = frozenset({"fp32", "bf16"} if name == "halves" else {"fp32", "bf16", "fp16"})
    return attrs.evolve(find_installed(kind, "adamw", where), name=name, precisions=precisions)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Resolve a language model of two stages with overrides."""
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"text": "hello"}\n' * 8)
    table = {
        "run": {"name": "r", "steps": 10, "global_batch": 8, "micro_batch": 2},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "tokenizer": {"plugin": "byte"},
        "modules": {
            "vision": {"plugin": "eye", "ranks": "0"},
            "language": {"plugin": "decoder", "ranks": "0-1", "pp": 2, "config": {"hidden": 32, "layers": 2}},
        },
    }
    return lambda *overrides: resolve(make_settings(table, overrides), find=find_halves)


@pytest.mark.parametrize(
    ("overrides", "able", "text"),
    [
        (
            ("run.precision=bf16",),
            ["halves", "others"],
            (
                "run.precision: expected 'fp32', as the optimizer of vision ('adamw') and language ('adamw') allows "
                "nothing else, got 'bf16'. Set optimizer.plugin to one that allows it: 'halves' or 'others'."
            ),
        ),
        (
            ("run.precision=fp16", "optimizer.plugin=any", "modules.vision.optimizer.plugin=halves"),
            [],
            (
                "run.precision: expected 'fp32' or 'bf16', as the optimizer of vision ('halves') allows nothing else, "
                "got 'fp16'. None that is installed allows it."
            ),
        ),
        (
            ("run.precision=bf16", "optimizer.plugin=any", "modules.vision.optimizer.plugin=adamw"),
            ["halves"],
            (
                "run.precision: expected 'fp32', as the optimizer of vision ('adamw') allows nothing else, got 'bf16'. "
                "Set modules.vision.optimizer.plugin to one that allows it: 'halves'."
            ),
        ),
        (
            ("run.precision=bf16", "modules.vision.optimizer.plugin=adamw"),
            ["halves"],
            (
                "run.precision: expected 'fp32', as the optimizer of vision ('adamw') and language ('adamw') allows "
                "nothing else, got 'bf16'. Set modules.vision.optimizer.plugin and optimizer.plugin to one that allows "
                "it: 'halves'."
            ),
        ),
        (
            ("run.precision=bf16", "optimizer.plugin=any", "run.loss_scale=8"),
            [],
            (
                "run.loss_scale: expected 0, as only fp16 scales its loss and run.precision is 'bf16', got 8.0. "
                "Leave it out."
            ),
        ),
        (
            ("run.loss_scale_steps=8",),
            [],
            (
                "run.loss_scale_steps: expected 0, as only fp16 scales its loss and run.precision is 'fp32', got 8. "
                "Leave it out."
            ),
        ),
        (
            ("run.precision=fp16", "optimizer.plugin=any", "run.loss_scale=inf"),
            [],
            (
                "run.loss_scale: expected 0, or a number from 2^-16 to 2^32, got inf. "
                "Leave it out: steps find the right one."
            ),
        ),
    ],
)
def test_what_an_optimizer_has_no_weights_for_is_refused(
    overrides: tuple[str, ...],
    able: list[str],
    text: str,
    job: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules and those plugins that could do it are named; so is a loss scale that nothing would use."""
    spec = find_halves(OPTIMIZERS, "any", "")
    installed = {name: attrs.evolve(spec, name=name) for name in able}
    monkeypatch.setattr(_precision, "discover", lambda _kind, where: installed)
    with pytest.raises(ConfigError) as raised:
        job(*overrides)
    assert str(raised.value) == text


def test_bytes_follow_what_layers_compute_in(job: Callable[..., Job]) -> None:
    """Messages and activations but logits halve; reductions are of fp32; weights are there as layers take them too."""
    full, half = job(), job("run.precision=bf16", "optimizer.plugin=any")
    costs, halved = formula_costs(full), formula_costs(half)
    assert halved.message_bytes == {name: size // 2 for name, size in costs.message_bytes.items()}
    assert any(costs.message_bytes.values())
    assert isinstance(full.language.spec, LanguageModelSpec)
    stats, ids = SampleStats.of(full), full.language.spec.vocabulary(full.language.config)
    logits = 4 * ids * stats.labels // len(stats.lengths) * full.settings.run.micro_batch
    for stage, cost in costs.stages.items():
        kept = logits if stage == full.graph.stages[-1] else 0
        assert halved.stages[stage].activations == pytest.approx((cost.activations + kept) / 2, abs=1)
        assert halved.stages[stage].reduce == cost.reduce
    for one, other in zip(expect_traffic(full, 1), expect_traffic(half, 1), strict=True):
        assert [size // 2 for size in one.traffic.bytes_sent] == list(other.traffic.bytes_sent)
    after = estimate_memory(half)
    for rank, memory in estimate_memory(full).items():
        held, working = after[rank].activations, after[rank].in_turn
        assert after[rank] == attrs.evolve(memory, gathered=memory.weights // 2, activations=held, in_turn=working)
        assert held < memory.activations


def test_a_profile_is_of_one_precision(job: Callable[..., Job]) -> None:
    """Seconds and bytes of another would be others."""
    assert layout_of(job())["vision"]["precision"] == "fp32"
    assert layout_of(job("run.precision=bf16", "optimizer.plugin=any"))["vision"]["precision"] == "bf16"


def test_only_fp16_scales_its_loss() -> None:
    """It begins at 2^16 and doubles after 2,000 steps, or as the settings say."""
    run = RunSettings(name="r", steps=1, global_batch=1)
    assert make_scaling(run) is None
    assert make_scaling(attrs.evolve(run, precision="bf16")) is None
    assert make_scaling(attrs.evolve(run, precision="fp16")) == LossScale(scale=65536.0, growth_steps=2000)
    own = attrs.evolve(run, precision="fp16", loss_scale=8.0, loss_scale_steps=5)
    assert make_scaling(own) == LossScale(scale=8.0, growth_steps=5)


@pytest.fixture
def numerics() -> Iterator[None]:
    """Put back how torch computes."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("numerics")
def test_torch_computes_as_the_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and convolutions round to TF32 or do not; a run that asks for nothing changes nothing more."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for tf32, products in ((False, "highest"), (True, "high")):
        set_numerics(RunSettings(name="r", steps=1, global_batch=1, tf32=tf32))
        assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (tf32, products)
    assert not torch.are_deterministic_algorithms_enabled()
    set_numerics(RunSettings(name="r", steps=1, global_batch=1, deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_numerics(RunSettings(name="r", steps=1, global_batch=1))
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("numerics")
def test_what_cannot_be_repeated_is_named() -> None:
    """By the setting that forbids it, and by the operation; other errors are nobody's business."""
    run = RunSettings(name="r", steps=1, global_batch=1, deterministic=True)
    set_numerics(run)
    text = (
        r"^run\.deterministic: expected operations that give the same bits each time, got put_ does not have a "
        r"deterministic implementation\. Set it to false, or leave out"
    )
    with pytest.raises(RunError, match=text), unrepeatable_refused(run):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
    with pytest.raises(RuntimeError, match="out of luck"), unrepeatable_refused(run):
        raise RuntimeError("out of luck")
    with pytest.raises(RuntimeError, match=r"^put_"), unrepeatable_refused(attrs.evolve(run, deterministic=False)):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))

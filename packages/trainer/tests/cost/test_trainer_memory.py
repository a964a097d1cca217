"""What ranks will hold and send, by what a plugin estimates of shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from mimo.hooks import ConfigError, Kind
from mimo.launch import ranks_of_machine
from mimo.optimizer import OPTIMIZERS
from mimo.optimizer.estimates import (
    Estimates,
    LaidBytes,
    Lanes,
    Numbers,
    PartShapes,
    SentBytes,
    StateBytes,
    SteppedShapes,
    replicated,
)
from mimo.topology import StageId
from mimo.trainer.commands.main import run
from mimo.trainer.commands.tables.memory import show_memory, show_on_device
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.toml import make_settings, read_settings
from mimo.trainer.cost.memory import RankMemory, estimate_memory
from mimo.trainer.cost.step_cost import ACCELERATOR, formula_costs
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve

HIDDEN, VOCABULARY = 8, 300


class Asked:
    """An optimizer's estimates that record what they get; half of the state is in host memory."""

    def __init__(self) -> None:
        self.parts: list[PartShapes] = []
        self.stepped: list[SteppedShapes] = []
        self.numbers: list[Numbers] = []

    def laid(self, part: PartShapes, _config: Any) -> LaidBytes:
        """Return round figures of a part, and of what it takes while it computes."""
        self.parts.append(part)
        inside = 10 + len(part.parameters)
        return attrs.evolve(replicated(part), weights=1000, gathered_inside=inside, gradients_inside=inside)

    def state(self, stepped: SteppedShapes, _config: Any) -> StateBytes:
        """Return as many bytes as there are parameters."""
        self.stepped.append(stepped)
        return StateBytes(device=len(stepped.pieces), host=2**20 * len(stepped.pieces))

    def sent(self, numbers: Numbers, _config: Any) -> SentBytes:
        """Return different bytes for each moment of sending."""
        self.numbers.append(numbers)
        return SentBytes(step=numbers.trained, forward=1e9, backward=2e9, grad_accumulation=3e9)

    def find(self, kind: Kind[Any], name: str, where: str) -> Any:
        """Find the plugin under the name of ``adamw``."""
        found = find_installed(kind, name, where)
        if kind is not OPTIMIZERS:
            return found
        estimates = Estimates(laid=self.laid, state=self.state, sent=self.sent)
        return attrs.evolve(found, estimates=estimates, shard_lanes=lambda _config: 2)


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """Settings of a language model of two stages on four lanes of two tensor ranks."""
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"text": "hello"}\n' * 8)
    config = {"hidden": HIDDEN, "layers": 4, "heads": 2, "intermediate": 6, "vocabulary": VOCABULARY}
    return {
        "run": {"name": "r", "steps": 1, "global_batch": 8, "micro_batch": 1},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "modules": {"language": {"plugin": "decoder", "ranks": "0-15", "pp": 2, "tp": 2, "config": config}},
    }


@pytest.fixture
def job(table: dict[str, Any]) -> Callable[..., tuple[Job, Asked]]:
    """Resolve the job of the table with overrides, with a plugin that records its calls."""

    def resolved(*overrides: str) -> tuple[Job, Asked]:
        asked = Asked()
        return resolve(make_settings(table, overrides), find=asked.find), asked

    return resolved


def test_a_plugin_estimates_what_it_will_be_given(job: Callable[..., tuple[Job, Asked]]) -> None:
    """Pieces of tensor ranks, layers by number, and the index of this rank among its lanes."""
    made, asked = job('modules.language.frozen=["embedding"]')
    memory = estimate_memory(made)
    assert len(asked.parts) == 16
    first = {one.name: one for one in asked.parts[0].parameters}
    embedding = first["language.embedding.weight"]
    assert (embedding.shape, embedding.ranks, embedding.total) == ((VOCABULARY // 2, HIDDEN), 2, VOCABULARY * HIDDEN)
    assert (embedding.trained, embedding.layer, embedding.experts, embedding.tied) == (False, None, False, False)
    layers = {one.layer for one in first.values()}
    assert layers == {None, 0, 1}
    assert [part.lanes for part in asked.parts[:8:2]] == [
        Lanes(size=2, index=index, copies=2) for index in (0, 1, 0, 1)
    ]
    trained = sum(one.trained for one in first.values())
    assert memory[0].state == len(asked.stepped[0].pieces) == trained == len(first) - 1
    assert asked.stepped[0].on_accelerator
    assert memory[0].host == 2**20 * trained


def test_each_pattern_estimates_its_own(job: Callable[..., tuple[Job, Asked]]) -> None:
    """Each rule's parameters by themselves, on a processor or not."""
    made, asked = job('optimizer.patterns."*norm*".lr=0.5', "run.device=cpu")
    estimate_memory(made)
    norms, others = asked.stepped[1].pieces, asked.stepped[0].pieces
    if "norm" in others[0].name:
        norms, others = others, norms
    assert all("norm" in one.name for one in norms)
    assert not any("norm" in one.name for one in others)
    assert not asked.stepped[0].on_accelerator


@pytest.mark.parametrize(
    ("schedule", "gradients"),
    [(["schedule.plugin=interleaved"], 1), (["schedule.plugin=zero-bubble", "schedule.form=v"], 2)],
)
def test_a_rank_computes_one_stage_at_a_time(
    schedule: list[str], gradients: int, job: Callable[..., tuple[Job, Asked]]
) -> None:
    """What a stage takes while it computes counts for one of them; gradients that wait for a second part, for all."""
    made, asked = job("modules.language.chunks=2", "modules.language.ranks=0-7", *schedule)
    memory = estimate_memory(made)
    inside = sorted(10 + len(part.parameters) for part in asked.parts[:2])
    whole = sum(replicated(part).gradients for part in asked.parts[:2])
    assert memory[0].weights == 2000
    assert memory[0].gathered == inside[-1]
    assert memory[0].gradients == whole + sum(inside[-gradients:])


@pytest.mark.parametrize(("pipelines", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_tied_parameter_has_a_copy_on_another_stage(
    pipelines: str, chunks: int, job: Callable[..., tuple[Job, Asked]]
) -> None:
    """On the ranks of the first and of the last stage, where these are others."""
    made, asked = job(
        f"schedule.plugin={pipelines}", f"modules.language.chunks={chunks}", "modules.language.config.tied=true"
    )
    estimate_memory(made)
    tied = [one.name for part in asked.parts[:1] for one in part.parameters if one.tied]
    assert tied == ["language.embedding.weight"]


def test_experts_stand_on_their_own_lanes(job: Callable[..., tuple[Job, Asked]]) -> None:
    """As few as their copies; biases that no gradient trains stay whole."""
    made, asked = job(
        "modules.language.config.experts=4", "modules.language.config.expert_bias_rate=0.1", "modules.language.ep=4"
    )
    estimate_memory(made)
    part = asked.parts[0]
    assert (part.lanes.size, part.expert_lanes) == (2, Lanes(size=2, copies=1))
    experts = [one for one in part.parameters if one.experts]
    assert {one.shape[0] for one in experts} == {1}
    assert {one.ranks for one in experts} == {4}
    whole = [one for one in part.parameters if one.whole]
    assert whole
    assert not any(one.trained for one in whole)


def test_costs_hold_what_is_sent_where_it_is_sent(job: Callable[..., tuple[Job, Asked]]) -> None:
    """Once a step with the reduction, and with each pass what that sends, whatever it is over."""
    made, asked = job()
    cost = formula_costs(made).stages[StageId("language", 0)]
    assert cost.forward.fixed == pytest.approx(2e9 / ACCELERATOR.bandwidth, rel=1e-3)  # of experts too
    assert cost.input_gradient.fixed == pytest.approx(4e9 / ACCELERATOR.bandwidth, rel=1e-3)
    assert cost.weight_gradient.fixed == pytest.approx(6e9 / ACCELERATOR.bandwidth, rel=1e-3)
    dense, experts = asked.numbers[0], asked.numbers[1]
    assert cost.reduce == pytest.approx(dense.trained / ACCELERATOR.bandwidth + ACCELERATOR.latency)
    assert (dense.lanes, dense.number_bytes, dense.all) == (Lanes(size=2, copies=2), 4, dense.trained)
    assert experts.trained == 0


def test_costs_distinguish_experts_from_the_rest(job: Callable[..., tuple[Job, Asked]]) -> None:
    """They are reduced over their own copies, of which there are fewer."""
    made, asked = job("modules.language.config.experts=4", "modules.language.ep=4", 'modules.language.frozen=["head"]')
    formula_costs(made)
    experts = asked.numbers[1]
    assert experts.lanes == Lanes(size=2, copies=1)
    assert experts.trained == 2 * 4 * 3 * HIDDEN * 6 / 4  # of two layers
    last = asked.numbers[2]
    assert last.all - last.trained == VOCABULARY * HIDDEN / 2


MEBIBYTE = 2**20


def texts(memory: dict[int, RankMemory], world: int, machine: int) -> list[str]:
    """Return the lines that are shown of memory."""
    console = Console(width=120)
    with console.capture() as shown:
        for part in show_memory(memory, world, machine):
            console.print(part)
    return [" ".join(line.split()) for line in shown.get().splitlines()]


def test_ranks_that_hold_the_same_are_shown_together() -> None:
    """Host memory only where there is any, and then of each machine, which may have ranks that are idle."""
    held = RankMemory(
        weights=3 * MEBIBYTE,
        gradients=2 * MEBIBYTE,
        state=MEBIBYTE,
        activations=5 * MEBIBYTE,
        in_turn=2 * MEBIBYTE,
    )
    lines = texts({0: held, 1: held, 3: attrs.evolve(held, gathered=MEBIBYTE)}, 4, 2)
    assert lines == [
        "ranks weights gathered gradients optimizer activations on the device",
        "0-1 3.0 MiB 0.0 MiB 2.0 MiB 1.0 MiB 5.0 MiB 9.0 MiB",
        "3 3.0 MiB 1.0 MiB 2.0 MiB 1.0 MiB 5.0 MiB 10.0 MiB",
    ]
    hosted = attrs.evolve(held, host=4 * MEBIBYTE)
    lines = texts({0: hosted, 1: hosted, 2: hosted, 3: hosted, 5: held}, 6, 2)
    assert lines[0].endswith("on the device in host memory")
    assert lines[3:] == ["machines ranks host memory of each", "2 0-3 8.0 MiB", "1 4-5 0.0 MiB"]


def test_bounds_are_called_bounds() -> None:
    """Where only the run decides what lies where."""
    memory = RankMemory(weights=MEBIBYTE, state=MEBIBYTE, host=MEBIBYTE, at_most=True)
    assert show_on_device(memory) == "at most 2.0 MiB"
    assert show_on_device(attrs.evolve(memory, at_most=False)) == "about 2.0 MiB"
    assert any("by trial" in line for line in texts({0: memory}, 1, 1))


def test_the_ranks_of_a_machine_are_all_unless_the_environment_says_otherwise() -> None:
    """``LOCAL_WORLD_SIZE`` is torchrun's name for it."""
    assert ranks_of_machine({}, 16) == 16
    assert ranks_of_machine({"LOCAL_WORLD_SIZE": "8"}, 16) == 8
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE: expected 1 or more, got 0"):
        ranks_of_machine({"LOCAL_WORLD_SIZE": "0"}, 16)
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE: expected a whole number, got 'eight'"):
        ranks_of_machine({"LOCAL_WORLD_SIZE": "eight"}, 16)


def test_check_shows_memory_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen bytes for each number that AdamW steps, and no host memory."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 2)
    path = tmp_path / "text.toml"
    path.write_text(
        f"""
        run = {{ name = "text", steps = 1, global_batch = 2, directory = "{tmp_path}/run" }}
        data = {{ plugin = "jsonl", path = "{tmp_path}/train.jsonl" }}
        modules.language = {{ plugin = "decoder", ranks = "0-1", config = {{ hidden = 256, layers = 2, heads = 2 }} }}
        """
    )
    (held,) = set(estimate_memory(resolve(read_settings(path))).values())
    assert held.gradients == held.weights
    assert 2 * held.weights < held.state < 2.01 * held.weights
    assert run(["check", str(path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("0-1  "))
    counts = (held.weights, 0, held.gradients, held.state, held.activations, held.device)
    assert line.split()[1::2] == [f"{count / MEBIBYTE:,.1f}" for count in counts]

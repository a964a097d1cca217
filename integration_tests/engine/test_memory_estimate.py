"""What `mimo check` says of parameters, gradients and optimizer state, beside what there is: to the byte."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import tomli_w
from cases import Modules, in_turn
from commands import here
from house import ROOT
from jobs import CPU, make_job
from tables import Table, scheduled, table, world_of
from test_oracle import SIGMOID, SOFTMAX, SP, on
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from mimo.testing import Pool
from mimo.topology.meshes import gradient_of
from mimo.trainer import Trainer
from mimo.trainer.runtime import RankMemory, estimate_memory
from mimo_optimizer_distributed._fsdp import Group
from mimo_optimizer_hybrid.optimizer import HybridDeviceOptimizer


def size_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the storages of tensors, each once, padding and all."""
    plain = [value.to_local() if isinstance(value, DTensor) else value for value in tensors if value is not None]
    return sum({storage._cdata: storage.nbytes() for storage in (one.untyped_storage() for one in plain)}.values())


class Watch:
    """The most that a rank has gathered, and the most gradients that it holds, seen wherever it computes.

    A message that is on its way counts as what it will be, not as what carries it.
    """

    def __init__(self, trainer: Trainer) -> None:
        found = gc.get_objects()
        self._fsdp = [one for one in found if isinstance(one, FSDPParamGroup)]
        self._groups = [one for one in found if isinstance(one, Group)]
        self._parameters = [
            one for module in trainer.optimizer.modules.values() for one in module.part.parameters.values()
        ]
        self.gathered = self.gradients = 0

    def look(self) -> None:
        """Take down what there is now."""
        self.gathered = max(self.gathered, sum(map(self._gathered, self._fsdp)))
        held = [gradient_of(one) for one in self._parameters]
        for group in self._groups:
            held += group._sums.values()
        for one in (one for group in self._fsdp for one in group.fsdp_params):
            held.append(one.unsharded_accumulated_grad)
            if hasattr(one, "_unsharded_param"):
                held.append(one._unsharded_param.grad)
        self.gradients = max(self.gradients, size_of(held))

    @staticmethod
    def _gathered(group: FSDPParamGroup) -> int:
        there = size_of(output for one in group.fsdp_params for output in one.all_gather_outputs)
        on_its_way = None if group._all_gather_result is None else group._all_gather_result.all_gather_output
        return there or size_of([on_its_way])

    def after(self, inner: Callable[[Group], None]) -> Callable[[Group], None]:
        """Look whenever something has been gathered, in a forward or a backward."""

        def gathered(group: Group) -> None:
            inner(group)
            self.look()

        return gathered

    @contextmanager
    def bounds(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        """Look as a computation ends, and once more when the optimizer's context of it has ended."""
        with inner:
            yield
            self.look()
        self.look()


def watched(trainer: Trainer) -> tuple[Watch, ExitStack]:
    """Return a watch over all computations of a rank, and what ends it."""
    watch, patches = Watch(trainer), ExitStack()

    def around(inner: Any) -> Any:
        return lambda *given, **named: watch.bounds(inner(*given, **named))

    for program in trainer.programs:
        for name in ("on_compute", "on_grad_accumulation"):
            patches.enter_context(patch.object(program, name, around(getattr(program, name))))
    for name in ("gather", "wait"):
        patches.enter_context(patch.object(Group, name, watch.after(getattr(Group, name))))
    return watch, patches


def measure(rank: int, settings: Table) -> tuple[RankMemory, RankMemory]:
    """Do a step; return what the rank was said to hold, and what it held."""
    job = make_job(settings)
    estimate = estimate_memory(job).get(rank, RankMemory())
    trainer = Trainer(job, rank=rank, device=CPU)
    watch, patches = watched(trainer)
    with patches:
        stats = trainer.accumulate(1)
        watch.look()
    trainer.update(1, stats)
    weights = size_of(value for held in trainer.optimizer.weights().values() for value in held.values())
    state = host = 0
    for module in trainer.optimizer.modules.values():
        for one in (stepper.optimizer for stepper in module.steppers):
            if isinstance(one, HybridDeviceOptimizer):
                state, host = state + one.held.device, host + one.held.host
            else:
                state += size_of(value for states in one.state.values() for value in states.values())
    held = RankMemory(weights=weights, gathered=watch.gathered, gradients=watch.gradients, state=state, host=host)
    return estimate, held


FLOW = {"height": 4, "width": 6, "patch": 2, "hidden": 24, "layers": 2, "heads": 2, "intermediate": 37}
LAYOUTS: Mapping[str, Modules] = {
    "one rank": {"vision": on(0, 0), "language": on(0, 0)},
    "lanes": {"vision": on(0, 2), "language": on(0, 1)},
    "tensor ranks": {"vision": on(0, 1), "language": on(0, 3, tp=2, **SP)},
    "context ranks": {"vision": on(0, 1), "language": on(0, 3, cp=2)},
    "pipelines": {"vision": on(0, 3, pp=2), "language": on(0, 3, pp=2)},
    "frozen": {"vision": on(0, 1, frozen=["encoder"]), "language": on(0, 1)},
    "LoRA": {
        "vision": on(0, 1, frozen=["layers.*.bias"]),
        "language": on(0, 3, pp=2, lora={"rank": 2, "targets": ["layers.[02].*"]}),
    },
    "a generator": {
        "vision": on(0, 0),
        "language": on(0, 1),
        "drawer": on(0, 3, tp=2, fed_by="language", plugin="flow", config=FLOW),
    },
}
PLUGINS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"plugin": "adamw"},
    "optimizer": {"plugin": "distributed", "shard": "optimizer"},
    "gradients": {"plugin": "distributed", "shard": "gradients"},
    "full": {"plugin": "distributed", "shard": "full"},
    "full, one layer at a time": {"plugin": "distributed", "shard": "full", "overlap_param_gather": False},
    "muon": {"plugin": "muon", "shard": "full"},
    "hybrid 0.3": {"plugin": "cpu-offload", "shard": "gradients", "fraction": 0.3, "bucket_bytes": 2048},
    "hybrid 1": {"plugin": "cpu-offload", "shard": "optimizer", "fraction": 1.0, "bucket_bytes": 2048},
    "hybrid 0.6, whole": {"plugin": "cpu-offload", "shard_lanes": 1, "fraction": 0.6, "bucket_bytes": 2048},
}


def _is_measured(kind: attrs.Attribute[Any], _count: int) -> bool:
    return kind.name not in ("activations", "in_turn")


def check(settings: Table, pool: Pool, *, slack: float = 0) -> None:
    """Refuse a rank that holds anything else than it was said to.

    Args:
        settings: of the job.
        pool: runs it.
        slack: by what share the estimate of gradients may exceed what there is.
    """
    settings["run"]["device"] = "cpu"
    found = pool.run(world_of(settings), measure, settings)
    wrong = []
    for rank, (estimate, held) in enumerate(found):
        for kind, count in attrs.asdict(estimate, filter=_is_measured).items():
            there = getattr(held, kind)
            most = there * (1 + slack) if kind == "gradients" else there
            if not there <= count <= most:
                wrong.append(f"rank {rank}, {kind}: told {count:,}, held {there:,}")
    assert not wrong, "\n".join(wrong)
    assert any(held.weights for _, held in found)


@pytest.mark.parametrize(("layout", "plugin"), in_turn(LAYOUTS, list(PLUGINS)))
def test_ranks_hold_what_they_were_said_to(layout: str, plugin: str, pool: Pool) -> None:
    """Parameters, what is gathered of them, gradients and state, of uneven pieces too."""
    settings = table(LAYOUTS[layout], microbatches=4)  # so that backwards of all stages of a rank take turns
    settings["optimizer"] |= PLUGINS[plugin]
    check(settings, pool)


EXPERTS: Mapping[str, Modules] = {
    "ep2 over lanes": {"vision": on(0, 1), "language": on(0, 3, ep=2)},
    "ep4 over lanes": {"vision": on(0, 1), "language": on(0, 3, ep=4)},
    "ep2 over tensor ranks": {"vision": on(0, 1), "language": on(0, 3, tp=2, ep=2)},
    "etp2": {"vision": on(0, 1), "language": on(0, 3, etp=2)},
    "etp2, LoRA": {"vision": on(0, 1), "language": on(0, 3, etp=2, lora={"rank": 2, "targets": ["*"]})},
}


@pytest.mark.parametrize(("layout", "plugin"), in_turn(EXPERTS, ["full", "optimizer", "muon", "hybrid 0.3", "adamw"]))
def test_experts_count_on_lanes_of_their_own(layout: str, plugin: str, pool: Pool) -> None:
    """They may have fewer lanes than the parameters beside them, or none; what other code changes stays whole."""
    settings = table(EXPERTS[layout], microbatches=2, language=SIGMOID if "tensor" in layout else SOFTMAX)
    settings["optimizer"] |= PLUGINS[plugin]
    check(settings, pool)


@pytest.mark.parametrize(
    ("plugin", "how"),
    in_turn(["gradients", "full", "hybrid 0.3", "hybrid 1"], [("zb-v", 0.5), ("interleaved", 0.2), ("1f1b", 0)]),
)
def test_a_tied_parameter_counts_once_on_each_rank(plugin: str, how: tuple[str, float], pool: Pool) -> None:
    """The first and the last stage hold a copy each, or one together where both are on one rank.

    Where plans have several stages of a rank, the estimate of gradients is a bound: the largest stage may not be the
    last to add its own, and with backwards in two parts all are taken to have added theirs.
    """
    schedule, slack = how
    modules = {"vision": on(0, 1), "language": on(0, 3, pp=2)}
    settings = scheduled(table(modules, microbatches=4, language={"tied": True}), schedule)
    settings["optimizer"] |= PLUGINS[plugin]
    check(settings, pool, slack=slack)


@pytest.mark.parametrize("plugin", ["optimizer", "gradients", "full", "muon", "hybrid 1"])
def test_copies_are_spread_over_some_lanes(plugin: str, pool: Pool) -> None:
    """Over two of four lanes, each rank holds twice as much as over all."""
    settings = table({"vision": on(0, 3), "language": on(0, 3)}, microbatches=2)
    settings["optimizer"] |= {**PLUGINS[plugin], "shard_lanes": 2}
    check(settings, pool)


@pytest.mark.parametrize(
    ("plugin", "layout"), in_turn(["optimizer", "gradients", "full", "hybrid 0.3"], ["lanes", "one rank"])
)
def test_layers_in_bf16_compute_with_copies(plugin: str, layout: str, pool: Pool) -> None:
    """Half as wide as what they are copies of; one lane alone has them too."""
    settings = table(LAYOUTS[layout], microbatches=4)
    settings["run"]["precision"] = "bf16"
    settings["optimizer"] |= PLUGINS[plugin]
    check(settings, pool)


@pytest.mark.parametrize("plugin", ["optimizer", "gradients", "full", "hybrid 0.3"])
def test_sums_beside_a_backward_hold_no_more(plugin: str, pool: Pool) -> None:
    """Gradients that are on their way to other lanes while layers compute are messages."""
    settings = table(LAYOUTS["lanes"], microbatches=4)
    settings["optimizer"] |= {**PLUGINS[plugin], "overlap_grad_reduce": True}
    check(settings, pool, slack=math.inf)


def test_parameters_that_follow_another_plugin_have_its_state(pool: Pool) -> None:
    """They lie as their module's others do, and only what steps them is another."""
    settings = table(LAYOUTS["lanes"], microbatches=2)
    settings["optimizer"] |= {"plugin": "muon", "shard": "full"}
    settings["optimizer"]["patterns"] = {
        "language.layers.*": {"plugin": "cpu-offload", "fraction": 0.5, "bucket_bytes": 1024},
        "*.bias": {"plugin": "adamw"},
        "vision.*norm*": {"lr": 1e-4},
    }
    check(settings, pool)


def test_what_a_trial_divides_is_estimated_by_its_bounds(pool: Pool) -> None:
    """Neither host nor device holds more, and it is said that these are bounds."""
    settings = table(LAYOUTS["lanes"], microbatches=2)
    settings["run"]["device"] = "cpu"
    settings["optimizer"] |= {"plugin": "cpu-offload", "fraction": "auto", "bucket_bytes": 2048}
    for estimate, held in pool.run(world_of(settings), measure, settings):
        assert estimate.at_most
        assert held.state <= estimate.state
        assert held.host <= estimate.host
        sizes = attrs.evolve(estimate, state=0, host=0, activations=0, in_turn=0, at_most=False)
        assert sizes == attrs.evolve(held, state=0, host=0)


def test_the_page_of_optimizers_shows_what_check_prints(tmp_path: Path) -> None:
    """Its table of memory is what `mimo check` prints of its settings."""
    page = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8").partition("## Memory")[2]
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 4)
    settings = {
        "run": {"name": "page", "steps": 2, "global_batch": 4, "device": "cpu", "evaluation_interval": 0},
        "data": {"plugin": "jsonl", "path": "train.jsonl"},
    }
    blocks = re.findall(r"```(?:toml)?\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my.toml").write_text(f"{tomli_w.dumps(settings)}\n{blocks[0]}", encoding="utf-8")
    printed = here("check", "my.toml", cwd=tmp_path).printed
    shown = "\n".join(line.rstrip() for line in printed.splitlines())
    assert f"\n\n{blocks[1].strip()}\n\n" in shown

"""Environments in which commands are started, against device, rank, machine and master; or what is said of them.

Slurm's variables are those that its steps have: srun's tasks, batch scripts, and shells of salloc.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice

import attrs
import pytest
from torch._C._distributed_c10d import HashStore

from mimo.hooks import ConfigError
from mimo.launch import Gpus, choose_device, find_gpus, is_joining, local_world, process_from, with_slurm
from mimo.launch.process.slurm import nodes, tasks_of_node
from mimo.launch.start.launcher import _prefix, name_run

Environ = dict[str, str]

TORCHRUN = {
    "RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500",
}  # fmt: skip
JOB = {"SLURM_JOB_ID": "8652", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_JOB_NUM_NODES": "2"}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "2", "SLURM_STEPID": "2", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[01-02]", "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}  # fmt: skip
"""Task 11 of 16 on two nodes, as srun starts it; from a login node, which is none of them."""
ONE_NODE = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu01",
    "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_PROCID": "3", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip
BATCH = {
    **JOB,
    "SLURM_NTASKS": "16", "SLURM_NPROCS": "16", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip
"""A batch script, which is no task of a step."""
SHELL = {
    **BATCH,
    "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "gpu01",
}  # fmt: skip
"""The shell that salloc opens on a node."""


@attrs.frozen(kw_only=True)
class Start:
    """How a command starts: as rank of a world that somebody else started, or the whole run by itself."""

    device: str
    rank: int | None = None
    local_rank: int | None = None
    world: int
    here: int
    master: str = ""


def start(environ: Mapping[str, str], *, world: int, gpus: Gpus, device: str = "auto") -> Start:
    """Return how a command starts, put together as the launcher does."""
    environ = with_slurm(environ)
    kind = choose_device(device, world, gpus=gpus, environ=environ)
    here = local_world(environ, world)
    if not is_joining(environ):
        return Start(device=kind, world=world, here=here)
    process = process_from(environ, kind, gpus=gpus.visible)
    master = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return Start(
        device=process.device,
        rank=process.rank,
        local_rank=process.local_rank,
        world=process.world,
        here=here,
        master=master,
    )


def without(environ: Environ, *names: str) -> Environ:
    """Return an environment that lacks some variables."""
    return {name: value for name, value in environ.items() if name not in names}


MASK = {"CUDA_VISIBLE_DEVICES": "0"}
SLURM_PORT = 20_000 + (8652 * 61 + 2) % 10_000
OF_TWO_NODES = Start(
    device="cuda:3", rank=11, local_rank=3, world=16, here=8, master=f"gpu01:{SLURM_PORT}"
)  # fmt: skip
OF_ONE_NODE = Start(device="cuda:3", rank=3, local_rank=3, world=4, here=4, master=f"127.0.0.1:{SLURM_PORT}")

STARTS = {
    "nothing, no GPU": ({}, 4, 0, Start(device="cpu", world=4, here=4)),
    "nothing, one GPU": ({}, 1, 1, Start(device="cuda", world=1, here=1)),
    "nothing, a GPU for each": ({}, 4, 4, Start(device="cuda", world=4, here=4)),
    "nothing, GPUs hidden": ({"CUDA_VISIBLE_DEVICES": ""}, 4, 0, Start(device="cpu", world=4, here=4)),
    "torchrun": (TORCHRUN, 16, 8, attrs.evolve(OF_TWO_NODES, master="gpu01:29500")),
    "torchrun, no GPU": (TORCHRUN, 16, 0, attrs.evolve(OF_TWO_NODES, device="cpu", master="gpu01:29500")),
    "torchrun, a mask for each": (
        {**TORCHRUN, **MASK}, 16, 1, attrs.evolve(OF_TWO_NODES, device="cuda:0", master="gpu01:29500"),
    ),
    "torchrun inside srun": ({**STEP, **TORCHRUN}, 16, 8, attrs.evolve(OF_TWO_NODES, master="gpu01:29500")),
    "srun": (STEP, 16, 8, OF_TWO_NODES),
    "srun, no GPU": (without(STEP, "SLURM_GPUS_ON_NODE"), 16, 0, attrs.evolve(OF_TWO_NODES, device="cpu")),
    "srun, master given": ({**STEP, "MASTER_ADDR": "gpu01-ib"}, 16, 8, attrs.evolve(
        OF_TWO_NODES, master=f"gpu01-ib:{SLURM_PORT}"
    )),
    "srun, master and port given": (
        {**STEP, "MASTER_ADDR": "gpu01-ib", "MASTER_PORT": "1234"}, 16, 8,
        attrs.evolve(OF_TWO_NODES, master="gpu01-ib:1234"),
    ),
    "srun --gpus-per-task=1": ({**STEP, **MASK, "SLURM_GPUS_PER_TASK": "1"}, 16, 1, attrs.evolve(
        OF_TWO_NODES, device="cuda:0"
    )),
    "srun --gpus-per-task=2": ({**ONE_NODE, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 4, 8, OF_ONE_NODE),
    "srun, queued again": ({**STEP, "SLURM_RESTART_COUNT": "2"}, 16, 8, attrs.evolve(
        OF_TWO_NODES, master=f"gpu01:{SLURM_PORT + 2 * 1009}"
    )),
    "srun, a RANK that nobody meant": ({**STEP, "RANK": "5"}, 16, 8, OF_TWO_NODES),
    "srun on one node": (ONE_NODE, 4, 4, OF_ONE_NODE),
    "srun, uneven nodes": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "8,4"}, 12, 4,
        attrs.evolve(OF_TWO_NODES, world=12, here=4),
    ),
    "srun, no tasks of the step": (without(STEP, "SLURM_STEP_TASKS_PER_NODE"), 16, 8, OF_TWO_NODES),
    "srun, --ntasks-per-node alone": (
        without(STEP, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), 16, 8, OF_TWO_NODES,
    ),
    "srun, the node's tasks given": ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "?", "LOCAL_WORLD_SIZE": "8"}, 16, 8,
        OF_TWO_NODES),
    "srun, one node and no more": (
        without(ONE_NODE, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"), 4, 4,
        OF_ONE_NODE,
    ),
    "srun -n1": ({**ONE_NODE, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 4, 4,
        Start(device="cuda", world=4, here=4)),
    "sbatch": (BATCH, 8, 8, Start(device="cuda", world=8, here=8)),
    "sbatch, no GPU": (BATCH, 8, 0, Start(device="cpu", world=8, here=8)),
    "sbatch, master exported for srun": ({**BATCH, "MASTER_ADDR": "gpu01"}, 8, 8, Start(
        device="cuda", world=8, here=8
    )),
    "salloc on the login node": (JOB, 2, 0, Start(device="cpu", world=2, here=2)),
    "salloc's shell on a node": (SHELL, 8, 8, Start(device="cuda", world=8, here=8)),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "world", "gpus", "expected"), STARTS.values(), ids=STARTS)
def test_each_environment_gives_device_rank_and_master(
    environ: Environ, world: int, gpus: int, expected: Start
) -> None:
    """Derived from what is there, the same on all ranks; only tasks that stand side by side join one run."""
    assert start(environ, world=world, gpus=Gpus(visible=gpus)) == expected


A_GPU_EACH = "run.device: expected a GPU for each of the"
TO_SRUN = "Start it with srun, a task for each GPU; or use fewer ranks, or set run.device=cpu."
OF_SRUN = "Give srun --gpus-per-task=1, or as many --gpus-per-node as --ntasks-per-node; or set run.device=cpu."
LOCAL = "Set LOCAL_WORLD_SIZE to the number of processes on each machine."
REFUSED = {
    "nothing, too few": ({}, 4, 2, (f"{A_GPU_EACH} 4 processes on this machine, got 2 that it can use. "
        "Use fewer ranks, or set run.device=cpu.")),
    "nothing, one of two": ({}, 2, 1, (f"{A_GPU_EACH} 2 processes on this machine, got 1 that it can use. "
        "Use fewer ranks, or set run.device=cpu.")),
    "torchrun, one for all": (TORCHRUN, 16, 1, (f"{A_GPU_EACH} 8 processes on this machine, got 1 that it can use. "
        "Use fewer ranks, or set run.device=cpu.")),
    "ranks alone": (
        without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), 16, 8,
        (f"{A_GPU_EACH} 16 processes on this machine, got 8 that it can use. "
        "Set LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun does, or set run.device=cpu."),
    ),
    "srun, one for all": ({**STEP, **MASK, "SLURM_GPUS_ON_NODE": "1"}, 16, 1,
        f"{A_GPU_EACH} 8 processes on this machine, got 1 that it can use. {OF_SRUN}"),
    "srun, some for all": ({**STEP, "CUDA_VISIBLE_DEVICES": "0,1"}, 16, 2,
        f"{A_GPU_EACH} 8 processes on this machine, got 2 that it can use. {OF_SRUN}"),
    "sbatch": (BATCH, 16, 8, f"{A_GPU_EACH} 16 processes on this machine, got 8 that it can use. {TO_SRUN}"),
    "salloc's shell": (SHELL, 16, 8, f"{A_GPU_EACH} 16 processes on this machine, got 8 that it can use. {TO_SRUN}"),
    "srun, nodes unreadable": (
        {**STEP, "SLURM_STEP_NODELIST": "bgp[000x733]"}, 16, 8,
        ("environment variable SLURM_STEP_NODELIST: expected nodes such as gpu[01-03,7],login1, got 'bgp[000x733]'. "
        "Set MASTER_ADDR to the node of rank 0."),
    ),
    "srun, no nodes": (without(STEP, "SLURM_STEP_NODELIST"), 16, 8,
        ("environment variable MASTER_ADDR: expected where rank 0 is to be met, got nothing, and no "
        "SLURM_STEP_NODELIST. Set it to the node of rank 0.")),
    "srun, no job": (without(STEP, "SLURM_JOB_ID"), 16, 8,
        ("environment variable MASTER_PORT: expected the port on which rank 0 is to be met, got nothing, and "
        "SLURM_JOB_ID=''. Set it.")),
    "srun, queued again who knows how often": ({**STEP, "SLURM_RESTART_COUNT": "?"}, 16, 8,
        "environment variable SLURM_RESTART_COUNT: expected a whole number, got '?'."),
    "srun, tasks unreadable": ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "8(x"}, 16, 8,
        (f"environment variable SLURM_STEP_TASKS_PER_NODE: expected tasks of at least 2 nodes, such as 2(x3),1, got "
        f"'8(x'. {LOCAL}")),
    "srun, no tasks": (
        without(STEP, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"), 16, 8,
        f"environment variable SLURM_STEP_TASKS_PER_NODE: expected how many tasks each node has, got nothing. {LOCAL}",
    ),
    "srun, no rank": (without(STEP, "SLURM_PROCID"), 16, 8,
        "environment variable SLURM_PROCID: expected a whole number, got nothing."),
    "srun, a rank of another step": ({**STEP, "SLURM_PROCID": "16"}, 16, 8,
        "environment variable SLURM_PROCID: expected less than 16, its tasks, got 16."),
    "srun, a rank that is no number": ({**STEP, "SLURM_PROCID": "9" * 5000}, 16, 8,
        "environment variable SLURM_PROCID: expected a whole number, got '999"),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "world", "gpus", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_neither_derived_nor_safe_is_refused_with_what_to_set(
    environ: Environ, world: int, gpus: int, text: str
) -> None:
    """By name, before anything is launched: never a silent fall to the CPU, nor a run for each task."""
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        start(environ, world=world, gpus=Gpus(visible=gpus))


def test_each_attempt_has_names_of_its_own_in_the_store() -> None:
    """Slurm's do under srun, where torchrun counts nothing: what is left of the attempt before may still answer."""
    environs: list[Environ] = [{}, {"SLURM_RESTART_COUNT": "1"}, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}]
    assert list(map(_prefix, environs)) == ["attempt_0", "attempt_1", "attempt_2"]


def test_each_run_that_a_program_joins_has_names_of_its_own_in_the_store() -> None:
    """Torchrun's agent serves one store to all of them; all count ranks the same way."""
    store = HashStore()
    first, second = ([name_run(store, rank, TORCHRUN) for rank in (0, 1)] for _ in range(2))
    assert (first, second) == (["attempt_0_run_1"] * 2, ["attempt_0_run_2"] * 2)


def test_gpus_that_torch_cannot_use_are_not_passed_over() -> None:
    """As with a torch for CPUs alone; whoever wants that says so."""
    gpus = Gpus(visible=0, present=8, torch="torch 2.13.0+cpu (built for no CUDA)")
    text = (
        "run.device: expected a GPU for each of the 4 processes on this machine, got none of this machine's 8 that "
        "torch 2.13.0+cpu (built for no CUDA) can use. Install a torch that is built for their driver, or set "
        "run.device=cpu."
    )
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=re.escape(text)):
            choose_device(device, 4, gpus=gpus, environ={})
    assert choose_device("cpu", 4, gpus=gpus, environ={}) == "cpu"
    for mask in ("", "-1", "NoDevFiles"):
        environ = {"CUDA_VISIBLE_DEVICES": mask}
        assert choose_device("auto", 4, gpus=gpus, environ=environ) == "cpu"
        with pytest.raises(ConfigError, match=re.escape(f"got none, as CUDA_VISIBLE_DEVICES={mask!r} hides them")):
            choose_device("cuda", 4, gpus=gpus, environ=environ)


def test_gpus_that_are_asked_for_must_be_there() -> None:
    """Nothing else takes their process."""
    with pytest.raises(ConfigError, match="expected a GPU for the process on this machine, got 0 that it can use"):
        choose_device("cuda", 1, gpus=Gpus(visible=0), environ={})


def test_torch_decides_which_gpus_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are its business; the machine itself is only looked at where it sees nothing."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = find_gpus()
    assert (found.visible, found.present) == (2, 0)
    assert found.torch.startswith("torch 2.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu[01-03,7],login1", ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]),
        ("n1", ["n1"]),
        ("rack[0-1]n[09-10]", ["rack0n09", "rack0n10", "rack1n09", "rack1n10"]),
        ("a[1-2]-ib,b.c", ["a1-ib", "a2-ib", "b.c"]),
        ("10-0-3-12", ["10-0-3-12"]),
    ],
)
def test_lists_of_nodes_are_read_without_slurm(text: str, expected: list[str]) -> None:
    """Zeros in front are kept, several brackets and what follows them too."""
    assert list(nodes(text)) == expected


def test_a_list_of_nodes_is_read_only_as_far_as_it_is_needed() -> None:
    """However many it names."""
    assert list(islice(nodes("n[1-999999999999]"), 2)) == ["n1", "n2"]


@pytest.mark.parametrize("text", ["", "a,,b", "a[", "a[]", "a[1-]", "a[x]", "a[2-1]", "a]", "a b", "a[1,[2]]", "$(id)"])
def test_other_lists_of_nodes_are_refused(text: str) -> None:
    """Before a node of it is taken for the first."""
    with pytest.raises(ConfigError, match=r"^environment variable SLURM_STEP_NODELIST: expected nodes such as"):
        nodes(text)


def test_tasks_of_each_node_are_counted() -> None:
    """In the short form that Slurm writes."""
    assert [tasks_of_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match=r"expected tasks of at least 5 nodes, such as 2\(x3\),1, got '2\(x3\),1'"):
        tasks_of_node("2(x3),1", 4)

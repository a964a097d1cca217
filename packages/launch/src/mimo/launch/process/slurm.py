"""What a task of Slurm's srun reads from its environment, in torchrun's names.

Variables as in srun's manual, "Output environment variables". A batch script and a shell of salloc have some of them
too, but are no tasks of a step: only what srun starts side by side joins one run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mimo.hooks import ConfigError

_SPECIAL_STEPS = 0xFFFFFFF0
"""Step ids from here on are Slurm's own: batch scripts, and the shells that salloc opens on a node."""
_PORTS = range(20_000, 30_000)  # below those that systems give to whoever asks for any
_LOOPBACK = "127.0.0.1"
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_TASKS_OF_NODES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NUMBER = r"[0-9]{1,18}"  # no more digits than fit
_RANGE = rf"{_NUMBER}(?:-{_NUMBER})?"
_NODES = re.compile(rf"(?:[\w.-]|\[{_RANGE}(?:,{_RANGE})*\])+")
_BRACKETS = re.compile(r"\[([^]]*)\]")
_COUNT = re.compile(rf"({_NUMBER})(?:\(x({_NUMBER})\))?")


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not re.fullmatch(_NUMBER, step) or int(step) >= _SPECIAL_STEPS:
        return False
    return number(environ, *_TASKS) > 1


def as_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of Slurm; what is set already stays as it is.

    Rank 0 is met on the first node of the step, or on the loopback where there is no other node, on a port that follows
    from the ids of job and step, and from how often the job was queued again.

    Raises:
        ConfigError: naming the variable that is missing or can't be read.
    """
    world, rank, local_rank = (
        number(environ, *_TASKS), number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID")
    )  # fmt: skip
    if rank >= world:
        raise ConfigError("environment variable SLURM_PROCID", expected=f"less than {world}, its tasks", got=str(rank))
    node = number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else None
    local_world = number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else _here(environ, world, node)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or (_LOOPBACK if local_world == world else _first_node(environ)),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_port(environ)),
    }


def nodes(text: str, name: str = "SLURM_STEP_NODELIST") -> Iterator[str]:
    """Yield the nodes of a list such as ``gpu[01-03,7],login1``, in its order.

    Args:
        text: the list.
        name: of the variable in which it stands.

    Raises:
        ConfigError: it can't be read; before anything is yielded.
    """
    parts = re.split(r",(?![^[]*\])", text)
    spans = [span.split("-") for found in _BRACKETS.findall(text) for span in found.split(",")]
    if not all(map(_NODES.fullmatch, parts)) or any(int(span[0]) > int(span[-1]) for span in spans):
        raise ConfigError(
            f"environment variable {name}",
            expected="nodes such as gpu[01-03,7],login1",
            got=repr(text),
            fix="Set MASTER_ADDR to the node of rank 0.",
        )
    return (node for part in parts for node in _expand(part))


def _expand(part: str) -> Iterator[str]:
    found = _BRACKETS.search(part)
    if found is None:
        yield part
        return
    before, after = part[: found.start()], part[found.end() :]
    for span in found[1].split(","):
        first, _, last = span.partition("-")
        for index in range(int(first), int(last or first) + 1):
            for rest in _expand(after):
                yield f"{before}{index:0{len(first)}}{rest}"


def tasks_of_node(text: str, node: int, name: str = "SLURM_STEP_TASKS_PER_NODE") -> int:
    """Return how many tasks a node has by a list such as ``2(x3),1``.

    Args:
        text: the list.
        node: counted from 0.
        name: of the variable in which it stands.

    Raises:
        ConfigError: it can't be read, or names no such node.
    """
    before = 0
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None:
            break
        before += int(found[2] or 1)
        if node < before:
            return int(found[1])
    raise ConfigError(
        f"environment variable {name}",
        expected=f"tasks of at least {node + 1} nodes, such as 2(x3),1",
        got=repr(text),
        fix="Set LOCAL_WORLD_SIZE to the number of processes on each machine.",
    )


def number(environ: Mapping[str, str], *names: str) -> int:
    """Return the whole number that the first of some variables holds.

    Raises:
        ConfigError: none of them is set, or it isn't a whole number.
    """
    name = next((each for each in names if each in environ), names[0])
    text = environ.get(name)
    if text is None or not re.fullmatch(_NUMBER, text):
        got = "nothing" if text is None else repr(text)
        raise ConfigError(f"environment variable {name}", expected="a whole number", got=got)
    return int(text)


def _here(environ: Mapping[str, str], world: int, node: int | None) -> int:
    """Return how many tasks this node has."""
    for name in _TASKS_OF_NODES:
        if name in environ and node is not None:
            return tasks_of_node(environ[name], node, name)
    if "SLURM_NTASKS_PER_NODE" in environ:
        return min(number(environ, "SLURM_NTASKS_PER_NODE"), world)
    if environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1":
        return world
    raise ConfigError(
        f"environment variable {_TASKS_OF_NODES[0]}",
        expected="how many tasks each node has",
        got="nothing",
        fix="Set LOCAL_WORLD_SIZE to the number of processes on each machine.",
    )


def _first_node(environ: Mapping[str, str]) -> str:
    if "SLURM_STEP_NODELIST" in environ:
        return next(nodes(environ["SLURM_STEP_NODELIST"]))
    raise ConfigError(
        "environment variable MASTER_ADDR",
        expected="where rank 0 is to be met",
        got="nothing, and no SLURM_STEP_NODELIST",
        fix="Set it to the node of rank 0.",
    )


def _port(environ: Mapping[str, str]) -> int:
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if not all(re.fullmatch(_NUMBER, text) for text in (job, step)):
        raise ConfigError(
            "environment variable MASTER_PORT",
            expected="the port on which rank 0 is to be met",
            got=f"nothing, and SLURM_JOB_ID={job!r}",
            fix="Set it.",
        )
    requeues = number(environ, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0
    # What is left of the attempt before may still listen on its port. Another job on the same machines is rarely a
    # multiple away, and steps of one job that run side by side never are.
    return _PORTS[(int(job) * 61 + int(step) + requeues * 1009) % len(_PORTS)]

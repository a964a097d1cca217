"""Names that files on disk have: what lies in a run directory, and the first keys of a checkpoint."""

from __future__ import annotations

from mimo.hooks import METRICS_FILE

CONFIG_FILE = "config.toml"
PLAN_FILE = "plan.json"
UNREADABLE_FILE = "metrics.unreadable"
"""Lines of the metrics that could not be read when the run was resumed."""
ATTEMPT_FILE = "attempt.json"
ERROR_FILE = "error.txt"
RERUN_FILE = "rerun.jsonl"
CHECKPOINTS = "checkpoints"
TRACES = "traces"
PROFILES = "profiles"


def memory_file(rank: int) -> str:
    """Return the name of the file with what the allocator of a rank's device held when it had no memory left."""
    return f"memory_rank{rank}.json"


COLLECTIVES = "collectives_rank*.json"
"""Names of `collectives_file`."""


def collectives_file(rank: int) -> str:
    """Return the name of the file with what a rank did with others when the run stood still."""
    return COLLECTIVES.replace("*", str(rank))


SIGNS_OF_A_RUN = (CONFIG_FILE, METRICS_FILE, CHECKPOINTS)
"""A directory with any of them holds a run; one that is merely locked holds none."""

OPTIMIZER = "optimizer"
"""First key of optimizer states, which go by the names of their parameters. A module's name is that of its weights."""
PROGRESS = "progress"
"""First key of the run's place: step, seed, and where its data and learning rates began."""
SETTINGS = "settings"
"""First key of the optimizer settings that each module was trained with."""
BUFFERS = "buffers"
"""First key of digests of modules' buffers: a checkpoint holds one of each, so that all ranks must have the same."""
IMPORTED = "imported"
"""First key of the published folders that modules came from, by module."""
BASE = "base"
"""First key of the checkpoint that holds what this one leaves out."""
RERUN = "rerun"
"""First key of the state of the rerun machine."""

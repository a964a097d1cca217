"""What tests of several packages share; for development only."""

from mimo.testing.failing import failing_files
from mimo.testing.once import made_once
from mimo.testing.pool import Pool
from mimo.testing.processes import COLUMNS, SECONDS, Ended, Started, free_port, script, start
from mimo.testing.ranks import RanksError, fork_ranks

__all__ = [
    "COLUMNS",
    "SECONDS",
    "Ended",
    "Pool",
    "RanksError",
    "Started",
    "failing_files",
    "fork_ranks",
    "free_port",
    "made_once",
    "script",
    "start",
]

"""What lies in a run directory, by name."""

from __future__ import annotations

CONFIG_FILE = "config.toml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
UNREADABLE_FILE = "metrics.unreadable"
"""What could not be read of the metrics of a run that was resumed."""
ATTEMPT_FILE = "attempt.json"
ERROR_FILE = "error.txt"
LOSS_PICTURE = "loss.png"
CHECKPOINTS = "checkpoints"
TRACES = "traces"
SIGNS_OF_A_RUN = (CONFIG_FILE, METRICS_FILE, CHECKPOINTS)
"""A directory with any of them holds a run; one that is merely locked holds none."""

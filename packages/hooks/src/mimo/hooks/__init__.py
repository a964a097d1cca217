"""What every mimo package shares: markers, discovery, lifecycle hooks, a few values, and errors."""

from mimo.hooks._bounds import check_at_most
from mimo.hooks._discovery import Kind, discover
from mimo.hooks._errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PlanError,
    PluginError,
    RestartNeededError,
    ResultRejectedError,
    RunError,
    SaveSkippedError,
    UserError,
)
from mimo.hooks._installed import PluginEntry, PluginFailure
from mimo.hooks._lifecycle import Lifecycle, lifecycle
from mimo.hooks._markers import hookimpl, hookspec
from mimo.hooks._registry import Registry
from mimo.hooks._shown import plain_text
from mimo.hooks._survey import survey
from mimo.hooks._values import (
    METRICS_FILE,
    Common,
    EdgeTraffic,
    EvaluationInfo,
    Flops,
    Generators,
    ItemInfo,
    OptimizerBytes,
    Owned,
    Prediction,
    RunInfo,
    Stateful,
    StateTree,
    StepInfo,
    parse_metrics,
    read_metrics,
)

__all__ = [
    "METRICS_FILE",
    "CheckpointError",
    "Common",
    "ConfigError",
    "DataError",
    "EdgeTraffic",
    "EvaluationInfo",
    "Flops",
    "Generators",
    "ItemInfo",
    "Kind",
    "Lifecycle",
    "OptimizerBytes",
    "Owned",
    "PlanError",
    "PluginEntry",
    "PluginError",
    "PluginFailure",
    "Prediction",
    "Registry",
    "RestartNeededError",
    "ResultRejectedError",
    "RunError",
    "RunInfo",
    "SaveSkippedError",
    "StateTree",
    "Stateful",
    "StepInfo",
    "UserError",
    "check_at_most",
    "discover",
    "hookimpl",
    "hookspec",
    "lifecycle",
    "parse_metrics",
    "plain_text",
    "read_metrics",
    "survey",
]

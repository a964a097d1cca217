"""Proofs that a plan does the whole step and cannot deadlock, and how much activations it keeps."""

from mimo.schedule.checker.activations import (
    ActivationMemory,
    ActorPeak,
    Peak,
    in_flight,
    peak_activations,
    stage_facts,
)
from mimo.schedule.checker.checker import check

__all__ = ["ActivationMemory", "ActorPeak", "Peak", "check", "in_flight", "peak_activations", "stage_facts"]

"""Proofs that a plan does the whole step and cannot deadlock, and how much activations it keeps."""

from mimo.schedule.checker.activations import ActorPeak, Keeping, Peak, in_flight, peak_activations, stage_facts
from mimo.schedule.checker.checker import check

__all__ = ["ActorPeak", "Keeping", "Peak", "check", "in_flight", "peak_activations", "stage_facts"]

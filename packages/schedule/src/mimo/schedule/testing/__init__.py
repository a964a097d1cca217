"""The emulator: runs a plan in one process with NCCL's ordering, for tests of schedules."""

from mimo.schedule.testing.emulator import EmulationResult, emulate
from mimo.schedule.testing.network import Peers

__all__ = ["EmulationResult", "Peers", "emulate"]

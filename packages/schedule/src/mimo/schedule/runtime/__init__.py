"""The torch half: boundaries that move rows between any two placements, and the executor of a plan."""

from mimo.schedule.runtime._boundary import Boundary, Pending
from mimo.schedule.runtime._channel import Channel, open_channels
from mimo.schedule.runtime._executor import LOSS, Executor, StageProgram

__all__ = ["LOSS", "Boundary", "Channel", "Executor", "Pending", "StageProgram", "open_channels"]
